"""What stops a step on all ranks, or leaves it out, before a weight changes: numbers that are not finite, ratios that
exploded, a KL that went too far."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from engine import distributed
from engine.algorithms import Dialect
from engine.errors import RunStopped
from engine.zero.engines import TrainedModel
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters, moments, pretend_cpus_have_fp16
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


EXPLODING = {
    f"{dtype}_{stage}": (stage, f"stage{stage}.json", dtype)
    for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (3, "bf16"))
}


@pytest.fixture(scope="module")
def guarded(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_stops:exploding", folder=folder, stages=EXPLODING)


def same(one: dict, other: dict) -> bool:
    return all(torch.equal(one[role][name], other[role][name]) for role in one for name in one[role])


@pytest.mark.parametrize("stage", EXPLODING)
def test_a_step_with_exploded_ratios_changes_no_weight_on_any_rank(guarded, stage):
    for rank in guarded:
        run = rank[stage]
        assert run["left out"]["policy/ratio_mean"] > LIMIT and run["left out"]["policy/left_out"] == 1
        assert "policy/grad_norm" not in run["left out"] and "value/grad_norm" not in run["left out"]
        assert same(run["before"], run["after"])


@pytest.mark.parametrize("stage", EXPLODING)
def test_the_next_sound_step_learns(guarded, stage):
    for rank in guarded:
        run = rank[stage]
        assert run["sound"]["policy/left_out"] == 0 and run["sound"]["policy/grad_norm"] > 0
        for role, weights in run["after"].items():
            assert any(not torch.equal(weight, run["end"][role][name]) for name, weight in weights.items())


def test_moments_are_those_of_the_sound_step_alone(guarded):
    """Of Adam's first moments, 0.1 of the gradient: left-out gradients would stand in them with 0.9 of their tenth."""
    for rank in guarded:
        norm = torch.cat([part.flatten() for part in rank["fp32_0"]["moments"].values()]).norm().item()
        clipped = min(rank["fp32_0"]["sound"]["policy/grad_norm"], 1.0)
        assert norm == pytest.approx(0.1 * clipped, rel=1e-4)


@pytest.mark.parametrize("limit, epochs", [(1e-6, 2), (1e9, 4)])
def test_epochs_end_with_the_first_that_went_too_far(folder, limit, epochs):
    """In the first pass old and new policy are the same within rounding; later ones have moved."""
    dialect = DIALECT.override(ppo_epochs=4, early_stop_kl=limit, warmup_steps=0)
    for rank in run_ranks("tests.distributed.test_stops:stopping", folder=folder, dialect=dialect, steps=2):
        assert [metrics["policy/epochs"] for metrics in rank] == [epochs] * 2
        assert [metrics["optimizer steps"] for metrics in rank] == [4, 8]  # those left out count
        assert rank[1]["policy/lr"] == pytest.approx(1e-3 * (1 - 4 / 8))  # of the step's first optimizer step


def test_what_is_left_out_is_the_policys_where_the_critic_learns_apart(folder):
    """No mean ratio is under a half; the critic's own optimizer steps have none, and are made."""
    dialect = DIALECT.override(ratio_limit=0.5, ppo_epochs=2, critic_epochs=4, warmup_steps=0)
    for rank in run_ranks("tests.distributed.test_stops:stopping", folder=folder, dialect=dialect, steps=1):
        assert rank[0]["policy/left_out"] == 1 and "policy/grad_norm" not in rank[0]
        assert rank[0]["value/grad_norm"] > 0


BAD_RANK = 1
EXPERIENCE = ("scores", "logprobs", "ref_logprobs", "values")


def all_kinds(folder: str, stages: dict[str, tuple[int, str]]) -> dict[str, dict[str, dict]]:
    """By stage and kind: what the step raised, and whether it left weights and count of steps as they were."""
    found = {}
    for name, (stage, dtype) in stages.items():
        spec = engine_spec(folder, stage, config=f"stage{stage}.json", dtype=dtype)
        trainer = build_trainer(spec, dialect=DIALECT.override(warmup_steps=0))
        trainer.step(TinyPrompts(8).prompts(0))
        found[name] = {}
        for kind, context in spoilers(trainer).items():
            found[name][kind] = outcome(trainer, context)
            if kind.endswith(("loss", "gradient")):
                for model in trainer.models.trained.values():
                    model.step(0.0, skip=True)  # drops the gradients that the step left
    return found


