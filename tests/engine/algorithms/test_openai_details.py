"""Details of lm-human-preferences that the dialect `openai` rests on, with its write-up's numbers where it has any.

Source: Huang et al. 2023, "The N Implementation Details of RLHF with PPO"; docs/openai.md has the whole list.
"""

import pytest
import torch

from engine.algorithms import Algorithm, get_dialect
from engine.experience import position_ids
from engine.models.loading import load_scorer
from engine.rollout import SamplingConfig
from tests.tiny_models import EOS, PAD, make_scorer

OPENAI = get_dialect("openai")


@torch.no_grad()
def test_scores_and_values_look_at_query_and_response(tmp_path):
    """One response behind two queries that differ in their first token: every value of the response differs."""
    scorer = load_scorer(make_scorer(tmp_path, "gpt2"), torch.float32)
    texts = torch.tensor([[11, 12, 13, 30, 31, 32], [14, 12, 13, 30, 31, 32]])
    mask = torch.ones_like(texts)
    values = scorer(texts, mask, position_ids(mask))
    assert values.shape == (2, 6)
    assert ((values[0] - values[1]).abs() > 1e-3).all()
    scores = scorer.sequence_scores(values, texts, mask)
    assert torch.equal(scores, values[:, -1])
    mask[:, 0] = 0  # without their first tokens the two texts are one
    values = scorer(texts, mask, position_ids(mask))
    torch.testing.assert_close(values[0, 1:], values[1, 1:], rtol=0, atol=1e-6)


def test_the_write_ups_penalty_of_three_tokens():
    """Log-ratios -0.3315, -0.0426, 0.6351 and the score 0.4; the penalty is subtracted, as the code has it (its prose
    leaves the sign out)."""
    reference = torch.tensor([[-3.3213, -4.9980, -3.8690]])
    logprobs = reference + torch.tensor([[-0.3315, -0.0426, 0.6351]])
    responses = torch.tensor([[11, 339, 561]])
    algorithm = Algorithm(OPENAI, pad_token_id=0, end_token_id=13)
    positions = algorithm.positions(responses, torch.ones_like(responses).bool())
    first = algorithm.compute_rewards(reference, reference, torch.tensor([0.4]), positions, 0.15)
    assert first[0].tolist() == pytest.approx([0, 0, 0.4])  # before the first update
    rewards = algorithm.compute_rewards(logprobs, reference, torch.tensor([0.4]), positions, 0.15)
    assert rewards[0].tolist() == pytest.approx([0.15 * 0.3315, 0.15 * 0.0426, 0.4 - 0.15 * 0.6351], abs=1e-6)


def test_responses_have_a_fixed_length_and_the_scores_temperature():
    """No token stops a response, none is forbidden, and log-probs are recorded at the temperature of sampling."""

    def sampling(system: str) -> SamplingConfig:
        return SamplingConfig.of(get_dialect(system), [EOS, 7], "fp32", max_new_tokens=24, pad_token_id=PAD)

    openai = sampling("openai")
    assert (openai.stop_token_ids, openai.never_drawn, openai.max_new_tokens) == ((), (), 24)
    assert openai.temperature == openai.logprob_temperature == 0.7
    assert (sampling("default").stop_token_ids, sampling("default").never_drawn) == ((EOS, 7), ())
    old = sampling("deepspeed_chat_2023")
    assert (old.stop_token_ids, old.never_drawn) == ((), (EOS, 7))
