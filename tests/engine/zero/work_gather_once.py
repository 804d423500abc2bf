"""Run by ranks: an optimizer step of three micro-batches, with more and less kept whole over them."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from unittest import mock

import deepspeed
import torch

from engine import distributed
from engine.actor_copy import ActorCopy
from engine.experience import TrainingBatch
from engine.zero.engines import TrainedModel
from engine.zero.gather_once import Kept
from engine.zero.gathering import is_available
from tests.distributed.tiny_run import build_trainer, engine_spec
from tests.distributed.work_gradients import ROWS, STILL, one_step
from training.ppo_trainer import PPOTrainer

WAYS = {"nothing": Kept(), "weights": Kept(weights=True), "both": Kept(weights=True, gradients=True)}


def steps(folder: str, batch: TrainingBatch, dtypes: list[str]) -> dict[tuple[str, str], dict]:
    """`one_step` by (dtype, name in WAYS, or "decided"), with the calls that it took and the parameters left whole.

    "decided" comes first of each dtype and says what was decided; `_copied` comes last.
    """
    own, found = batch.select(slice(*ROWS[distributed.rank()])), {}
    for dtype in dtypes:
        spec = engine_spec(folder, 3, config="stage3.json", dtype=dtype)
        trainer = build_trainer(spec, dialect=STILL, micro_batch_size=1)
        models = [trainer.models.actor, trainer.models.critic]
        found[dtype, "decided"] = one_step(trainer, own) | {"kept": [model.training_gather.kept for model in models]}
        for name, kept in WAYS.items():
            for model in models:
                model.training_gather.kept = kept
            with counted() as calls:
                found[dtype, name] = one_step(trainer, own)
            whole = [p for model in models for p in model.module.parameters() if is_available(p)]
            found[dtype, name] |= {"calls": dict(calls), "whole": len(whole)}
        found |= {(dtype, name): result for name, result in _copied(trainer, own).items()}
    return found


def _copied(trainer: PPOTrainer, batch: TrainingBatch) -> dict[str, dict]:
    """A step while copies hold the weights, "copied", and the one after it, whose weights they do not hold, "stale"."""
    models, found = [trainer.models.actor, trainer.models.critic], {}
    for model in models:
        model.training_gather.kept = Kept()
    models[0].copy = ActorCopy(models[0])
    held = [models[0].copy.module()]
    before = [[weight.clone() for weight in copy.parameters()] for copy in held]
    for name in ("copied", "stale"):
        with counted() as calls:
            found[name] = one_step(trainer, batch)
        whole = [p for model in models for p in model.module.parameters() if is_available(p)]
        found[name] |= {"calls": dict(calls), "whole": len(whole)}
    found["copied"]["copies changed"] = any(
        not torch.equal(weight, was)
        for copy, weights in zip(held, before, strict=True)
        for weight, was in zip(copy.parameters(), weights, strict=True)
    )
    return found


@contextlib.contextmanager
def counted() -> Iterator[Counter]:
    """Counts passes, and the calls by which ZeRO gathers weights and reduces gradients in them."""
    calls, accumulating = Counter(), TrainedModel.accumulating

    def counting(name: str, function: Callable) -> Callable:
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def passes(model: TrainedModel, number: int) -> Iterator[None]:
        calls["passes"] += number
        backend = deepspeed.comm.comm.cdb
        gather, reduce = backend.all_gather_function, backend.reduce_scatter_function
        with (
            mock.patch.object(backend, "all_gather_function", counting("gathers", gather)),
            mock.patch.object(backend, "reduce_scatter_function", counting("reductions", reduce)),
            accumulating(model, number),
        ):
            yield

    with mock.patch.object(TrainedModel, "accumulating", passes):
        yield calls
