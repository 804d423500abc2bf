"""Mixed pretraining: the actor goes on learning from plain texts while PPO trains it, so that it forgets less.

    gradient of one optimizer step = (PPO's + coefficient * the language model's) / 2

The language-model loss is the mean over all predicted tokens of the optimizer step, over all ranks. Source: Ouyang et
al. 2022 (InstructGPT), eq. 2; the half is DeepSpeed-Chat's (DeepSpeedExamples 83757d9c), which takes the mean over the
passes of both losses.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine import distributed
from engine.experience import position_ids
from engine.packing import weighted_passes
from engine.zero.engines import TrainedModel
from training.reporting.metrics import Accumulator


class TextFeed(Protocol):
    """This rank's plain texts."""

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64, blocks of L tokens without padding for an optimizer step of the run, counted from 0.

        At least one block; their number may differ between ranks.
        """


class MixedPretraining:
    """The language-model half of the actor's optimizer steps."""

    def __init__(self, actor: TrainedModel, feed: TextFeed, coefficient: float, micro_batch_size: int):
        self.actor, self.feed = actor, feed
        self.coefficient, self.micro_batch_size = coefficient, micro_batch_size

    def mixed(
        self, shares: list[Callable[[], Tensor]], optimizer_step: int, metrics: Accumulator
    ) -> list[Callable[[], Tensor]]:
        """Half of each of PPO's shares of the loss, and behind them this rank's halves of the language model's.

        All ranks call this together, and are given equally many.
        """
        parts = self.feed.texts(optimizer_step).to(distributed.device()).split(self.micro_batch_size)
        own = torch.tensor(float(sum(_targets(part) for part in parts)), device=distributed.device())
        tokens = distributed.all_reduce_sum(own).item()
        weights = [self.coefficient / tokens] * len(parts)
        _, own_shares = weighted_passes(self._loss, parts, weights, distributed.largest(len(parts)), metrics)
        return [lambda share=share: 0.5 * share() for share in [*shares, *own_shares]]

    def _loss(self, blocks: Tensor, metrics: Accumulator | None) -> Tensor:
        """The sum of the negative log-probs of all tokens but each block's first, which nothing predicts."""
        mask = torch.ones_like(blocks)
        logprobs, _ = self.actor(blocks, mask, position_ids(mask), response_length=blocks.shape[1] - 1)
        loss = -logprobs.sum()
        if metrics is not None:
            metrics.add("policy/lm_loss", loss, _targets(blocks))
        return loss


def _targets(blocks: Tensor) -> int:
    """The number of tokens that are predicted."""
    return blocks.numel() - len(blocks)