def outcome(trainer: PPOTrainer, spoiled) -> dict:
    """What becomes of a step in this context."""
    before, raised = {role: masters(model) for role, model in trainer.models.trained.items()}, None
    with spoiled:
        try:
            trainer.step(TinyPrompts(8).prompts(1))
        except RunStopped as stop:
            raised = stop
    after = {role: masters(model) for role, model in trainer.models.trained.items()}
    unchanged = all(torch.equal(after[role][name], before[role][name]) for role in before for name in before[role])
    return {
        "message": str(raised),
        "good_until": raised and raised.good_until,
        "unchanged": unchanged,
        "steps_done": trainer.steps_done,
    }


def spoilers(trainer: PPOTrainer) -> dict:
    """By kind: a context in which that number is bad on BAD_RANK alone. The last ones spoil the trainer."""
    models = trainer.models
    return {
        **{name: bad_experience(trainer, name) for name in EXPERIENCE},
        "policy loss": bad_loss(trainer, "_policy_pass"),
        "value loss": bad_loss(trainer, "_value_pass"),
        "actor gradient": bad_gradient(models.actor),
        "critic gradient": bad_gradient(models.critic),
        "critic weight": bad_weight(models.critic),
    }


def bad_experience(trainer: PPOTrainer, name: str):
    make = trainer.experience_maker.make_experience

    def spoiled(*given):
        experience = make(*given)
        if distributed.rank() == BAD_RANK:
            numbers = getattr(experience, name).clone()
            numbers[0 if numbers.dim() == 1 else (0, 0)] = float("nan") if name != "values" else float("inf")
            experience = replace(experience, **{name: numbers})
        return experience

    return mock.patch.object(trainer.experience_maker, "make_experience", spoiled)


def bad_loss(trainer: PPOTrainer, name: str):
    loss = getattr(trainer.learner, name)
    factor = float("nan") if distributed.rank() == BAD_RANK else 1.0
    return mock.patch.object(trainer.learner, name, lambda *args: loss(*args) * factor)


def bad_gradient(model: TrainedModel):
    factor = float("inf") if distributed.rank() == BAD_RANK else 1.0
    return mock.patch.object(model, "backward", lambda loss, last: TrainedModel.backward(model, loss * factor, last))


@contextlib.contextmanager
def bad_weight(model: TrainedModel) -> Iterator[None]:
    def step(lr, overflow=False, skip=False):
        stepped = TrainedModel.step(model, lr, overflow, skip)
        if distributed.rank() == BAD_RANK:
            model.master_shards()[0].view(-1)[0] = float("inf")
        return stepped

    with mock.patch.object(model, "step", step):
        yield


def at_the_floor(folder: str, stages: tuple[int, ...]) -> dict[int, tuple[int, float, str]]:
    """By stage, where rank 1's gradients overflow in each update: how many are made, the loss scale, the message."""
    pretend_cpus_have_fp16()
    found = {}
    for stage in stages:
        actor = build_trainer(engine_spec(folder, stage, dtype="fp16", config=f"stage{stage}.json")).models.actor
        tokens = torch.arange(4, 20).view(2, 8)
        ones, updates = torch.ones_like(tokens), 0
        with pytest.raises(RunStopped) as stopped, bad_gradient(actor):
            while updates < 100:
                logprobs, _ = actor(tokens, ones, ones.cumsum(-1) - 1, response_length=5)
                actor.backward(logprobs.sum(), last=True)
                updates += 1
                assert not actor.step(1e-3, actor.overflowed())
        found[stage] = updates, actor.loss_scale, str(stopped.value)
    return found


