"""Run by ranks: the bytes of tensors alive in two whole steps, by phase."""

import gc
import tempfile
from pathlib import Path

import torch

from engine.experience import PromptBatch
from engine.rlhf_engine import RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from tests.distributed.memory_cases import Case
from tests.distributed.tiny_run import DIALECT
from tests.engine.meters import LiveBytes
from training.data.examples import collate_prompts
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.reporting import step_metrics
from training.reporting.step_metrics import PhaseMemory
from training.runtime import model_folders

EOS = 2


class LivePeak(PhaseMemory):
    """Counts the most bytes alive within a phase by `LiveBytes`."""

    def __init__(self, live: LiveBytes):
        super().__init__()
        self.live = live

    def begin(self) -> None:
        """Count from what is alive now, without what only circles hold."""
        gc.collect()
        self.live.peak = self.live.live

    def end(self) -> int:
        """The peak since."""
        return self.live.peak


def counted(case: Case, actor: str, critic: str) -> dict[str, int]:
    """By phase the most bytes alive at once on this rank: loading, the phases of two steps (Adam has its moments in the
    second; what stays frozen is copied in the first), and saving.

    "between": what is held between steps.
    """
    with LiveBytes() as live:
        memory = step_metrics.phase_memory = LivePeak(live)
        memory.counting = True
        with memory.phase("load"):
            models = RLHFEngine.from_pretrained(case.spec(actor, critic))
        trainer = _trainer(case, models)
        trainer.step(_prompts(case))
        first = dict(memory.bytes)
        trainer.step(_prompts(case))
        memory.bytes |= {phase: max(first[phase], count) for phase, count in memory.bytes.items()}
        gc.collect()
        memory.bytes |= {"between": live.live, "experience": memory.bytes["make_experience"]}
        with memory.phase("save"), tempfile.TemporaryDirectory() as folder:
            for role, model in models.trained.items():
                model_folders.save(model, models.tokenizer, Path(folder), role)
    return memory.bytes


def _prompts(case: Case) -> PromptBatch:
    """As long as they may be, so that nothing that is planned for stays unused."""
    tokens = [[5 + row] * case.prompt for row in range(case.rows)]
    return collate_prompts(tokens, torch.arange(case.rows), torch.zeros(case.rows, dtype=torch.int64), 0)


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
