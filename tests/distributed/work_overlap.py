"""Run by ranks: steps whose last update fills the actor's copy while the critic trains, and steps that do not; and how
often ranks agree on memory."""

from dataclasses import replace
from unittest import mock

from engine import distributed
from engine.beside import Beside
from engine.whole_copies import WholeCopies
from tests.distributed.fills import counted_fills
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, build_trainer, engine_spec
from tests.engine.zero.inspecting import masters


def both_ways(folder: str) -> dict[bool, dict]:
    """By whether the gather overlaps: weights and responses after three steps, and what went on when."""
    return {overlap: _run(folder, overlap) for overlap in (False, True)}


def _run(folder: str, overlap: bool) -> dict:
    spec = engine_spec(folder, 3, config="stage3.json")
    dialect = replace(DIALECT, ppo_epochs=2, mini_batches=2)
    trainer = build_trainer(spec, dialect=dialect, micro_batch_size=2, overlap_gather=overlap)
    feed, events = TinyPrompts(8), []
    models = {"actor": trainer.models.actor, "critic": trainer.models.critic}
    for role, model in models.items():
        model.step = _noted(events, f"{role} steps", model.step)
    copies = trainer.rollouts.copies
    assert isinstance(copies, WholeCopies)
    trainer.models.actor.copies = copies
    copies.begin = _noted(events, "begun", copies.begin)
    reports = [trainer.step(feed.prompts(step)) for step in range(2)]
    begun = copies._begun is not None and isinstance(copies._begun.fill, Beside)
    with counted_fills() as fills:
        reports.append(trainer.step(feed.prompts(2)))
    return {
        "weights": {role: masters(model) for role, model in models.items()},
        "responses": [report.batch.rollout.sequences for report in reports],
        "losses": [report.metrics["value/loss"] for report in reports],
        "begun": begun,
        "fills": len(fills),
        "agreements": _agreements(trainer, feed) if overlap else None,
        "events": events[: len(events) // 3],
    }


def _agreements(trainer, feed: TinyPrompts) -> int:
    """How often ranks agree while experience is made by copies, in four passes of each frozen model and the critic."""
    for model in trainer.models.engines:
        model.copies = trainer.rollouts.copies
    trainer.experience_maker.micro_batch_size = 1
    rollout = trainer.rollouts.generate(feed.prompts(3), SAMPLING)
    assert len(rollout) == 4
    events: list[str] = []
    with mock.patch("engine.distributed.any_rank", _noted(events, "asked", distributed.any_rank)):
        trainer.experience_maker.make_experience(rollout)
    return len(events)


def _noted(events: list, event: str, call):
    def noted(*args, **kwargs):
        events.append(event)
        return call(*args, **kwargs)

    return noted
