"""Sums of rewards by hand, and what becomes of them on their way into an experience."""

import contextlib

import pytest
import torch

from engine.algorithms import get_dialect
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.reward.combined import CombinedReward
from tests.engine.fake_models import Row, TableModels, rollout_of
from tests.tiny_models import EOS, PAD


class Fixed:
    """A source that gives these scores, and only within its context."""

    def __init__(self, *scores: float):
        self.scores, self.present = scores, 0

    def score(self, rollout: Rollout) -> torch.Tensor:
        assert self.present == 1
        return torch.tensor(self.scores)

    @contextlib.contextmanager
    def on_device(self):
        self.present += 1
        yield
        self.present -= 1


def rollout() -> Rollout:
    """Responses of 2, 3 and 1 tokens; the second did not end."""
    made = rollout_of([[5], [6], [7]], [[20, EOS], [21, 22, 23], [EOS]], PAD)
    return Rollout(
        made.sequences,
        made.attention_mask,
        made.response_mask,
        torch.tensor([True, False, True]),
        made.indices,
        made.samples,
    )


def asked(reward: CombinedReward) -> tuple[list[float], dict[str, list[float]]]:
    with reward.on_device():
        return reward.score(rollout()).tolist(), {name: part.tolist() for name, part in reward.parts(rollout()).items()}


# model 2 x (1, -2, 0.5) = 2, -4, 1; function -0.5 x (4, 2, 0) = -2, -1, 0;
# length -0.25 x (2, 3, 1) = -0.5, -0.75, -0.25; no end: 0, -8, 0. Sums: -0.5, -13.75, 0.75.
def test_a_weighted_sum_with_penalties_by_hand():
    reward = CombinedReward(
        {"model": (Fixed(1, -2, 0.5), 2.0), "function": (Fixed(4, 2, 0), -0.5)},
        length_penalty=0.25,
        missing_eos_penalty=8,
    )
    scores, parts = asked(reward)
    assert scores == [-0.5, -13.75, 0.75]
    assert parts == {
        "scores_model": [2, -4, 1],
        "scores_function": [-2, -1, 0],
        "length_penalty": [-0.5, -0.75, -0.25],
        "missing_eos_penalty": [0, -8, 0],
    }
    assert all(source.present == 0 for source, _ in reward.sources.values())


# TRL f2cd5771: `scores[~contain_eos_token] -= missing_eos_penalty`; here with 1.5.
def test_a_penalty_alone_leaves_ended_responses_as_they_are():
    scores, parts = asked(CombinedReward({"model": (Fixed(0.1, 0.2, 0.3), 1.0)}, missing_eos_penalty=1.5))
    assert scores == torch.tensor([0.1, -1.3, 0.3]).tolist()
    assert list(parts) == ["scores_model", "missing_eos_penalty"]


def test_one_source_of_weight_1_gives_its_scores_bit_by_bit():
    assert (
        asked(CombinedReward({"function": (Fixed(0.1, -1e-30, 3e30), 1.0)}))[0]
        == torch.tensor([0.1, -1e-30, 3e30]).tolist()
    )


class ByRow(Fixed):
    """The length of each response, so that micro-batches may be told apart."""

    def score(self, rollout: Rollout) -> torch.Tensor:
        assert self.present == 1
        return rollout.response_mask.sum(-1).float()


# Row 0: score 4 - 2 x 2 = 0. Row 1: 3 - 2 x 3 - 10 = -13, which the clip of 5 makes -5, after the penalties. KL is 0.
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_into_an_experience(micro_batch_size):
    table = {token: Row([-1.0] * 3, [-1.0] * 3, [0.0] * 3, score) for token, score in ((5, 2.0), (6, 0.0), (7, 1.0))}
    roles = TableModels(table).roles()
    roles["reward"] = CombinedReward(
        {"model": (roles["reward"], 1.0), "function": (ByRow(), 1.0)}, length_penalty=2, missing_eos_penalty=10
    )
    maker = ExperienceMaker(
        **roles,
        dialect=get_dialect("default").override(whiten_advantages=False),
        pad_token_id=PAD,
        micro_batch_size=micro_batch_size,
    )
    told = []
    made = maker.make(rollout(), 0.1, tally=lambda name, part: told.append((name, part.tolist())))
    assert made.scores.tolist() == [0, -13, 0]  # row 2: 1 + 1 - 2
    assert made.rewards.sum(-1).tolist() == [0, -5, 0]
    assert told == [
        ("objective/scores_model", [2, 0, 1]),
        ("objective/scores_function", [2, 3, 1]),
        ("objective/length_penalty", [-4, -6, -2]),
        ("objective/missing_eos_penalty", [0, -10, 0]),
    ]


def test_a_single_part_is_not_told_twice():
    roles = TableModels({5: Row([-1.0], [-1.0], [0.0], 2.0)}).roles()
    for reward in (roles["reward"], CombinedReward({"model": (roles["reward"], 1.0)})):
        maker = ExperienceMaker(
            **{**roles, "reward": reward}, dialect=get_dialect("default"), pad_token_id=PAD, micro_batch_size=8
        )
        judged = maker.judge(rollout_of([[5]], [[20]], PAD))
        assert judged.scores.tolist() == [2] and judged.score_parts == {}
