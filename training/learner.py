"""One optimizer step: from rows of an experience to new weights of actor and critic."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine import distributed
from engine.algo.guards import ratio_exploded
from engine.algo.losses import loss_weights
from engine.algorithms import Dialect
from engine.experience import Experience
from engine.experience_maker import estimated
from engine.learnable import actor_loss, counted_responses, critic_loss
from engine.packing import micro_batches
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from training.mixed_pretraining import MixedPretraining
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import stop_if_not_finite

# The sum of a micro-batch's losses, which has a gradient; with its metrics, where it is no dummy.
Loss = Callable[[Experience, Accumulator | None], Tensor]


@dataclass(frozen=True, slots=True)
class Pupil:
    """A model that learns in a step: what metrics call it, its loss, its peak learning rate."""

    name: str
    model: TrainedModel
    loss: Loss
    peak_lr: float


class Learner:
    """Trains the actor, and the critic if there is one, of an RLHFEngine.

    pretraining: what the actor learns from beside the experience; nothing if None.
    """

    def __init__(
        self, engine: RLHFEngine, dialect: Dialect, micro_batch_size: int, pretraining: MixedPretraining | None = None
    ):
        self.engine, self.dialect, self.micro_batch_size = engine, dialect, micro_batch_size
        self.pretraining = pretraining

    def step(
        self,
        experience: Experience,
        rows: Tensor,
        metrics: Accumulator,
        *,
        step: int,
        optimizer_step: int,
        lr_factor: float,
        train_actor: bool,
    ) -> Tensor:
        """One step of the critic, and of the actor if it is to learn, on the same rows (all ranks call this).

        Both are skipped together when either overflows in fp16, or the mean ratio is over the dialect's limit: or they
        would drift apart.

        Args:
            rows: (N,) int64, of this rank's experience.
            step, optimizer_step: the run's, from 1, for messages; that of the texts, from 0.
            lr_factor: what peak learning rates are multiplied by.

        Returns: (3,) float64, sums of the policy's ratios and approxkl over this rank's rows, and what they are over.
        """
        engine, sums = self.engine, torch.zeros(3, dtype=torch.float64, device=distributed.device())
        parts = self._micro_batches(experience, rows)
        weights, losses = self._loss_weights(parts), {}
        parts = parts or [experience.select(slice(0, 1))]
        pupils = self._pupils(train_actor, sums)
        for pupil in pupils:
            shares = self._shares(pupil.loss, parts, weights[pupil.name], metrics)
            if pupil.model is engine.actor and self.pretraining is not None:
                shares = self.pretraining.mixed(shares, optimizer_step, metrics)
            losses[f"{pupil.name} loss"] = accumulate_gradients(pupil.model, shares)
        exploded = self._exploded(sums, metrics)
        overflows = [False] * len(pupils)
        if not exploded:
            stop_if_not_finite(step, parts[0], engine.tokenizer, losses)
            overflows = [pupil.model.overflowed() for pupil in pupils]
        if not engine.actor.scales_loss:
            stop_if_not_finite(
                step,
                experience,
                engine.tokenizer,
                {
                    f"{pupil.name} gradient": torch.tensor(float("nan"))
                    for pupil, overflow in zip(pupils, overflows)
                    if overflow
                },
            )
        for pupil, overflow in zip(pupils, overflows):
            lr = pupil.peak_lr * lr_factor
            stepped = pupil.model.step(lr, overflow, skip=exploded or any(overflows))
            if stepped:
                metrics.add(f"{pupil.name}/grad_norm", pupil.model.grad_norm, 1)
            metrics.add_max(f"{pupil.name}/lr", lr)
            if stepped and pupil.model is engine.actor and engine.ema is not None:
                engine.ema.update()
        return sums

    def _pupils(self, train_actor: bool, sums: Tensor) -> list[Pupil]:
        """Who learns in this step; the policy's loss adds its ratios, approxkl and count to `sums`."""
        engine, dialect, pupils = self.engine, self.dialect, []
        if engine.critic is not None:
            pupils.append(Pupil("value", engine.critic, self._value_loss, dialect.critic_lr))
        if train_actor:
            pupils.append(Pupil("policy", engine.actor, partial(self._policy_loss, sums), dialect.actor_lr))
        return pupils

    def _micro_batches(self, experience: Experience, rows: Tensor) -> list[Experience]:
        """The rows of an optimizer step by passes, each of at most `micro_batch_size` rows' worth of tokens.

        Where each micro-batch has a mean, or whitens, of its own, which rows it holds is part of the algorithm: then
        they go by number, in the order that they were dealt in.
        """
        if not len(rows):
            return []
        dialect, size = self.dialect, self.micro_batch_size
        beyond = dialect.slots_past_response
        chosen = experience.select(rows, beyond)
        if dialect.advantages_at == "mini_batch":
            chosen = estimated(chosen, dialect)
        if dialect.loss_scope == "optimizer_step" and dialect.advantages_at != "micro_batch":
            pieces = micro_batches(chosen.rollout, size * experience.rollout.sequences.shape[1])
        else:
            pieces = torch.arange(len(rows), device=rows.device).split(size)
        parts = [chosen.select(piece, beyond) for piece in pieces]
        return [estimated(part, dialect) for part in parts] if dialect.advantages_at == "micro_batch" else parts

    def _loss_weights(self, parts: list[Experience]) -> dict[str, list[float]]:
        """What each micro-batch's loss sum is multiplied by, the same number of entries on all ranks."""
        counts = torch.tensor(
            [[self._policy_count(part), part.value_mask.sum()] for part in parts], dtype=torch.float64
        ).view(-1, 2)
        longest = distributed.largest(len(parts))
        totals = torch.cat([counts.sum(0), torch.tensor([float(len(parts))])]).to(distributed.device())
        *all_counts, everywhere = distributed.all_reduce_sum(totals).tolist()
        return {
            name: loss_weights(
                counts[:, column].tolist(),
                all_counts[column],
                int(everywhere),
                distributed.world_size(),
                self.dialect.loss_scope,
            )
            + [0.0] * (longest - len(parts))
            for column, name in enumerate(("policy", "value"))
        }

    def _policy_count(self, part: Experience) -> Tensor:
        """What the policy's loss sums over: tokens, or responses."""
        mask = part.policy_mask
        return (counted_responses(mask, self.dialect) if self.dialect.ratio == "response" else mask).sum()

    def _shares(
        self, loss: Loss, parts: list[Experience], weights: list[float], metrics: Accumulator
    ) -> list[Callable[[], Tensor]]:
        """One forward pass a weight, each giving its weighted loss; ranks that have fewer parts end with dummies of
        weight 0."""

        def share(part: Experience, weight: float) -> Tensor:
            return loss(part, metrics if weight else None) * weight

        dummies = [parts[0]] * (len(weights) - len(parts))
        return [partial(share, part, weight) for part, weight in zip([*parts, *dummies], weights)]

    def _policy_loss(self, totals: Tensor, part: Experience, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        logprobs, _ = self.engine.actor(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=self.dialect.logprob_temperature,
        )
        sums = actor_loss(
            logprobs, part.logprobs, part.ref_logprobs, part.advantages, part.policy_mask, part.kl_coef, self.dialect
        )
        if metrics is not None:
            totals += torch.stack([sums.ratio.double(), sums.approxkl.double(), sums.count.double()])
            metrics.add("policy/loss", sums.loss, sums.count)
            metrics.add("policy/clipfrac", sums.clipped, sums.count)
            metrics.add("policy/approxkl", sums.approxkl, sums.count)
            metrics.add("policy/ratio_mean", sums.ratio, sums.count)
            metrics.add_max("policy/ratio_max", sums.ratio_max)
        return sums.loss

    def _value_loss(self, part: Experience, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        values = self.engine.critic(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        sums = critic_loss(
            values[:, rollout.prompt_length - 1 : -1], part.values, part.returns, part.value_mask, self.dialect
        )
        if metrics is not None:
            metrics.add("value/loss", sums.loss, sums.count)
            metrics.add("value/clipfrac", sums.clipped, sums.count)
            metrics.add("value/mean", sums.value, sums.count)
        return sums.loss

    def _exploded(self, sums: Tensor, metrics: Accumulator) -> bool:
        """Whether the mean ratio over all ranks is over the dialect's limit, the same on all."""
        if self.dialect.ratio_limit is None:
            return False
        ratio, _, count = distributed.all_reduce_sum(sums).tolist()
        exploded = ratio_exploded(ratio, count, self.dialect.ratio_limit)
        metrics.add("policy/left_out", float(exploded), 1)
        return exploded


def accumulate_gradients(model: TrainedModel, shares: list[Callable[[], Tensor]]) -> Tensor:
    """Forward and backward pass of each share of the loss, equally many on all ranks; returns this rank's sum."""
    total = 0.0
    for index, share in enumerate(shares):
        value = share()
        total = total + value.detach()
        model.backward(value, last=index == len(shares) - 1)
    return total
