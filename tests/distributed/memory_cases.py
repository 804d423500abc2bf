"""Runs whose bytes are planned and counted: twelve combinations, and one task in four ways."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.engine_spec import EngineSpec
from engine.memory import Cluster, MemoryPlan, Workload, plan
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig
from scripts.benchmark_models import make_models
from tests.distributed.tiny_run import DIALECT
from tests.tiny_adapters import make_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run on `world` ranks.

    size: of actor and critic, by the names of scripts/benchmark_models.py. rows: responses of a rank; micro: those of
    one pass; prompt, response: tokens of each. lora: the dimension of the adapters of actor and critic, 0 for none;
    only: they alone train. average: of the actor's weights. backend, between_steps: as `build_rollouts` has them.
    """

    name: str
    size: str = "34m"
    world: int = 1
    stage: int = 0
    dtype: str = "fp32"
    rows: int = 4
    micro: int = 2
    prompt: int = 64
    response: int = 16
    checkpointing: bool = False
    average: bool = False
    backend: str = "replica"
    between_steps: str = "keep"
    offload: bool = False
    lora: int = 0
    only: bool = True
    share_trunk: bool = False

    def models(self, folder: Path) -> tuple[str, str]:
        """Folders of its actor and its critic, which is an adapter on the actor where the trunk is shared.

        The files are in float16, which no case computes in: weights of their file's own dtype stay where the file is
        mapped, on CPUs, and take no memory until they change.
        """
        actor, critic = make_models(folder / self.size, self.size, self.size, torch.float16)
        if self.share_trunk:
            critic = make_adapter(folder / f"{self.size}_reward", actor, scorer=True, dim=self.lora)
        return actor, critic

    def spec(self, actor: str, critic: str) -> EngineSpec:
        """The engines of this case, of these folders' models."""
        lora = LoraSpec(dim=self.lora, only=self.only) if self.lora else None
        return EngineSpec(
            actor_path=actor,
            critic_path=critic,
            dtype=self.dtype,
            actor=EngineConfig("actor", self.stage, self.offload),
            critic=EngineConfig("critic", self.stage, self.offload),
            actor_gradient_checkpointing=self.checkpointing,
            critic_gradient_checkpointing=self.checkpointing,
            micro_batch_size=self.micro,
            ema_decay=DIALECT.ema_decay if self.average else None,
            actor_lora=lora,
            critic_lora=lora,
            share_trunk=self.share_trunk,
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
    Case(name="stage 0"),
    Case(name="stage 0, bf16", dtype="bf16", checkpointing=True, average=True),
    Case(name="stage 0, long rows", dtype="bf16", prompt=384, response=128, rows=2),
    Case(name="stage 1", stage=1, world=2, average=True),
    Case(name="stage 2", stage=2, world=2, dtype="bf16", checkpointing=True, rows=8, micro=4),
    Case(name="stage 2, offload", stage=2, world=2, offload=True),
    Case(name="stage 3", stage=3, world=2),
    Case(name="stage 3, copies freed", stage=3, world=2, dtype="bf16", between_steps="free", average=True),
    Case(name="stage 3, no copies", stage=3, world=2, backend="zero3", checkpointing=True),
    Case(name="136M", size="136m", dtype="bf16", checkpointing=True),
    Case(name="adapters", lora=16, dtype="bf16"),
    Case(name="adapters, stage 3", lora=16, stage=3, world=2),
]
TESTED = ["stage 0, bf16", "stage 3", "adapters, stage 3"]


def ways(size: str) -> list[Case]:
    """One task, the models of one size: all weights, adapters beside what else trains, alone, and on one trunk."""
    return [
        Case(name="all weights", size=size),
        Case(name="adapters and the rest", size=size, lora=16, only=False),
        Case(name="adapters alone: two trunks", size=size, lora=16),
        Case(name="adapters alone: one trunk", size=size, lora=16, share_trunk=True),
    ]
