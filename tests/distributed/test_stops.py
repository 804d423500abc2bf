"""A number that is not finite on one rank stops all ranks, with a message that says where, before a weight changes."""

import math

import pytest
import torch

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Rollout
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOTrainer

BAD_ROW = 2  # of the last rank, in the second step


def all_stops(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """What becomes of each run, by the same names; `spoil` is the name of one of the functions below."""
    return {name: stopped_step(folder, **arguments) for name, arguments in runs.items()}


def stopped_step(folder: str, stage: int, dtype: str, spoil: str) -> dict:
    """A good step and a spoiled one: the message of the stop, and the weights before and after it."""
    trainer = build_trainer(engine_spec(folder, stage, config=f"stage{stage}.json", dtype=dtype))
    feed, rollouts = TinyPrompts(8), []
    trainer.step(feed.prompts(0))
    before = {name: masters(model) for name, model in _trained(trainer).items()}
    if distributed.rank() == distributed.world_size() - 1:
        SPOILERS[spoil](trainer, rollouts)
    try:
        trainer.step(feed.prompts(1))
        message = None
    except RunStopped as stop:
        message = str(stop)
    return {
        "message": message,
        "before": before,
        "steps_done": trainer.steps_done,
        "after": {name: masters(model) for name, model in _trained(trainer).items()},
        "response": _response(trainer, rollouts[0]) if rollouts else None,
    }


def _trained(trainer: PPOTrainer) -> dict:
    return {"actor": trainer.models.actor, "critic": trainer.models.critic}


def _response(trainer: PPOTrainer, rollout: Rollout) -> str:
    return trainer.models.tokenizer.decode(rollout.responses[BAD_ROW][rollout.response_mask[BAD_ROW]])


def nan_score(trainer: PPOTrainer, rollouts: list) -> None:
    """One score of this rank is NaN; the rollout that it belongs to is put into `rollouts`."""
    score = trainer.experience_maker.reward.score

    def spoiled(rollout: Rollout) -> torch.Tensor:
        scores = score(rollout)
        rollouts.append(rollout)
        return scores.index_fill(0, torch.tensor(BAD_ROW), math.nan)

    trainer.experience_maker.reward.score = spoiled


def nan_value_loss(trainer: PPOTrainer, rollouts: list) -> None:
    """The critic's loss of this rank is NaN."""
    loss = trainer.learner._value_loss
    trainer.learner._value_loss = lambda rows, metrics: loss(rows, metrics) * math.nan


def infinite_gradient(trainer: PPOTrainer, rollouts: list) -> None:
    """The actor's gradients of this rank are infinite though its loss is not."""
    actor = trainer.models.actor
    actor.backward = lambda loss, last: type(actor).backward(actor, loss * 1e60, last)


SPOILERS = {"score": nan_score, "value loss": nan_value_loss, "policy gradient": infinite_gradient}


RUNS = {
    "score": {"stage": 3, "dtype": "fp32", "spoil": "score"},
    "value loss": {"stage": 3, "dtype": "fp32", "spoil": "value loss"},
}
RUNS |= {
    f"policy gradient, stage {stage}, {dtype}": {"stage": stage, "dtype": dtype, "spoil": "policy gradient"}
    for stage in (0, 2, 3)
    for dtype in ("fp32", "bf16")
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_stops:all_stops", folder=folder, runs=RUNS)


@pytest.mark.parametrize("run", RUNS)
def test_both_ranks_stop_and_name_the_step(ranks, run):
    one, other = (rank[run] for rank in ranks)
    assert one["message"] == other["message"] is not None
    assert one["message"].startswith("step 2: ")
    assert f"rank 1: not finite: {RUNS[run]['spoil']}" in one["message"]


@pytest.mark.parametrize("run", RUNS)
def test_no_weight_has_changed(ranks, run):
    for rank in ranks:
        assert rank[run]["steps_done"] == 1
        for model, before in rank[run]["before"].items():
            assert all(torch.equal(rank[run]["after"][model][name], master) for name, master in before.items())


def test_the_bad_sample_and_only_it_is_shown(ranks):
    message = ranks[0]["score"]["message"]
    assert "score nan, prompt 'w" in message
    assert repr(ranks[1]["score"]["response"]) in message
    assert message.count("prompt '") == 1 and "rank 0" not in message
