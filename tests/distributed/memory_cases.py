"""Runs whose bytes are planned and counted."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.engine_spec import EngineSpec
from engine.memory import Cluster, MemoryPlan, Workload, plan
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig
from scripts.benchmark_models import make_models
from tests.distributed.tiny_run import DIALECT

SIZE = "34m"  # of actor and critic, by the names of scripts/benchmark_models.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on `world` ranks.

    lora: the dimension of the adapters of actor and critic, which train alone; 0 for none. average: of the actor's
    weights. rows: responses of a rank; micro: those of one pass; prompt, response: tokens of each. backend,
    between_steps: as `build_rollouts` has them.
    """

    name: str
    world: int = 1
    stage: int = 0
    dtype: str = "fp32"
    checkpointing: bool = False
    average: bool = False
    lora: int = 0
    rows: int = 4
    micro: int = 2
    prompt: int = 64
    response: int = 16
    backend: str = "replica"
    between_steps: str = "keep"

    def models(self, folder: Path) -> tuple[str, str]:
        """Folders of its actor and its critic.

        The files are in float16, which no case computes in: weights of their file's own dtype stay where the file is
        mapped, on CPUs, and take no memory until they change.
        """
        return make_models(folder / SIZE, SIZE, SIZE, torch.float16)

    def spec(self, actor: str, critic: str) -> EngineSpec:
        """The engines of this case, of these folders' models."""
        lora = LoraSpec(dim=self.lora, only=True) if self.lora else None
        return EngineSpec(
            actor_path=actor,
            critic_path=critic,
            dtype=self.dtype,
            actor=EngineConfig("actor", self.stage),
            critic=EngineConfig("critic", self.stage),
            actor_gradient_checkpointing=self.checkpointing,
            critic_gradient_checkpointing=self.checkpointing,
            micro_batch_size=self.micro,
            ema_decay=DIALECT.ema_decay if self.average else None,
            actor_lora=lora,
            critic_lora=lora,
        )

    def planned(self, actor: str, critic: str) -> MemoryPlan:
        """What is planned for this case, on CPUs, from the models' configurations."""
        workload = Workload(
            prompt=self.prompt,
            response=self.response,
            generated=self.rows,
            responses=self.rows,
            micro_batch=self.micro,
            backend=self.backend,
            between_steps=self.between_steps,
        )
        return plan(self.spec(actor, critic), workload, Cluster(gpus=self.world, on_gpu=False))


CASES = [
    Case(name="stage 0, bf16", dtype="bf16", checkpointing=True, average=True),
    Case(name="stage 3", stage=3, world=2),
    Case(name="adapters, stage 3", lora=16, stage=3, world=2),
]
