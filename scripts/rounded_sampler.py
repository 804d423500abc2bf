"""Step 3 with a sampler that is off on purpose: it draws with rounded weights, and the actor learns with its own.

    ROUNDED_TO=int3 deepspeed --num_gpus 2 scripts/rounded_sampler.py --rollout_backend rounded --actor_zero_stage 3 ...

ROUNDED_TO: bf16, or a number of bits: int8 has each row of a matrix in 255 equal steps, int3 in 7.
scripts/trial_corrections.sh has it learn the quickstart's task.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import torch
from torch import Tensor

from engine.experience import PromptBatch, Rollout
from engine.rollout import ROLLOUT_BACKENDS, SamplingConfig
from engine.rollout.backends import ReplicaRollouts
from training.step3_rlhf import program


class RoundedRollouts(ReplicaRollouts):
    """Responses from a copy of the actor whose matrices are rounded; at ZeRO stage 3, where there is a copy."""

    computes_as_actor = False

    def __init__(self, actor, tokenizer):
        assert actor.stage == 3, "--actor_zero_stage 3 is needed: at other stages the sampler is the actor itself"
        super().__init__(actor, tokenizer, decoding="auto")
        self.rounded_to, self._rounded = os.environ["ROUNDED_TO"], None
        self.why = f"rollouts by a copy of the actor, rounded to {self.rounded_to}"

    @torch.no_grad()
    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks do not wait for each other."""
        copy = self.copies.of(self.actor, merged=True)
        if self._rounded != self.actor.version:
            for weights in copy.parameters():
                if weights.dim() == 2:
                    weights.copy_(rounded(weights, self.rounded_to))
            self._rounded = self.actor.version
        return super().generate(prompts, sampling)


def rounded(matrix: Tensor, to: str) -> Tensor:
    """A matrix (N, M) float32 in bf16's numbers, or each row in those of signed integers, "int" and their bits."""
    if to == "bf16":
        return matrix.bfloat16().float()
    steps = 2 ** (int(to.removeprefix("int")) - 1) - 1
    size = matrix.abs().amax(1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny) / steps
    return (matrix / size).round() * size


ROLLOUT_BACKENDS["rounded"] = RoundedRollouts

if __name__ == "__main__":
    program()
