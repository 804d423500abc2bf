"""One optimizer step: from rows of a batch to new weights of actor and critic.

How a loss is normalised. A micro-batch's loss is a sum over its tokens (or responses). It is multiplied by the weight
that `Algorithm.loss_weights` gives it, mostly 1 / N with N the count of the whole optimizer step over all ranks,
counted and reduced once before the first backward pass. Gradients are then sums over micro-batches and ranks, and no
layout changes them: `TrainedModel.backward` undoes the mean that DeepSpeed takes over ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine import distributed
from engine.algo.guards import ratio_exploded
from engine.algorithms import Algorithm
from engine.experience import TrainingBatch
from engine.packing import micro_batches, weighted_passes
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from engine.zero.roles import TrainedRole
from training.gradients import accumulate_gradients
from training.mixed_pretraining import MixedPretraining
from training.reporting.guards import stop_for_gradients, stop_unless_losses_finite
from training.reporting.metrics import Accumulator

# The sum of a micro-batch's losses, which has a gradient; with its metrics, where it is no dummy.
Loss = Callable[[TrainingBatch, Accumulator | None], Tensor]


@dataclass(frozen=True, slots=True)
class Objective:
    """What one model learns in an optimizer step: its name in metrics, the model, its loss, its peak learning rate."""

    name: str
    model: TrainedModel | TrainedRole
    loss: Loss
    peak_lr: float


class Learner:
    """Trains the actor, and the critic if there is one, of an RLHFEngine.

    pretraining: what the actor learns from beside the experience; nothing if None.
    padded: whether padding counts among a pass's tokens, as it does where a model computes for it.
    """

    def __init__(
        self,
        models: RLHFEngine,
        algorithm: Algorithm,
        micro_batch_size: int,
        pretraining: MixedPretraining | None = None,
        padded: bool = True,
    ):
        self.models, self.algorithm, self.micro_batch_size = models, algorithm, micro_batch_size
        self.pretraining, self.padded = pretraining, padded

    def optimizer_step(
        self,
        batch: TrainingBatch,
        rows: Tensor,
        metrics: Accumulator,
        *,
        step: int,
        optimizer_step: int,
        lr_factor: float,
        train_actor: bool,
        train_critic: bool = True,
    ) -> Tensor:
        """One update of the critic and of the actor, as far as they are to learn, from the same rows (all ranks call
        this).

        Both are skipped together when either overflows in fp16, or the mean ratio is over the dialect's limit: or they
        would drift apart.

        Args:
            rows: (N,) int64, of this rank's batch.
            step: the PPO step, counted from 1, for messages. optimizer_step: the run's, counted from 0, by which
                mixed pretraining chooses its texts.
            lr_factor: what peak learning rates are multiplied by.

        Returns: (3,) float64, sums of the policy's ratios and approxkl over this rank's rows, and what they are over.
        Raises: RunStopped on all ranks where a loss, or outside fp16 a gradient, is not finite on any.
        """
        ratios = torch.zeros(3, dtype=torch.float64, device=distributed.device())
        parts = self._micro_batches(batch, rows)
        weights, passes = self._loss_weights(parts), distributed.largest(len(parts))
        parts = parts or [batch.select(slice(0, 1))]
        objectives = self._objectives(train_actor, train_critic, ratios)
        losses = {}
        for index, objective in enumerate(objectives):
            padded, shares = weighted_passes(objective.loss, parts, weights[objective.name], passes, metrics)
            if objective.model is self.models.actor and self.pretraining is not None:
                shares = self.pretraining.mixed(shares, optimizer_step, metrics)
            closes = all(other.model.host is not objective.model.host for other in objectives[index + 1 :])
            losses[f"{objective.name} loss"] = accumulate_gradients(objective.model, shares, closes), padded
        if objectives:
            exploded = train_actor and self._exploded(ratios, metrics)
            overflows = [False] * len(objectives) if exploded else self._overflows(objectives, losses, step, batch)
            self._step(objectives, overflows, exploded, lr_factor, metrics)
        return ratios

    def _overflows(self, objectives: list[Objective], losses: dict, step: int, batch: TrainingBatch) -> list[bool]:
        """Whether each model's gradients overflowed. Raises: RunStopped for what is not finite, as `optimizer_step`."""
        models = self.models
        stop_unless_losses_finite(step, losses, models.tokenizer)
        overflows = [objective.model.overflowed() for objective in objectives]
        bad = [f"{objective.name} gradient" for objective, over in zip(objectives, overflows, strict=True) if over]
        if bad and not models.actor.scales_loss:
            stop_for_gradients(step, bad, batch, models.tokenizer)
        return overflows

    def _step(
        self,
        objectives: list[Objective],
        overflows: list[bool],
        exploded: bool,
        lr_factor: float,
        metrics: Accumulator,
    ) -> None:
        """Have each engine step, with all models that it trains, or none of them."""
        lrs = {objective.model.role: objective.peak_lr * lr_factor for objective in objectives}
        for host in dict.fromkeys(objective.model.host for objective in objectives):
            parts = [pair for pair in zip(objectives, overflows, strict=True) if pair[0].model.host is host]
            stepped = host.step_roles(
                {objective.model.role: lrs[objective.model.role] for objective, _ in parts},
                overflow=any(overflow for _, overflow in parts),
                skip=exploded or any(overflows),
            )
            for objective, overflow in parts:
                name, model = objective.name, objective.model
                if stepped:
                    metrics.add(f"{name}/grad_norm", model.grad_norm, 1)
                if model.scales_loss:
                    metrics.add(f"{name}/skipped", float(overflow), 1)
                    metrics.add_max(f"{name}/loss_scale", model.loss_scale)
                metrics.add_max(f"{name}/lr", lrs[model.role])
                if stepped and model is self.models.actor and self.models.ema is not None:
                    self.models.ema.update()

    def _objectives(self, train_actor: bool, train_critic: bool, ratios: Tensor) -> list[Objective]:
        """Who learns in this update; the policy's loss adds its ratios, approxkl and count to `ratios`."""
        models, dialect, objectives = self.models, self.algorithm.dialect, []
        if models.critic is not None and train_critic:
            objectives.append(Objective("value", models.critic, self._value_loss, dialect.critic_lr))
        if train_actor:
            objectives.append(Objective("policy", models.actor, partial(self._policy_loss, ratios), dialect.actor_lr))
        return objectives

    def _micro_batches(self, batch: TrainingBatch, rows: Tensor) -> list[TrainingBatch]:
        """The rows of an update by passes, each of at most `micro_batch_size` rows' worth of tokens.

        Where each micro-batch has a mean, or whitens, of its own, which rows it holds is part of the algorithm: then
        they go by number, in the order in which they were drawn.
        """
        if not len(rows):
            return []
        algorithm, size = self.algorithm, self.micro_batch_size
        slots_after = algorithm.dialect.slots_past_response
        chosen = algorithm.for_mini_batch(batch.select(rows, slots_after))
        if algorithm.sums_by_length:
            pieces = micro_batches(chosen.rollout, size * batch.rollout.sequences.shape[1], padded=self.padded)
        else:
            pieces = torch.arange(len(rows), device=rows.device).split(size)
        return [algorithm.for_micro_batch(chosen.select(piece, slots_after)) for piece in pieces]

    def _loss_weights(self, parts: list[TrainingBatch]) -> dict[str, list[float]]:
        """What each micro-batch's loss sum is multiplied by (all ranks call this)."""
        counts = torch.ones(len(parts), 3, dtype=torch.float64, device=distributed.device())  # the last: of parts
        for row, part in zip(counts, parts):
            row[0], row[1] = self.algorithm.policy_objective.count(part.policy_mask), part.value_mask.sum()
        totals = distributed.all_reduce_sum(counts.sum(0, keepdim=True))
        *own, (*all_counts, everywhere) = torch.cat([counts, totals]).tolist()  # the host waits once
        return {
            name: self.algorithm.loss_weights(
                [row[column] for row in own], all_counts[column], int(everywhere), distributed.world_size()
            )
            for column, name in enumerate(("policy", "value"))
        }

    def _policy_loss(self, ratios: Tensor, part: TrainingBatch, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        logprobs, _ = self.models.actor(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=self.algorithm.dialect.logprob_temperature,
        )
        sums = self.algorithm.policy_objective(
            logprobs,
            part.logprobs,
            part.ref_logprobs,
            part.advantages,
            part.policy_mask,
            part.kl_coef,
            part.correction,
        )
        if metrics is not None:
            ratios += torch.stack([sums.ratio.double(), sums.approxkl.double(), sums.count.double()])
            metrics.add("policy/loss", sums.loss, self.algorithm.policy_objective.count(part.policy_mask))
            metrics.add("policy/clipfrac", sums.clipped, sums.count)
            metrics.add("policy/approxkl", sums.approxkl, sums.count)
            metrics.add("policy/ratio_mean", sums.ratio, sums.count)
            metrics.add_max("policy/ratio_max", sums.ratio_max)
        return sums.loss

    def _value_loss(self, part: TrainingBatch, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        values = self.models.critic(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        sums = self.algorithm.value_objective(
            values[:, rollout.prompt_length - 1 : -1], part.values, part.returns, part.value_mask
        )
        if metrics is not None:
            metrics.add("value/loss", sums.loss, sums.count)
            metrics.add("value/clipfrac", sums.clipped, sums.count)
            metrics.add("value/mean", sums.value, sums.count)
        return sums.loss

    def _exploded(self, ratios: Tensor, metrics: Accumulator) -> bool:
        """Whether the mean ratio over all ranks is over the dialect's limit, the same on all."""
        limit = self.algorithm.dialect.ratio_limit
        if limit is None:
            return False
        ratio, _, count = distributed.all_reduce_sum(ratios).tolist()
        exploded = ratio_exploded(ratio, count, limit)
        metrics.add("policy/left_out", float(exploded), 1)
        return exploded
