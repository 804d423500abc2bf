"""Sums of rewards by hand, and what becomes of them on their way into an experience."""

import contextlib

import pytest
import torch

from engine.algorithms import Algorithm, get_dialect
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.reward.base import CombinedReward, RewardSource
from scripts.harness.models import EOS, PAD
from tests.engine.fake_models import Row, TableModels, rollout_of
from tests.training.given_rollouts import next_step, untrained


class Fixed(RewardSource):
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
# length -0.25 x (2, 3, 1) = -0.5, -0.75, -0.25. Sums: -0.5, -5.75, 0.75.
def test_a_weighted_sum_with_a_penalty_by_hand():
    reward = CombinedReward(
        {"model": (Fixed(1, -2, 0.5), 2.0), "function": (Fixed(4, 2, 0), -0.5)},
        length_penalty=0.25,
    )
    scores, parts = asked(reward)
    assert scores == [-0.5, -5.75, 0.75]
    assert parts == {
        "scores_model": [1, -2, 0.5],
        "scores_function": [4, 2, 0],
        "length_penalty": [-0.5, -0.75, -0.25],
    }
    assert reward.weights() == {"scores_model": 2.0, "scores_function": -0.5}
    assert all(source.present == 0 for source, _ in reward.sources.values())


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


# Row 0: score 4 - 2 x 2 = 0. Row 1: 3 - 2 x 3 = -3; its missing end makes it -13 (TRL f2cd5771:
# `scores[~contain_eos_token] -= missing_eos_penalty`), and the clip of 5, which comes last, -5. KL is 0.
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_into_the_rewards_of_a_step(micro_batch_size):
    table = {token: Row([-1.0] * 3, [-1.0] * 3, [0.0] * 3, score) for token, score in ((5, 2.0), (6, 0.0), (7, 1.0))}
    roles = TableModels(table).roles()
    roles["reward"] = CombinedReward({"model": (roles["reward"], 1.0), "function": (ByRow(), 1.0)}, length_penalty=2)
    dialect = get_dialect("default").override(
        whiten_advantages=False, missing_end="subtract", missing_end_value=10.0, score_clip=5.0
    )
    trainer = untrained(roles, dialect, rollout(), pad=PAD, micro_batch_size=micro_batch_size)
    report = next_step(trainer)
    assert report.batch.scores.tolist() == [0, -3, 0]  # row 2: 1 + 1 - 2
    assert report.batch.rewards.sum(-1).tolist() == [0, -5, 0]
    means = {name: value for name, value in report.metrics.items() if "scores_" in name or "penalty" in name}
    assert means == {
        "objective/scores_model": (2 + 0 + 1) / 3,
        "objective/scores_function": (2 + 3 + 1) / 3,
        "objective/length_penalty": (-4 - 6 - 2) / 3,
        "objective/missing_eos_penalty": -10 / 3,
    }
    lowered = dialect.override(score_clip=20.0)
    alone = next_step(untrained(roles, lowered, rollout(), pad=PAD, micro_batch_size=micro_batch_size)).batch
    assert alone.processed_scores.tolist() == [0, -13, 0]


# Accuracy 1 x (1, 0, 1), format 0.2 x (0, 1, 1), another of weight 0: scores 1, 0.2, 1.2, whose mean is 2.4 / 3.
def test_each_of_several_functions_is_measured_before_its_weight():
    table = {token: Row([-1.0] * 3, [-1.0] * 3, [0.0] * 3, 0.0) for token in (5, 6, 7)}
    said = {"right": (1.0, 0.0, 1.0), "form": (0.0, 1.0, 1.0), "length": (2.0, 3.0, 1.0)}
    sources = {name: (ByPrompt(*values), weight) for (name, values), weight in zip(said.items(), (1.0, 0.2, 0.0))}
    roles = {**TableModels(table).roles(), "reward": CombinedReward(sources)}
    report = next_step(untrained(roles, get_dialect("default"), rollout(), pad=PAD, micro_batch_size=1))
    assert report.batch.scores.tolist() == pytest.approx([1.0, 0.2, 1.2])
    expected = {"reward/right": 2 / 3, "reward/form": 2 / 3, "reward/length": 2.0, "objective/scores": 2.4 / 3}
    expected |= {"objective/scores_right": 2 / 3, "objective/scores_form": 0.4 / 3, "objective/scores_length": 0.0}
    for name, value in expected.items():
        assert report.metrics[name] == pytest.approx(value), name


class ByPrompt(RewardSource):
    """The score of each prompt's index."""

    def __init__(self, *scores: float):
        self.scores = torch.tensor(scores)

    def score(self, rollout: Rollout) -> torch.Tensor:
        return self.scores[rollout.indices]


def test_a_single_part_is_not_reported_twice():
    roles = TableModels({5: Row([-1.0], [-1.0], [0.0], 2.0)}).roles()
    algorithm = Algorithm(get_dialect("default"), pad_token_id=PAD, end_token_id=EOS)
    for reward in (roles["reward"], CombinedReward({"model": (roles["reward"], 1.0)})):
        maker = ExperienceMaker(**{**roles, "reward": reward}, algorithm=algorithm, micro_batch_size=8)
        experience = maker.make_experience(rollout_of([[5]], [[20]], PAD))
        assert experience.scores.tolist() == [2] and experience.score_parts == {}
