"""Statistics that steer training are equal on all ranks, in each dialect: KL controllers, score scales, whitening."""

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed.work_systems import MINI_BATCHES
from tests.engine.algorithms.test_systems import SYSTEMS, dialect_of

# Each rank has prompts, and so responses, of its own. Targets between what the two ranks' own KLs come to.
TARGETS = {"deepspeed_chat": 0.01, "deepspeed_chat_2023": 0.01, "openai": 0.6, "trlx": 1.1, "trl_ppo": 0.45}
STEERED = {
    system: dialect_of(system).override(
        kl_controller="adaptive",
        kl_target=TARGETS.get(system, 0.2),
        kl_horizon=100.0,
        score_scaling="running",
        ppo_epochs=2,
        actor_lr=2e-3,
        critic_lr=0.0 if system == "trl_rloo" else 3e-4,
        mini_batches=MINI_BATCHES.get(system, 1),
    )
    for system in SYSTEMS
}
WHITENED_PER_RANK = ("openai", "summarize", "trl_ppo")


@pytest.fixture(scope="module")
def steered(folder) -> list[dict]:
    return run_ranks("tests.distributed.work_systems:five_steps", folder=folder, dialects=STEERED)


@pytest.mark.parametrize("system", SYSTEMS)
def test_controllers_and_scales_are_equal_on_all_ranks(steered, system):
    one, other = (rank[system] for rank in steered)
    assert not all(torch.equal(a[:, :3], b[:, :3]) for a, b in zip(one["rows"], other["rows"])), "the same data"
    assert one["state"] == other["state"] and one["coefficients"] == other["coefficients"]
    assert one["state"]["kl"]["value"] != STEERED[system].kl_coef
    rows = 5 * 8 * STEERED[system].samples_per_prompt  # of both ranks
    assert one["state"]["score_scale"]["totals"][0] == rows


def coefficients(system: str, kls: list[float]) -> list[float]:
    """Before and after each step, by hand. trlX changes it in each of its two passes, by the two rows that a rank has
    in a mini-batch; the others once, by all rows of both ranks."""
    dialect = STEERED[system]
    rows, updates = (2, 2) if system == "trlx" else (8 * dialect.samples_per_prompt, 1)
    values = [dialect.kl_coef]
    for kl in kls:
        error = max(-0.2, min(0.2, kl / dialect.kl_target - 1))
        values.append(values[-1] * (1 + error * rows / 100) ** updates)
    return values


@pytest.mark.parametrize("system", SYSTEMS)
def test_coefficients_follow_the_rule(steered, system):
    """By the mean KL of both ranks' responses; by its own alone each rank would have come to another."""
    run, measured = steered[0][system], [rank[system]["measured"] for rank in steered]
    together = [torch.cat(parts).double().mean().item() for parts in zip(*measured)]
    if system != "trlx":  # which measures another than what is reported
        reported = [metrics["objective/kl"] for metrics in run["metrics"]]
        assert together == pytest.approx(reported, rel=1e-4, abs=1e-6)
    *before, last = coefficients(system, together)
    assert run["coefficients"] == pytest.approx(before, rel=1e-5)
    assert run["state"]["kl"]["value"] == pytest.approx(last, rel=1e-5)
    one, other = (coefficients(system, [kl.double().mean().item() for kl in own])[-1] for own in measured)
    assert one != pytest.approx(other, rel=1e-3), "each rank's own KL would have done"


@pytest.mark.parametrize("system", SYSTEMS)
def test_whitening_statistics_are_equal_where_they_are_joint(steered, system):
    one, other = (rank[system]["statistics"] for rank in steered)
    whitens = STEERED[system].whiten_advantages or STEERED[system].whiten_rewards
    assert len(one) == len(other) and bool(one) == whitens
    if whitens:
        assert (one == other) == (system not in WHITENED_PER_RANK)


def test_metrics_of_values_are_there_where_a_critic_is(steered):
    for system in SYSTEMS:
        names = [name for name in steered[0][system]["metrics"][0] if name.startswith("value/")]
        assert bool(names) == (system != "trl_rloo")
