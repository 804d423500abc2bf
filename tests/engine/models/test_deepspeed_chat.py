"""What DeepSpeed-Chat saved loads and is read as it meant it."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine.models.loading import load_policy, load_scorer, new_scorer
from scripts.harness.models import EOS, PAD
from scripts.harness.weights import full_state
from tests.distributed.harness import run_ranks
from tests.distributed.work_model_files import HEAD_SEED, what_they_say
from tests.engine.models.deepspeed_chat_models import deepspeed_chat_actor, deepspeed_chat_reward
from tests.engine.models.scored_rows import ROWS, batch, scores


@pytest.mark.slow
@torch.no_grad()
def test_the_models_of_deepspeed_chat_load_in_one_process_and_under_zero_3_on_two_ranks(tmp_path):
    made = {family: deepspeed_chat_reward(tmp_path / family, family) for family in ("opt", "llama")}
    actor, model = deepspeed_chat_actor(tmp_path / "actor")
    sequences, mask = batch()
    arguments = {
        "scorers": {family: path for family, (path, *_) in made.items()},
        "actors": {"actor": actor},
        "sequences": sequences,
        "attention_mask": mask,
    }
    fresh = tmp_path / "fresh"
    ranks = run_ranks(
        "tests.distributed.work_model_files:what_they_say", world=2, stage=3, fresh=(actor, str(fresh)), **arguments
    )
    for number, said in enumerate([*ranks, what_they_say(stage=0, **arguments)]):
        for family, (_, trunk, head) in made.items():
            # The token before the first pad token, which is not EOS here: EOS itself.
            expected = torch.stack([trunk(torch.tensor([row]))[0][0, -1] @ head for row in ROWS])
            found, state = said[family]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            if number != 1:  # weights are gathered on rank 0 alone
                weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
                assert torch.equal(weights.pop("score.weight")[0], head)
                torch.testing.assert_close(weights, dict(trunk.named_parameters()), rtol=0, atol=0)
        for row, found in zip(ROWS, said["actor"]):
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0, :-1], -1)
            expected = logprobs.gather(1, torch.tensor(row)[1:, None])[:, 0]
            torch.testing.assert_close(found[: len(row) - 1], expected, rtol=0, atol=1e-5)
    head = new_scorer(actor, torch.float32, PAD, HEAD_SEED).model.score.weight
    reopened = AutoModelForSequenceClassification.from_pretrained(fresh, dtype=torch.float32)
    assert torch.equal(reopened.score.weight, head)
    torch.testing.assert_close(reopened.base_model.state_dict(), model.base_model.state_dict(), rtol=0, atol=0)


@torch.no_grad()
def test_a_deepspeed_chat_reward_model_whose_pad_token_is_eos_is_read_before_eos(tmp_path):
    path, trunk, head = deepspeed_chat_reward(tmp_path, "opt", pad_is_eos=True)
    expected = torch.stack([trunk(torch.tensor([row]))[0][0, len(row) - 1 - (row[-1] == EOS)] @ head for row in ROWS])
    scorer = load_scorer(path, torch.float32)
    for left in (False, True):
        torch.testing.assert_close(scores(scorer, *batch(EOS, left)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "family, config, read_at_eos",
    [
        ("llama", {}, True),  # its running pad token was another one, "[PAD]" say
        ("llama", {"_name_or_path": "meta-llama/Llama-2-7b-hf"}, True),
        ("llama", {"_name_or_path": "output/sft"}, False),  # by its name it is like all others
        ("opt", {}, False),
        ("opt", {"_name_or_path": "facebook/opt-350m"}, False),
    ],
)
@torch.no_grad()
def test_a_reward_model_without_tokenizer_is_read_by_its_name_at_eos_or_before_it(
    tmp_path, family, config, read_at_eos
):
    """As it is left there: config.json says that the pad token is EOS, and there is no tokenizer_config.json."""
    path, trunk, head = deepspeed_chat_reward(tmp_path, family, pad_token_id=EOS, **config)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    before = [0 if read_at_eos else row[-1] == EOS for row in ROWS]
    expected = torch.stack(
        [trunk(torch.tensor([row]))[0][0, len(row) - 1 - back] @ head for row, back in zip(ROWS, before)]
    )
    scorer = load_scorer(path, torch.float32)
    for left in (False, True):
        torch.testing.assert_close(scores(scorer, *batch(EOS, left)), expected, rtol=0, atol=1e-5)


def test_weights_in_torchs_first_format_load(tmp_path):
    path, model = deepspeed_chat_actor(tmp_path, _use_new_zipfile_serialization=False)
    found = full_state(load_policy(path, torch.float32).model)
    torch.testing.assert_close(found, dict(model.named_parameters()), rtol=0, atol=0)
