"""Steps whose ratios explode change nothing on any rank; PPO epochs end together when the policy has gone far."""

from dataclasses import replace

import pytest
import torch

from engine import distributed
from engine.algorithms import Dialect
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters, moments
from training.ppo_trainer import PPOTrainer
from training.reporting.metrics import Accumulator

LIMIT = 1.5
GUARDED = DIALECT.override(ratio_limit=LIMIT, warmup_steps=0)


def exploding(folder: str, stages: dict[str, tuple[int, str, str]]) -> dict[str, dict]:
    """By stage: weights before and after a step whose ratios explode on rank 0 alone, and after one that is sound."""
    found = {}
    for name, (stage, config, dtype) in stages.items():
        spec = engine_spec(folder, stage, config=config, dtype=dtype)
        trainer = build_trainer(spec, dialect=GUARDED)
        prompts = TinyPrompts(8).prompts(0)
        train, batches = trainer.train_actor_and_critic, []
        trainer.train_actor_and_critic = lambda batch, kl, metrics: batches.append(batch) or (0, 0)
        trainer.step(prompts)
        trainer.train_actor_and_critic, trainer.counters.steps_done, (batch,) = train, 0, batches
        # Ratios of e on rank 0 and 1 on rank 1: their mean is over the limit, rank 1's own is not.
        spoiled = replace(batch, logprobs=batch.logprobs - float(distributed.is_main()))
        found[name] = {
            "before": state(trainer),
            "left out": one(trainer, spoiled),
            "after": state(trainer),
            "sound": one(trainer, batch),
            "end": state(trainer),
        }
        found[name]["moments"] = moments(trainer.models.actor)
    return found


def one(trainer: PPOTrainer, batch) -> dict:
    """An optimizer step; its metrics."""
    metrics = Accumulator()
    trainer.learner.update(batch, torch.arange(len(batch)), metrics, actor=True, critic=True)
    return metrics.reduce()


def state(trainer: PPOTrainer) -> dict:
    """The weights of both models."""
    return {role: masters(model) for role, model in trainer.models.trained.items()}


def stopping(folder: str, dialect: Dialect, steps: int) -> list[dict]:
    """The metrics of some steps, and the optimizer steps that were counted."""
    trainer = build_trainer(engine_spec(folder, 0), dialect=dialect, total_steps=steps)
    return [
        report.metrics | {"optimizer steps": trainer.counters.optimizer_steps} for report in trainer.fit(TinyPrompts(8))
    ]


STAGES = {
    f"{dtype}_{stage}": (stage, f"stage{stage}.json", dtype)
    for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (3, "bf16"))
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_guards:exploding", folder=folder, stages=STAGES)


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[role][name], other[role][name]) for role in one for name in one[role])


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_exploded_ratios_changes_no_weight_on_any_rank(ranks, stage):
    for rank in ranks:
        run = rank[stage]
        assert run["left out"]["policy/ratio_mean"] > LIMIT and run["left out"]["policy/left_out"] == 1
        assert "policy/grad_norm" not in run["left out"] and "value/grad_norm" not in run["left out"]
        assert same(run["before"], run["after"])


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_sound_step_learns(ranks, stage):
    for rank in ranks:
        run = rank[stage]
        assert run["sound"]["policy/left_out"] == 0 and run["sound"]["policy/grad_norm"] > 0
        for role, weights in run["after"].items():
            assert any(not torch.equal(weight, run["end"][role][name]) for name, weight in weights.items())


def test_moments_are_those_of_the_sound_step_alone(ranks):
    """Of Adam's first moments, 0.1 of the gradient: left-out gradients would stand in them with 0.9 of their tenth."""
    for rank in ranks:
        norm = torch.cat([part.flatten() for part in rank["fp32_0"]["moments"].values()]).norm().item()
        clipped = min(rank["fp32_0"]["sound"]["policy/grad_norm"], 1.0)
        assert norm == pytest.approx(0.1 * clipped, rel=1e-4)


@pytest.mark.parametrize("limit, epochs", [(1e-6, 2), (1e9, 4)])
def test_epochs_end_with_the_first_that_went_too_far(folder, limit, epochs):
    """In the first pass old and new policy are the same within rounding; later ones have moved."""
    dialect = DIALECT.override(ppo_epochs=4, early_stop_kl=limit, warmup_steps=0)
    for rank in run_ranks("tests.distributed.test_guards:stopping", folder=folder, dialect=dialect, steps=2):
        assert [metrics["policy/epochs"] for metrics in rank] == [epochs] * 2
        assert [metrics["optimizer steps"] for metrics in rank] == [4, 8]  # those left out count
        assert rank[1]["policy/lr"] == pytest.approx(1e-3 * (1 - 4 / 8))  # of the step's first optimizer step


def test_what_is_left_out_is_the_policys_where_the_critic_learns_apart(folder):
    """No mean ratio is under a half; the critic's own optimizer steps have none, and are made."""
    dialect = DIALECT.override(ratio_limit=0.5, ppo_epochs=2, critic_epochs=4, warmup_steps=0)
    for rank in run_ranks("tests.distributed.test_guards:stopping", folder=folder, dialect=dialect, steps=1):
        assert rank[0]["policy/left_out"] == 1 and "policy/grad_norm" not in rank[0]
        assert rank[0]["value/grad_norm"] > 0
