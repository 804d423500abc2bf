"""Run by ranks: the gradients of one optimizer step, and the weights after two."""

from dataclasses import replace

import torch

from engine import distributed
from engine.algorithms import Algorithm
from engine.experience import TrainingBatch
from engine.models.attention import Attention
from engine.zero.engines import TrainedModel
from scripts.harness.models import PAD
from tests.distributed.tiny_run import DIALECT, build_trainer, engine_spec
from tests.engine.zero.inspecting import gradients, weights
from training.learner import Learner
from training.ppo_trainer import PPOTrainer
from training.reporting.metrics import Accumulator

ROWS = ((0, 5), (5, 7))  # the rows of each rank: with MICRO_BATCH 2, three micro-batches and one
MICRO_BATCH = 2
TEMPERATURE = 0.8
LEARNING_RATE = 1e-3
BONUS = 0.3  # the entropy_coef
STILL = replace(DIALECT, actor_lr=0.0, critic_lr=0.0, warmup_steps=0, lr_schedule="constant", temperature=TEMPERATURE)
MOVING = replace(STILL, actor_lr=LEARNING_RATE, critic_lr=LEARNING_RATE)


def all_stages(folder: str, batch: TrainingBatch, stages: dict[str, tuple]) -> dict[str, dict]:
    """`one_stage` of each (stage, name of the DeepSpeed JSON, and perhaps packing and ranks a group), by the same
    names."""
    return {name: one_stage(folder, batch, *how) for name, how in stages.items()}


def one_stage(
    folder: str, batch: TrainingBatch, stage: int, config: str, packing: str = "auto", ranks: int = 1
) -> dict:
    """Gradients of the loss as it is, of two wrong ones and with an entropy bonus; two real steps, with the bonus, of
    the model with tied embeddings."""
    own = batch.select(slice(*ROWS[distributed.rank()]))
    attention = Attention(packing=packing, ranks=ranks)
    spec = engine_spec(folder, stage, config=config, attention=attention)
    trainer = build_trainer(spec, dialect=STILL, micro_batch_size=MICRO_BATCH)
    result = {
        "right": one_step(trainer, own),
        "one_sided": one_step(trainer, batch, rows=len(batch) if distributed.is_main() else 0),
    }
    learner = trainer.learner
    learner._loss_weights = lambda parts: [
        [1.01 * weight for weight in column] for column in Learner._loss_weights(learner, parts)
    ]
    result["scaled"] = one_step(trainer, own)
    del learner._loss_weights
    learner.algorithm = Algorithm(replace(STILL, loss_scope="micro_batch"), pad_token_id=PAD)
    result["mean_of_means"] = one_step(trainer, own)
    learner.algorithm = Algorithm(replace(STILL, entropy_coef=BONUS), pad_token_id=PAD)
    result["bonus"] = one_step(trainer, own)
    result["one_sided_bonus"] = one_step(trainer, batch, rows=len(batch) if distributed.is_main() else 0)

    spec = engine_spec(
        folder,
        stage,
        config=config,
        actor="tied",
        attention=attention,
        actor_gradient_checkpointing=True,
        critic_gradient_checkpointing=True,
    )
    trainer = build_trainer(spec, dialect=replace(MOVING, entropy_coef=BONUS), micro_batch_size=MICRO_BATCH)
    result["tied"] = one_step(trainer, own)
    one_step(trainer, own)
    result["moved"] = {"actor": weights(trainer.models.actor), "critic": weights(trainer.models.critic)}
    return result


def one_step(trainer: PPOTrainer, batch: TrainingBatch, rows: int | None = None) -> dict[str, dict]:
    """An optimizer step on the first `rows`, by default all; the gradients before it, and its metrics."""
    found = {}

    def watch(name: str, model) -> None:
        def step(*args, **kwargs):
            found[name] = gradients(model)
            return TrainedModel.step(model, *args, **kwargs)

        model.step = step

    watch("actor", trainer.models.actor)
    watch("critic", trainer.models.critic)
    metrics = Accumulator()
    chosen = torch.arange(len(batch) if rows is None else rows)
    trainer.learner.update(batch, chosen, metrics, actor=True, critic=True)
    return found | {"metrics": metrics.reduce()}
