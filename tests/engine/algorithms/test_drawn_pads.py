"""What a pad token inside a response changes: models' answers beside each system's own lines, over plain Hugging Face.

deepspeed_chat: microsoft/DeepSpeedExamples 83757d9c, dschat/rlhf/ppo_trainer.py, `generate_experience`, and
dschat/utils/model/reward_model.py, `forward_value`. trl_ppo, summarize: huggingface/trl f2cd5771, trainer/utils.py,
`get_reward`. trlx: CarperAI/trlx 3340c2f3, accelerate_ppo_trainer.py, `make_experience`.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.algo.rewards import positions_after_tokens
from engine.algorithms import Algorithm, get_dialect
from engine.errors import UserError
from engine.models.loading import load_policy, load_scorer
from tests.engine.fake_models import rollout_of
from tests.tiny_models import EOS, PAD, make_causal_lm, make_scorer

PROMPTS = [[EOS, 11, 12], [EOS, 13, 14, 15], [16, 17]]  # OPT begins each text with a token that is EOS, too
RESPONSES = [[5, PAD, 6, 9], [7, EOS, 8, 8], [EOS, 21, PAD, 22]]


def drawn(pad):
    """A rollout of RESPONSES, and where the first pad token stands in each."""
    first = [row.index(pad) if pad in row else len(row) for row in RESPONSES]
    return rollout_of(PROMPTS, RESPONSES, pad), first


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return make_causal_lm(root / "actor", "opt"), make_scorer(root / "reward", "opt")


def scores(folder, rollout):
    scorer = load_scorer(folder, torch.float32)
    with torch.no_grad():
        by_token = scorer(rollout.sequences, rollout.attention_mask, rollout.position_ids)
    return scorer.sequence_scores(by_token, rollout.sequences, rollout.attention_mask)


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["deepspeed_chat", "deepspeed_chat_2023", "trl_ppo", "trl_rloo", "summarize"])
@torch.no_grad()
def test_scores_are_read_before_the_first_pad(folders, system, pad):
    rollout, _ = drawn(pad)
    _, scored = Algorithm(get_dialect(system), pad_token_id=pad, end_token_id=EOS).texts(rollout)
    model = AutoModelForSequenceClassification.from_pretrained(folders[1], dtype=torch.float32).eval()
    hides_pads_of_prompts = system.startswith("deepspeed_chat")
    expected = []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        if system == "summarize" and EOS in response:  # `truncate_response`: what follows EOS becomes padding
            response = response[: response.index(EOS) + 1] + [pad] * (len(response) - response.index(EOS) - 1)
        sequence = torch.tensor([prompt + response])
        mask = (sequence != pad).long()
        if not hides_pads_of_prompts:
            mask[:, : len(prompt)] = 1
        values = model.score(model.base_model(sequence, attention_mask=mask)[0])[0, :, 0]
        pads = (sequence[0, len(prompt) :] == pad).nonzero()
        end = pads[0].item() + len(prompt) if len(pads) > 0 else sequence.shape[1]
        expected.append(values[end - 1])
    torch.testing.assert_close(scores(folders[1], scored), torch.stack(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["default", "openai", "trlx"])
def test_others_score_what_was_drawn(system, pad):
    rollout, _ = drawn(pad)
    dialect = get_dialect(system).replaced(truncate_token="", truncate_after=0)
    learned, scored = Algorithm(dialect, pad_token_id=pad, end_token_id=EOS).texts(rollout)
    assert torch.equal(scored.response_mask, rollout.response_mask)
    assert torch.equal(learned.attention_mask, rollout.attention_mask) == (system != "trlx")


@pytest.mark.parametrize("pad", [PAD, EOS])
@pytest.mark.parametrize("system", ["deepspeed_chat", "trlx"])
@torch.no_grad()
def test_pads_are_hidden_from_attention_where_masks_come_from_ids(folders, system, pad):
    rollout, _ = drawn(pad)
    algorithm = Algorithm(get_dialect(system), pad_token_id=pad, end_token_id=EOS)
    learned, _ = algorithm.texts(rollout)
    positions = algorithm.positions(learned.responses, learned.response_mask)
    found, _ = load_policy(folders[0], torch.float32)(
        learned.sequences, learned.attention_mask, learned.position_ids, learned.response_length
    )
    # OPT counts positions along the mask by itself, as the system has it do.
    mask = (learned.sequences != pad).long()
    logits = (
        AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32)
        .eval()(learned.sequences, attention_mask=mask * rollout.attention_mask)
        .logits
    )
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, learned.sequences[:, 1:, None])[..., 0]
    counted = positions.masks.policy
    assert counted.any() and torch.equal(counted, (mask * rollout.attention_mask)[:, -4:].bool())
    # Read at a pad's own place, where each system has another position for it: the token behind a pad is left out.
    compared = counted & positions_after_tokens(counted)
    assert compared.sum() >= 7
    torch.testing.assert_close(found[compared], expected[:, -4:][compared], rtol=0, atol=1e-5)
    select = learned.select(slice(0, 2))  # the two rows whose first token is hidden lose no other
    assert select.attention_mask.sum() == learned.attention_mask[:2].sum()


def test_pads_in_prompts_take_no_other_column_away():
    rollout = rollout_of([[11, PAD, 12], [13, PAD, 14]], [[5], [6]], PAD).without_attention_to(PAD)
    assert rollout.select(slice(None)).sequences.tolist() == [[11, PAD, 12, 5], [13, PAD, 14, 6]]


def test_trlxs_penalty_has_a_hole_behind_a_pad():
    """log_ratio * attention_mask[:, :-1] from the last prompt token on, and ends = start + the mask's sum + 1."""
    tokens = torch.tensor([[11, 12, 5, PAD, 6, 9, PAD, PAD]])
    mask, start = (tokens != PAD).long(), 1
    ends = start + mask[0, start:].sum() + 1
    log_ratio = torch.tensor([[0.1 * slot for slot in range(1, 8)]]) * mask[:, :-1]
    expected = torch.zeros(6)
    expected[: ends - start] = -0.1 * log_ratio[0, start:ends]
    assert expected.tolist() == pytest.approx([-0.02, -0.03, 0.0, -0.05, -0.06, 0.0], abs=1e-7)

    algorithm = Algorithm(get_dialect("trlx"), pad_token_id=PAD, end_token_id=EOS)
    sampled = torch.tensor([[True] * 4 + [False] * 2])
    positions = algorithm.positions(tokens[:, 2:], sampled)
    ours = torch.tensor([[0.1 * slot for slot in range(2, 8)]])
    rewards = algorithm.compute_rewards(ours, torch.zeros(1, 6), torch.zeros(1), positions, 0.1)
    torch.testing.assert_close(rewards[0], expected)


def test_log_probs_of_the_sampler_are_not_those_of_hidden_pads():
    dialect = get_dialect("default").override(length_rule="not_pad")
    assert not dialect.takes_sampled_logprobs(exact=True)
    with pytest.raises(UserError, match="old_logprobs 'sampler': length_rule 'not_pad' hides pad tokens"):
        dialect.override(old_logprobs="sampler")
