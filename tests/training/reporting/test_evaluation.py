"""Held-out prompts are known to reward functions by the same indices while they are answered and afterwards."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from engine.rollout.base import RolloutBackend, SamplingConfig
from training.reporting.evaluation import Evaluator, PromptEvaluations, write_rows


@dataclass(frozen=True)
class Answered:
    """Of a rollout, what tells whose responses these are."""

    indices: torch.Tensor


class Rollouts(RolloutBackend):
    """Gives a rollout of the prompts' indices, and calls `finished` with it before."""

    def __init__(self, finished):
        self.finished = finished

    def generate(self, prompts, sampling):
        answered = Answered(prompts.indices)
        if self.finished is not None:
            self.finished(answered)
        return answered


class Scored(Exception):
    """Ends an evaluation when responses are scored."""


def make_experience(rollout):
    raise Scored(rollout.indices.tolist())


@pytest.mark.parametrize("listens", [True, False])
def test_what_is_done_early_and_what_is_scored_have_the_same_indices(listens):
    early = []

    def finished(rollout):
        early.append(rollout.indices.tolist())

    rollouts = Rollouts(finished if listens else None)
    evaluator = Evaluator(
        [torch.tensor([5, 6]), torch.tensor([7]), torch.tensor([8])],
        rollouts=rollouts,
        experience_maker=SimpleNamespace(make_experience=make_experience),
        sampling=SamplingConfig(max_new_tokens=2, stop_token_ids=(1,), pad_token_id=0),
        tokenizer=None,
        first_index=100,
    )
    with pytest.raises(Scored) as scored:
        evaluator.run(0)
    assert scored.value.args[0] == [100, 101, 102], "behind the 100 rows that are trained on"
    assert early == ([[100, 101, 102]] if listens else [])
    assert rollouts.finished is (finished if listens else None), "training's prompts are told as they are"


def test_a_link_in_the_place_of_samples_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "after.jsonl").symlink_to(tmp_path / "theirs")
    write_rows(tmp_path / "after.jsonl", [{"score": 1.0}])
    assert (tmp_path / "after.jsonl").read_text() == '{"score": 1.0}\n'
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize("average", (None, object()))
def test_the_averages_curve_starts_where_the_actors_does(average, tmp_path):
    own = {"eval/score": 1.5, "eval/kl_se": 0.25}
    evaluator = SimpleNamespace(run=lambda step: (own, []))
    evaluations = PromptEvaluations(evaluator, average, tmp_path, last_step=4, every=0)
    expected = own if average is None else {**own, "eval/ema_score": 1.5, "eval/ema_kl_se": 0.25}
    assert evaluations.evaluate(0) == expected
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["before.jsonl"]
    assert [step for step in range(-1, 6) if evaluations.due(step)] == [0, 4]
