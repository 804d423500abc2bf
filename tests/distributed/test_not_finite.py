"""A number of one rank that is NaN or infinite stops both, before it reaches a weight that is kept; --max_kl too."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch

from engine import distributed
from engine.errors import RunStopped
from engine.zero.engines import TrainedModel
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT, TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters, pretend_cpus_have_fp16
from training.ppo_trainer import PPOTrainer

BAD_RANK = 1
EXPERIENCE = ("scores", "logprobs", "ref_logprobs", "values")


def all_kinds(folder: str, stages: dict[str, int]) -> dict[str, dict[str, dict]]:
    """By stage and kind: what the step raised, and whether it left weights and count of steps as they were."""
    found = {}
    for name, stage in stages.items():
        spec = engine_spec(folder, stage, config=f"stage{stage}.json")
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
        "policy loss": bad_loss(trainer, "_policy_loss"),
        "value loss": bad_loss(trainer, "_value_loss"),
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


STAGES = {"stage 0": 0, "stage 3": 3}
KINDS = (*EXPERIENCE, "policy loss", "value loss", "actor gradient", "critic gradient")
# All is seen in the second step, before its update: what the first step left may be at fault, or may not.
BY_THE_LAST_UPDATE = ("logprobs", "values")
SAID = {"scores": "score (1)", "policy loss": "policy loss (nan)", "value loss": "value loss (nan)"} | {
    "actor gradient": "policy gradient",
    "critic gradient": "value gradient",
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks("tests.distributed.test_not_finite:all_kinds", folder=folder, stages=STAGES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_both_ranks_stop_with_one_message_and_no_weight_changes(ranks, stage, kind):
    one, other = (rank[stage][kind] for rank in ranks)
    assert one["message"] == other["message"]
    assert one["message"].startswith("step 2: a number is NaN or infinite, and nothing was learned from it.\n")
    assert f"rank 1: not finite: {SAID.get(kind, f'{kind} (1)')}" in one["message"]
    for found in (one, other):
        assert found["unchanged"] and found["steps_done"] == 1
        assert found["good_until"] == (0 if kind in BY_THE_LAST_UPDATE else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_that_an_update_made_infinite_ends_the_step(ranks, stage):
    for rank in ranks:
        found = rank[stage]["critic weight"]
        assert "step 2: after its update not finite" in found["message"] and "weights of the critic" in found["message"]
        assert "actor" not in found["message"]
        assert found["good_until"] == 1 and found["steps_done"] == 1


def test_max_kl_is_of_all_ranks_responses_and_stops_before_the_update(folder):
    """Of 12 tokens at most, each 1 nat further on one rank of two: a mean of at most 6 nats more, over 1."""
    for rank in run_ranks("tests.distributed.test_not_finite:too_far", folder=folder, limit=1.0):
        assert abs(rank["first"]) < 0.1
        assert "step 2: objective/kl is " in rank["message"] and "over --max_kl 1" in rank["message"]
        assert rank["unchanged"] and rank["steps_done"] == 1
        assert rank["good_until"] == 0  # that of the start: what the first step made is too far
    for rank in run_ranks("tests.distributed.test_not_finite:too_far", folder=folder, limit=6.5):
        assert rank["message"] == "None" and not rank["unchanged"]
        other = rank["other_reference"]  # of rank 1 alone, so about half a nat over both
        assert other["message"].startswith("step 1: no weight has been changed") and "differ by 0." in other["message"]
        assert other["unchanged"] and other["steps_done"] == 0


def test_fp16_at_the_floor_of_its_loss_scale_stops_after_16_overflows_at_every_stage(folder):
    """From 2^8, halved by each overflow, to the least, 1: 8 updates; and then 16 that leave it there."""
    for rank in run_ranks("tests.distributed.test_not_finite:at_the_floor", folder=folder, stages=(0, 2, 3)):
        for updates, scale, message in rank.values():
            assert (updates, scale) == (24, 1.0)
            assert (
                "fp16: the actor's gradients overflowed 16 times in a row with the loss scale at its floor, 1"
                in message
            )
