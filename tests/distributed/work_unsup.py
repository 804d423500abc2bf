"""Run by ranks: the gradients of an optimizer step that learns from plain texts too."""

import torch

from engine import distributed
from engine.experience import TrainingBatch
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from tests.distributed.tiny_run import SAMPLING, engine_spec
from tests.distributed.work_gradients import MICRO_BATCH, ROWS, STILL, one_step
from training.ppo_trainer import PPOConfig, PPOTrainer

COEFFICIENT = 0.8
BLOCKS = ((0, 5), (5, 6))  # the blocks of each rank: with MICRO_BATCH 2, three micro-batches and one


class Texts:
    """This rank's share of the same blocks, whichever optimizer step they are for; `asked` says which."""

    def __init__(self, blocks: torch.Tensor):
        self.blocks, self.asked = blocks, []

    def texts(self, optimizer_step: int) -> torch.Tensor:
        """(5 or 1, L) int64."""
        self.asked.append(optimizer_step)
        return self.blocks[slice(*BLOCKS[distributed.rank()])]


def all_stages(folder: str, batch: TrainingBatch, blocks: torch.Tensor, stages: dict[str, tuple[int, str]]) -> dict:
    """`one_stage` of each (stage, name of the DeepSpeed JSON), by the same names."""
    return {name: one_stage(folder, batch, blocks, stage, config) for name, (stage, config) in stages.items()}


def one_stage(folder: str, batch: TrainingBatch, blocks: torch.Tensor, stage: int, config: str) -> dict:
    """Two optimizer steps without movement: gradients and metrics of the second, and what texts were asked for."""
    engine, feed = RLHFEngine.from_pretrained(engine_spec(folder, stage, config=config)), Texts(blocks)
    trainer = PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer),
        dialect=STILL,
        sampling=SAMPLING,
        unsupervised=feed,
        config=PPOConfig(total_steps=3, micro_batch_size=MICRO_BATCH, unsup_coef=COEFFICIENT),
    )
    own = batch.select(slice(*ROWS[distributed.rank()]))
    one_step(trainer, own)
    trainer.counters.optimizer_steps += 1
    return one_step(trainer, own) | {"asked": feed.asked}
