"""Run by ranks: the bytes of tensors alive in two whole steps, by phase."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.experience import PromptBatch
from engine.models.lora import LoraSpec
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from tests.distributed.tiny_run import DIALECT
from tests.engine.meters import LiveBytes, LivePeak
from training.data.prompts import collate_prompts
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.program import model_folders
from training.reporting.phase_memory import phase_memory, tensor_bytes

EOS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of which the bytes are counted.

    rows: responses of a rank. micro: those of one pass. lora: the dimension of the adapters of actor and critic, which
    alone train; 0 for none. backend, between_steps: as `build_rollouts` has them.
    """

    name: str
    size: str = "34m"
    world: int = 1
    stage: int = 0
    dtype: str = "fp32"
    rows: int = 4
    micro: int = 2
    prompt: int = 64
    response: int = 32
    checkpointing: bool = False
    ema: bool = False
    backend: str = "replica"
    between_steps: str = "keep"
    offload: bool = False
    lora: int = 0

    def spec(self, actor: str, critic: str) -> EngineSpec:
        """The engines of this case, of these folders' models."""
        lora = LoraSpec(dim=self.lora, only=True) if self.lora else None
        return EngineSpec(
            actor_path=actor,
            critic_path=critic,
            dtype=self.dtype,
            actor=EngineConfig("actor", self.stage, self.offload),
            critic=EngineConfig("critic", self.stage, self.offload),
            actor_gradient_checkpointing=self.checkpointing,
            critic_gradient_checkpointing=self.checkpointing,
            micro_batch_size=self.micro,
            ema_decay=DIALECT.ema_decay if self.ema else None,
            **({"actor_lora": lora, "critic_lora": lora} if lora else {}),
        )

    def prompts(self) -> PromptBatch:
        """As long as they may be, so that nothing that is planned for stays unused."""
        tokens = [[5 + row] * self.prompt for row in range(self.rows)]
        return collate_prompts(tokens, torch.arange(self.rows), torch.zeros(self.rows, dtype=torch.int64), 0)


def counted(case: Case, actor: str, critic: str) -> dict[str, int]:
    """By phase the most bytes alive at once on this rank: loading, and the phases of the second step, in which Adam has
    its moments. "rest": what is held between steps, which a walk over all objects finds too."""
    with LiveBytes() as live:
        phase_memory._gauge, phase_memory.counting = LivePeak(live), True
        with phase_memory.phase("load"):
            models = RLHFEngine.from_pretrained(case.spec(actor, critic))
        trainer = _trainer(case, models)
        for _ in range(2):
            trainer.step(case.prompts())
        with phase_memory.phase("rest"):
            rest = tensor_bytes()
        with phase_memory.phase("save"), tempfile.TemporaryDirectory() as folder:
            for role, model in models.trained.items():
                model_folders.save(model, models.tokenizer, Path(folder), role)
    assert rest == phase_memory.bytes["rest"], (rest, phase_memory.bytes["rest"])
    return phase_memory.bytes


def _trainer(case: Case, models: RLHFEngine) -> PPOTrainer:
    rollouts = build_rollouts(
        case.backend,
        models.actor,
        models.tokenizer,
        others=models.engines,
        rows_at_once=case.rows,
        row_length=case.prompt + case.response,
        between_steps=case.between_steps,
    )
    return PPOTrainer(
        models=models,
        rollouts=rollouts,
        dialect=DIALECT,
        sampling=SamplingConfig(max_new_tokens=case.response, pad_token_id=0, stop_token_ids=(EOS,), seed=3),
        config=PPOConfig(total_steps=3, micro_batch_size=case.micro),
    )
