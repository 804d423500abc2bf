"""Reward models and actors as DeepSpeed-Chat and OpenRLHF save them load and are read as they were meant; heads that
are called otherwise.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.checking import check_policy, check_scorer
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.saving import save_model
from scripts.harness.models import EOS, PAD, make_scorer
from scripts.harness.ranks import run_ranks
from scripts.harness.weights import full_state
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


SEQUENCES = torch.tensor([[5, 9, 33, 17, 40, EOS], [41, 7, 63, 22, 4, EOS]])
MEAN, STD = 2.5, 4.0


def openrlhf_reward(folder, head="value_head", tensors=None, **settings):
    """A folder as its train_rm leaves it: no label count, a class of its own, EOS as pad token. Returns its path and
    what the head says of the last token of SEQUENCES."""
    path = Path(make_scorer(folder, pad_is_eos=True))
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        raw = model.base_model(SEQUENCES)[0][:, -1] @ model.score.weight[0]
    config = json.loads((path / "config.json").read_text())
    for name in ("id2label", "label2id", "score_offset", "score_position"):
        del config[name]
    config |= {"architectures": ["RewardModel"], "mean": MEAN, "std": STD, **settings}
    (path / "config.json").write_text(json.dumps(config))
    state = load_file(path / "model.safetensors")
    state[f"{head}.weight"] = state.pop("score.weight")
    save_file(state | (tensors or {}), path / "model.safetensors", metadata={"format": "pt"})
    return str(path), raw


@torch.no_grad()
def openrlhf_scores(path):
    scorer, mask = load_scorer(path, torch.float32), torch.ones_like(SEQUENCES)
    return scorer.sequence_scores(scorer(SEQUENCES, mask, position_ids(mask)), SEQUENCES, mask), scorer


@pytest.mark.parametrize("head", ["score", "value_head"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_are_those_of_openrlhf_and_stay_so_in_what_is_saved(tmp_path, head, normalize):
    path, raw = openrlhf_reward(tmp_path / "rm", head, value_head_prefix=head, normalize_reward=normalize)
    expected = (raw - MEAN) / STD if normalize else raw
    found, scorer = openrlhf_scores(path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    save_model(scorer, full_state(scorer.model), AutoTokenizer.from_pretrained(path), tmp_path / "saved")
    torch.testing.assert_close(openrlhf_scores(str(tmp_path / "saved"))[0], expected, rtol=0, atol=1e-6)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        one = theirs(SEQUENCES[:1]).logits[0, 0] + theirs.config.score_offset
    torch.testing.assert_close(one, expected[0], rtol=0, atol=1e-6)


def test_it_is_a_trunk_for_a_new_head_and_no_language_model(tmp_path):
    path, _ = openrlhf_reward(tmp_path, value_head_prefix="value_head", normalize_reward=True)
    config = new_scorer(path, torch.float32, PAD, seed=0).model.config
    assert config.score_offset == 0 and not hasattr(config, "mean") and not hasattr(config, "value_head_prefix")
    with pytest.raises(UserError, match=r"^--actor: .* is not a language model but RewardModel\. Give the SFT model"):
        check_policy(path, "--actor")


@pytest.mark.parametrize(
    "head, tensors, settings, message",
    [
        ("value_head", {}, {}, r'no score\.weight, .* called value_head\..* add "value_head_prefix": "value_head" to'),
        ("v_head.summary", {"v_head.summary.bias": torch.ones(1)}, {}, r"A value head .* gives no scores"),
        ("score", {"score.bias": torch.ones(1)}, {}, r"1 tensor is left over \(score\.bias\)"),
    ],
)
def test_a_head_that_cannot_be_read_is_refused(tmp_path, head, tensors, settings, message):
    path, _ = openrlhf_reward(tmp_path, head, tensors, **settings)
    with pytest.raises(UserError, match=f"^--critic: .*{message}"):
        check_scorer(path, "--critic")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"std": 0}, "std is 0, and must be a finite number above 0"),
        ({"mean": "2,5"}, "mean is '2,5', and must be a finite number"),
        ({"architectures": 5}, "architectures is 5, and must be a list of names"),
        ({"architectures": "RewardModel"}, "architectures is 'RewardModel', and must be a list of names"),
        ({"score_offset": None}, "score_offset is None, and must be a finite number"),
        ({"score_position": 3}, "score_position is 3, and must be last or last_non_pad"),
        ({"step_end": 4}, "step_end is 4, and must be a text"),
        ({"value_head_prefix": 5}, "value_head_prefix is 5, and must be a text"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(tmp_path, settings, message):
    path, _ = openrlhf_reward(tmp_path, "score", **{"normalize_reward": True, **settings})
    with pytest.raises(UserError) as refused:
        check_scorer(path, "--critic")
    assert str(refused.value).startswith(f"--critic: {path}/config.json describes no model ({message}). Correct it")


def test_moments_that_are_not_used_may_be_anything(tmp_path):
    check_scorer(openrlhf_reward(tmp_path, "score", normalize_reward=False, mean=None, std=0)[0], "--critic")
