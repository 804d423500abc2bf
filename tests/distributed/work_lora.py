"""Run by ranks: gradients and two optimizer steps of actors and critics with LoRA."""

import math
import zlib
from unittest import mock

import torch
from torch import Tensor

from engine import distributed, rlhf_engine
from engine.engine_spec import OptimizerSpec
from engine.experience import TrainingBatch
from engine.models import lora
from engine.models.lora import LoraSpec
from tests.distributed.tiny_run import build_trainer, engine_spec
from tests.distributed.work_gradients import LEARNING_RATE, MICRO_BATCH, MOVING, ROWS, one_step
from tests.engine.zero.inspecting import pretend_cpus_have_fp16, weights

DIM, ALPHA, LORA_RATE = 4, 2.0, 3e-3  # another rate than MOVING's of all else


def all_runs(folder: str, batch: TrainingBatch, runs: dict[str, dict]) -> dict[str, dict]:
    """`one_run` of each set of arguments, by the same names."""
    pretend_cpus_have_fp16()
    return {name: one_run(folder, batch, **arguments) for name, arguments in runs.items()}


def one_run(
    folder: str,
    batch: TrainingBatch,
    stage: int,
    only: bool = True,
    config: str | None = None,
    dtype: str = "fp32",
    checkpointing: bool = False,
) -> dict[str, dict]:
    """The first step's gradients, and the weights before and after two steps, by role."""
    spec = LoraSpec(dim=DIM, alpha=ALPHA, lr=LORA_RATE, only=only)
    engines = engine_spec(
        folder,
        stage,
        dtype=dtype,
        config=config or f"stage{stage}.json",
        reference=None,
        reward=None,
        actor_lora=spec,
        critic_lora=spec,
        actor_optimizer=OptimizerSpec(lr=LEARNING_RATE),
        critic_optimizer=OptimizerSpec(lr=LEARNING_RATE),
        actor_gradient_checkpointing=checkpointing,
        critic_gradient_checkpointing=checkpointing,
    )
    unequal = mock.patch.object(rlhf_engine, "check_results")  # such factors make another model of it
    with mock.patch.object(lora, "draw", start), unequal:
        trainer = build_trainer(engines, dialect=MOVING, micro_batch_size=MICRO_BATCH)
    trained = trainer.models.trained
    before = {role: weights(model) for role, model in trained.items()}
    own = batch.select(slice(*ROWS[distributed.rank()]))
    scales = {role: model.loss_scale for role, model in trained.items()}
    gradients = one_step(trainer, own)
    one_step(trainer, own)
    return {
        role: {
            "gradients": {name: g / scales[role] for name, g in gradients[role].items()},
            "before": before[role],
            "after": weights(model),
        }
        for role, model in trained.items()
    }


@torch.no_grad()
def start(a: Tensor, b: Tensor, spec: LoraSpec, name: str) -> None:
    """In place of zeros for B, under which A would have no gradient."""
    for factor, drawn in zip((a, b), factors(name, a.shape, b.shape), strict=True):
        factor.copy_(drawn)


def factors(name: str, *shapes) -> list[Tensor]:
    """Numbers for a layer's factors, by its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for shape in shapes]
