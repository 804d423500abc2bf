"""What must change no number of an experience: padding, micro-batches, and how rows are spread over rollouts."""

import dataclasses

import numpy as np
import pytest
import torch

from engine.algorithms import Dialect, get_dialect
from engine.experience import Rollout, TrainingBatch
from engine.models.loading import load_policy, load_scorer
from engine.reference import Reference
from engine.reward.base import RewardModel
from scripts.harness.models import EOS, PAD, make_causal_lm, make_scorer
from tests.engine.fake_models import PrefixModels, Resident, rollout_of
from tests.training.given_rollouts import batch_of

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14], [15, 16, 17]]
RESPONSES = [[20, 21, EOS], [22, 23, 24, 25, EOS], [26, EOS], [27, 28, 29, 30], [EOS]]
FIELDS = [field.name for field in dataclasses.fields(TrainingBatch) if field.name not in ("rollout", "kl_coef")]
DIALECTS = {
    "default": get_dialect("default"),
    "deepspeed_chat": get_dialect("deepspeed_chat"),
    "unwhitened": get_dialect("default").override(whiten_advantages=False),
}


def rollout(rows=range(5), *, width: int = 0, prompt_width: int = 0) -> Rollout:
    return rollout_of(
        [PROMPTS[row] for row in rows], [RESPONSES[row] for row in rows], PAD, width=width, prompt_width=prompt_width
    )


def make(part: Rollout, dialect: Dialect, micro_batch_size: int = 8, roles: dict | None = None) -> TrainingBatch:
    return batch_of(roles or PrefixModels().roles(), part, dialect, pad=PAD, micro_batch_size=micro_batch_size)


def same(wide: TrainingBatch, narrow: TrainingBatch, tolerance: float = 1e-6) -> None:
    """All numbers of `narrow` stand in `wide`, and beyond them there is nothing that is learned from."""
    width = narrow.rollout.response_length
    read = narrow.rollout.response_mask  # log-probs of padding are nobody's
    for name in FIELDS:
        own, other = getattr(narrow, name), getattr(wide, name)
        if own is None:  # without a correction
            assert other is None, name
            continue
        if name in ("logprobs", "ref_logprobs", "entropy"):
            own, other = own[read], other[:, :width][read]
        elif own.dim() == 2:
            assert not other[:, width:].any(), f"{name} beyond the response"
            other = other[:, :width]
        if own.dtype == torch.bool:
            assert torch.equal(own, other), name
        else:
            torch.testing.assert_close(other, own, rtol=0, atol=tolerance, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize("micro_batch_size", [8, 2])
@pytest.mark.parametrize("dialect", ["default", "unwhitened"])
def test_more_padding_on_either_side_changes_no_number(dialect, micro_batch_size):
    narrow = make(rollout(), DIALECTS[dialect], micro_batch_size)
    same(make(rollout(prompt_width=9), DIALECTS[dialect], micro_batch_size), narrow)
    same(make(rollout(width=11), DIALECTS[dialect], micro_batch_size), narrow)
    same(make(rollout(width=11, prompt_width=9), DIALECTS[dialect], micro_batch_size), narrow)


def test_deepspeed_chat_sees_no_padding_beyond_the_slot_after_a_response():
    # Its score stands one slot past the response, so width counts where that slot is missing, and only there.
    chat = DIALECTS["deepspeed_chat"]
    same(make(rollout(prompt_width=9), chat), make(rollout(), chat))
    same(make(rollout(width=11, prompt_width=9), chat), make(rollout(width=6), chat))
    narrow, wide = make(rollout(), chat), make(rollout(width=6), chat)
    assert not torch.allclose(narrow.advantages[1], wide.advantages[1, :5], atol=1e-2)  # five tokens in five slots
    for row in (0, 2, 3, 4):
        torch.testing.assert_close(wide.advantages[row, :5], narrow.advantages[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dialect", list(DIALECTS))
@pytest.mark.parametrize("width", [0, 9])
def test_micro_batches_change_no_number(dialect, width):
    whole = make(rollout(width=width), DIALECTS[dialect], 8)
    for size in (1, 2, 3):
        same(make(rollout(width=width), DIALECTS[dialect], size), whole)


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_the_order_of_rows_changes_no_number(dialect):
    order = [3, 0, 4, 2, 1]
    straight, turned = make(rollout(), DIALECTS[dialect]), make(rollout(order), DIALECTS[dialect], 2)
    for name in ("rewards", "advantages", "returns", "values", "scores", "kl"):
        expected = getattr(straight, name)[order]
        torch.testing.assert_close(getattr(turned, name), expected, rtol=0, atol=1e-6)


def test_whitening_is_over_all_learned_tokens():
    plain, white = make(rollout(), DIALECTS["unwhitened"]), make(rollout(), DIALECTS["default"], 2)
    chosen = plain.advantages[plain.policy_mask].double().numpy()
    assert len(chosen) == 3 + 5 + 2 + 4 + 1
    expected = np.zeros((5, 5))
    expected[plain.policy_mask.numpy()] = (chosen - chosen.mean()) / np.sqrt(chosen.var() + 1e-8)
    np.testing.assert_allclose(white.advantages.numpy(), expected, rtol=0, atol=1e-5)
    for name in ("rewards", "returns", "values"):  # only the policy's advantages are scaled
        assert torch.equal(getattr(white, name), getattr(plain, name))


class Bare(Resident):
    """A module in the place of an engine."""

    def __init__(self, module: torch.nn.Module):
        super().__init__(None)
        self.module = module

    @torch.no_grad()
    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_real_models_see_no_padding_either(family, tmp_path):
    def policy(seed):
        return Bare(load_policy(make_causal_lm(tmp_path / f"policy{seed}", family, seed=seed), torch.float32))

    def scorer(seed):
        return Bare(load_scorer(make_scorer(tmp_path / f"scorer{seed}", family, seed=seed), torch.float32))

    roles = {
        "actor": policy(0),
        "reference": Reference(policy(1)),
        "critic": scorer(2),
        "reward": RewardModel(scorer(3)),
    }
    narrow = make(rollout(), DIALECTS["unwhitened"], 8, roles)
    assert narrow.logprobs[narrow.rollout.response_mask].std() > 0.5  # large enough for a wrong slot to show
    for size in (8, 2, 1):
        same(make(rollout(width=9, prompt_width=7), DIALECTS["unwhitened"], size, roles), narrow, 5e-5)
