"""Step 3 with vLLM that also writes what each step learned from, for scripts/sampler_gap.py.

    KEEP_BATCHES=out/batches deepspeed --num_gpus 2 scripts/vllm_batches.py --rollout_backend vllm --output_dir out ...

KEEP_BATCHES: a folder, for an engine.experience.TrainingBatch of each step and rank, STEP_RANK.pt.
ROUNDED_TO: as in scripts/rounded_sampler.py; what vLLM is given is rounded so. Nothing is, where it is not set.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import torch

from engine import distributed
from engine.rollout.vllm_engine import VLLMEngine
from scripts.rounded_sampler import rounded
from training.program.phases import place
from training.reporting.step_metrics import STEP_METRICS
from training.step3_rlhf import program


def keep(metrics, batch, algorithm) -> None:
    """Write this rank's batch."""
    folder = Path(os.environ["KEEP_BATCHES"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(batch, folder / f"{place.step}_{distributed.rank()}.pt")


class RoundedEngine(VLLMEngine):
    """vLLM with rounded matrices."""

    def load(self, weights) -> None:
        """Take weights."""
        to = os.environ["ROUNDED_TO"]
        super().load((name, rounded(weight, to) if weight.dim() == 2 else weight) for name, weight in weights)


if __name__ == "__main__":
    STEP_METRICS.append(keep)
    if "ROUNDED_TO" in os.environ:
        from engine.rollout import vllm_backend

        vllm_backend.VLLMEngine = RoundedEngine
    program()