def too_far(folder: str, limit: float) -> dict:
    """A trainer with --max_kl at `limit` over a reference that is far away: how its first and second step end."""
    dialect = DIALECT.override(warmup_steps=0)
    trainer = build_trainer(engine_spec(folder, 0), dialect=dialect, max_kl=limit, first_kl_bound=1e-3)
    with further(trainer):
        other_reference = outcome(trainer, contextlib.nullcontext())
    first = trainer.step(TinyPrompts(8).prompts(0)).metrics["objective/kl"]
    with further(trainer):
        return {"other_reference": other_reference, "first": first, **outcome(trainer, contextlib.nullcontext())}


def further(trainer: PPOTrainer):
    """Within this context reference log-probs of rank 1 are lower by 1 nat a token: its own KL is higher by that."""
    make = trainer.experience_maker.make_experience

    def shifted(*given):
        experience = make(*given)
        shift = float(distributed.rank() == BAD_RANK)
        return replace(experience, ref_logprobs=experience.ref_logprobs - shift)

    return mock.patch.object(trainer.experience_maker, "make_experience", shifted)


SPOILT = {"stage 0": (0, "fp32"), "stage 2": (2, "bf16"), "stage 3": (3, "fp32")}
KINDS = (*EXPERIENCE, "policy loss", "value loss", "actor gradient", "critic gradient")
# All is seen in the second step, before its update: what the first step left may be at fault, or may not.
BY_THE_LAST_UPDATE = ("logprobs", "values")
SAID = {"scores": "score (1)", "policy loss": "policy loss (nan)", "value loss": "value loss (nan)"} | {
    "actor gradient": "policy gradient",
    "critic gradient": "value gradient",
}


@pytest.fixture(scope="module")
def spoilt(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_stops:all_kinds", folder=folder, stages=SPOILT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", SPOILT)
def test_both_ranks_stop_with_one_message_and_no_weight_changes(spoilt, stage, kind):
    one, other = (rank[stage][kind] for rank in spoilt)
    assert one["message"] == other["message"]
    assert one["message"].startswith("step 2: a number is NaN or infinite, and nothing was learned from it.\n")
    assert f"rank 1: not finite: {SAID.get(kind, f'{kind} (1)')}" in one["message"]
    for found in (one, other):
        assert found["unchanged"] and found["steps_done"] == 1
        assert found["good_until"] == (0 if kind in BY_THE_LAST_UPDATE else 1)


@pytest.mark.parametrize("stage", SPOILT)
def test_a_weight_that_an_update_made_infinite_ends_the_step(spoilt, stage):
    for rank in spoilt:
        found = rank[stage]["critic weight"]
        assert "step 2: after its update not finite" in found["message"] and "weights of the critic" in found["message"]
        assert "actor" not in found["message"]
        assert found["good_until"] == 1 and found["steps_done"] == 1


def test_max_kl_is_of_all_ranks_responses_and_stops_before_the_update(folder):
    """Of 12 tokens at most, each 1 nat further on one rank of two: a mean of at most 6 nats more, over 1."""
    for rank in run_ranks("tests.distributed.test_stops:too_far", folder=folder, limit=1.0):
        assert abs(rank["first"]) < 0.1
        assert "step 2: objective/kl is " in rank["message"] and "over --max_kl 1" in rank["message"]
        assert rank["unchanged"] and rank["steps_done"] == 1
        assert rank["good_until"] == 0  # that of the start: what the first step made is too far
    for rank in run_ranks("tests.distributed.test_stops:too_far", folder=folder, limit=6.5):
        assert rank["message"] == "None" and not rank["unchanged"]
        other = rank["other_reference"]  # of rank 1 alone, so about half a nat over both
        assert other["message"].startswith("step 1: no weight has been changed") and "differ by 0." in other["message"]
        assert other["unchanged"] and other["steps_done"] == 0


def test_fp16_at_the_floor_of_its_loss_scale_stops_after_16_overflows_at_every_stage(folder):
    """From 2^8, halved by each overflow, to the least, 1: 8 updates; and then 16 that leave it there."""
    for rank in run_ranks("tests.distributed.test_stops:at_the_floor", folder=folder, stages=(0, 2, 3)):
        for updates, scale, message in rank.values():
            assert (updates, scale) == (24, 1.0)
            assert (
                "fp16: the actor's gradients overflowed 16 times in a row with the loss scale at its floor, 1"
                in message
            )
