"""One optimizer step of actor and critic (`Learner.update`), and the counters of a run (`Counters`).

    learner = Learner(models, algorithm, counters, micro_batch_size=8)
    for rows in mini_batch_rows(len(batch), mini_batches, counters.key(epoch)):
        learner.update(batch, rows, metrics, actor=True, critic=True)

How a loss is normalised: the loss of a micro-batch is a sum over its tokens (or responses). It is multiplied by a
weight from `Losses.weights`. In most dialects the weight is 1 / N, where N is the number of tokens of the whole
optimizer step over all ranks. N is reduced once, before the first backward pass. Gradients are summed over
micro-batches and ranks, so they do not depend on how rows are divided: `TrainedModel.backward` undoes the mean that
DeepSpeed takes over ranks.

Learning rates and the random keys of mini-batches follow from the counters.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine import distributed
from engine.algo.losses import ratio_exploded
from engine.algo.schedules import lr_factor
from engine.algorithms import Algorithm, Dialect
from engine.experience import TrainingBatch, position_ids
from engine.packing import micro_batches
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from engine.zero.roles import TrainedRole
from training.reporting.guards import stop_for_gradients, stop_unless_losses_finite
from training.reporting.metrics import Accumulator


class Counters:
    """The counters of a run, which its checkpoints hold.

    steps_done: PPO steps done; negative during the critic's pretraining, which ends at 0.
    optimizer_steps: optimizer steps of the actor, and of a critic that is trained in the same optimizer steps.
    critic_optimizer_steps: optimizer steps of a critic that is trained in separate passes.
    samples: responses drawn, over all ranks. prompt_batches: batches of prompts taken from the feed.
    weights_are_whole: whether weights and counters are those after `steps_done` steps; False while a step changes them.

    Args:
        seed: seed of the mini-batches.
        total_steps: length of the learning rates' schedule, in steps. first_step: the first value of steps_done.
    """

    def __init__(self, dialect: Dialect, seed: int, total_steps: int, first_step: int = 0):
        self.dialect, self.seed, self.total_steps, self.first_step = dialect, seed, total_steps, first_step
        self.steps_done = first_step
        self.optimizer_steps = self.critic_optimizer_steps = self.samples = self.prompt_batches = 0
        self.weights_are_whole = True

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self.steps_done + 1

    def begin_updates(self) -> None:
        """Called before a step's optimizer steps. Sets critic_optimizer_steps: a separately trained critic omits no
        optimizer step, so their number follows from the number of steps."""
        self.weights_are_whole = False
        self.critic_optimizer_steps = (self.steps_done - self.first_step) * math.prod(self.dialect.critic_passes)

    def end_updates(self) -> None:
        """Called after a step's optimizer steps. Optimizer steps that early stopping omitted are counted too, so that
        learning rates keep to their schedule."""
        self.optimizer_steps = (self.step - self.first_step) * self.dialect.updates

    def end_step(self, samples: int, prompt_batches: int) -> None:
        """Called after a step. samples: responses drawn in it, over all ranks. prompt_batches: batches of prompts that
        it used."""
        self.steps_done += 1
        self.samples += samples
        self.prompt_batches += prompt_batches
        self.weights_are_whole = True

    def key(self, epoch: int, *more: int) -> tuple[int, ...]:
        """The random key with which the mini-batches of an epoch of this step are drawn."""
        return self.seed, self.steps_done - self.first_step, epoch, *more

    @property
    def actor_lr(self) -> float:
        """The learning rate of the actor's next optimizer step."""
        return self.dialect.actor_lr * self._lr_factor(self.optimizer_steps, self.dialect.updates)

    @property
    def critic_lr(self) -> float:
        """The learning rate of the critic's next optimizer step."""
        if not self.dialect.critic_learns_apart:
            return self.dialect.critic_lr * self._lr_factor(self.optimizer_steps, self.dialect.updates)
        updates = math.prod(self.dialect.critic_passes)
        return self.dialect.critic_lr * self._lr_factor(self.critic_optimizer_steps, updates)

    def _lr_factor(self, optimizer_steps: int, updates: int) -> float:
        """The schedule's factor of the learning rate after `optimizer_steps` optimizer steps. updates: optimizer steps
        per step."""
        dialect, position = self.dialect, (self.steps_done - self.first_step, self.total_steps)
        if dialect.lr_per == "optimizer_step":
            position = optimizer_steps, self.total_steps * updates
        return lr_factor(*position, dialect.warmup_steps, dialect.lr_schedule, dialect.warmup_from_zero)

    def state_dict(self) -> dict:
        """The counters that a checkpoint holds."""
        return {
            "steps_done": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "samples": self.samples,
            "prompt_batches": self.prompt_batches,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.steps_done, self.optimizer_steps = state["steps_done"], state["optimizer_steps"]
        self.samples, self.prompt_batches = state["samples"], state["prompt_batches"]


Trained = TrainedModel | TrainedRole


@dataclass(frozen=True, slots=True)
class Pass:
    """A micro-batch that goes through a model. rows: the micro-batch. policy_weight, value_weight: factors of its
    summed losses. metrics: the accumulator of its metrics.

    All ranks make equally many passes, because ZeRO-3 gathers weights in each of them. A rank with fewer micro-batches
    makes dummy passes, with weight 0 and without metrics.
    """

    rows: TrainingBatch
    policy_weight: float = 0.0
    value_weight: float = 0.0
    metrics: Accumulator | None = None


class Learner:
    """Trains the actor, and the critic if there is one, of an RLHFEngine, at the learning rates of `counters`.

    micro_batch_size: responses of full length in one pass. pretraining: the language-model loss that is added to the
    actor's; None for none. padded: whether padding counts among a pass's tokens, because the models compute it too.
    """

    def __init__(
        self,
        models: RLHFEngine,
        algorithm: Algorithm,
        counters: Counters,
        micro_batch_size: int,
        pretraining: "MixedPretraining | None" = None,
        padded: bool = True,
    ):
        self.models, self.algorithm, self.counters = models, algorithm, counters
        self.micro_batch_size, self.pretraining, self.padded = micro_batch_size, pretraining, padded

    def update(self, batch: TrainingBatch, rows: Tensor, metrics: Accumulator, *, actor: bool, critic: bool) -> Tensor:
        """One optimizer step of actor and critic from the same rows (all ranks call this).

        If either model overflows in fp16, or if the mean ratio is over the dialect's limit, both models skip the step.
        Otherwise they would not have learned from the same data.

        Args:
            rows: (N,) int64, rows of this rank's batch.
            actor, critic: whether this model learns.

        Returns: (3,) float64, the sums of the policy's ratios and of approxkl over this rank's rows, and their count.
        Raises: RunStopped on all ranks if a loss is not finite on one of them, or, outside fp16, a gradient.
        """
        learning: dict[str, Trained] = {}
        if critic and self.models.critic is not None:
            learning["value"] = self.models.critic
        if actor:
            learning["policy"] = self.models.actor
        ratios = torch.zeros(3, dtype=torch.float64, device=distributed.device())
        if not learning:
            return ratios
        passes, losses = self._passes(batch, rows, metrics), {}
        if "value" in learning:
            more_follows = actor and learning["value"].host is self.models.actor.host
            losses["value"] = self._value_gradients(passes, last=not more_follows)
        if "policy" in learning:
            losses["policy"] = self._policy_gradients(passes, ratios, metrics)
        exploded = actor and self._exploded(ratios, metrics)
        overflowed = dict.fromkeys(learning, False)
        if not exploded:
            stop_unless_losses_finite(self.counters.step, losses, [one.rows for one in passes], self.models.tokenizer)
            overflowed = self._overflowed(learning, batch)
        self._step(learning, overflowed, exploded, metrics)
        return ratios

    def _passes(self, batch: TrainingBatch, rows: Tensor, metrics: Accumulator) -> list[Pass]:
        """The micro-batches of these rows with their weights; equally many on all ranks."""
        parts = self._micro_batches(batch, rows)
        policy_weights, value_weights = self._loss_weights(parts)
        dummies = distributed.largest(len(parts)) - len(parts)
        passes = [Pass(*one, metrics) for one in zip(parts, policy_weights, value_weights, strict=True)]
        return passes + [Pass(parts[0] if parts else batch.select(slice(0, 1)))] * dummies

    def _micro_batches(self, batch: TrainingBatch, rows: Tensor) -> list[TrainingBatch]:
        """The micro-batches of an update, each with at most as many tokens as `micro_batch_size` full rows.

        In dialects that average or whiten per micro-batch, the choice of its rows is part of the algorithm. There each
        micro-batch has `micro_batch_size` rows, in the order of `rows`.
        """
        if not len(rows):
            return []
        algorithm, size = self.algorithm, self.micro_batch_size
        kept = algorithm.dialect.positions_past_response
        chosen = algorithm.for_mini_batch(batch.select(rows, kept))
        if algorithm.dialect.micro_batches_matter:
            pieces = list(torch.arange(len(rows), device=rows.device).split(size))
        else:
            pieces = micro_batches(chosen.rollout, size * batch.rollout.sequences.shape[1], padded=self.padded)
        return [algorithm.for_micro_batch(chosen.select(piece, kept)) for piece in pieces]

    def _loss_weights(self, parts: list[TrainingBatch]) -> list[list[float]]:
        """[factors of each micro-batch's summed policy loss, factors of its value loss] (all ranks call this)."""
        losses = self.algorithm.losses
        # Columns: the policy's count, the critic's count, and 1, whose sum is the number of micro-batches.
        counts = torch.ones(len(parts), 3, dtype=torch.float64, device=distributed.device())
        for row, part in zip(counts, parts):
            row[0], row[1] = losses.policy_count(part.policy_mask), part.value_mask.sum()
        totals = distributed.data_parallel_sum(counts.sum(0, keepdim=True))
        *own, (*everywhere, all_parts) = torch.cat([counts, totals]).tolist()  # the host waits once
        return [
            losses.weights([row[column] for row in own], total, int(all_parts), distributed.data_parallel_size())
            for column, total in enumerate(everywhere)
        ]

    def _value_gradients(self, passes: list[Pass], last: bool) -> Tensor:
        """The critic's forward and backward passes; returns the passes' losses, (N,). last: see
        `accumulate_gradients`."""
        losses = (self._value_loss(one.rows, one.metrics) * one.value_weight for one in passes)
        return accumulate_gradients(self.models.critic, losses, len(passes), last)

    def _value_loss(self, rows: TrainingBatch, metrics: Accumulator | None) -> Tensor:
        rollout = rows.rollout
        values = self.models.critic(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        values = values[:, rollout.prompt_length - 1 : -1]
        sums = self.algorithm.losses.value_loss(values, rows.values, rows.returns, rows.value_mask)
        if metrics is not None:
            metrics.add("value/loss", sums.loss, sums.count)
            metrics.add("value/clipfrac", sums.clipped, sums.count)
            metrics.add("value/mean", sums.value, sums.count)
        return sums.loss

    def _policy_gradients(self, passes: list[Pass], ratios: Tensor, metrics: Accumulator) -> Tensor:
        """The actor's forward and backward passes; returns the passes' losses, (N,), those of texts last.

        Adds the sums of ratios and of approxkl, and their count, to `ratios`.
        """
        losses = (self._policy_loss(one.rows, one.metrics, ratios) * one.policy_weight for one in passes)
        if self.pretraining is None:
            return accumulate_gradients(self.models.actor, losses, len(passes))
        texts, more = self.pretraining.losses(self.counters.optimizer_steps, metrics)
        halves = (0.5 * loss for loss in chain(losses, texts))
        return accumulate_gradients(self.models.actor, halves, len(passes) + more)

    def _policy_loss(self, rows: TrainingBatch, metrics: Accumulator | None, ratios: Tensor) -> Tensor:
        rollout, losses = rows.rollout, self.algorithm.losses
        logprobs, _ = self.models.actor(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=self.algorithm.dialect.logprob_temperature,
        )
        sums = losses.policy_loss(
            logprobs,
            rows.logprobs,
            rows.ref_logprobs,
            rows.advantages,
            rows.policy_mask,
            rows.kl_coef,
            rows.correction,
        )
        if metrics is not None:
            ratios += torch.stack([sums.ratio.double(), sums.approxkl.double(), sums.count.double()])
            metrics.add("policy/loss", sums.loss, losses.policy_count(rows.policy_mask))
            metrics.add("policy/clipfrac", sums.clipped, sums.count)
            metrics.add("policy/approxkl", sums.approxkl, sums.count)
            metrics.add("policy/ratio_mean", sums.ratio, sums.count)
            metrics.add_max("policy/ratio_max", sums.ratio_max)
        return sums.loss

    def _exploded(self, ratios: Tensor, metrics: Accumulator) -> bool:
        """Whether the mean ratio over all ranks is over the dialect's limit; the same on all ranks."""
        limit = self.algorithm.dialect.ratio_limit
        if limit is None:
            return False
        ratio, _, count = distributed.data_parallel_sum(ratios).tolist()
        exploded = ratio_exploded(ratio, count, limit)
        metrics.add("policy/left_out", float(exploded), 1)
        return exploded

    def _overflowed(self, learning: dict[str, Trained], batch: TrainingBatch) -> dict[str, bool]:
        """For each model, whether its gradients overflowed. Raises: RunStopped if one did outside of fp16."""
        overflowed = {name: model.overflowed() for name, model in learning.items()}
        bad = [f"{name} gradient" for name, over in overflowed.items() if over]
        if bad and not self.models.actor.scales_loss:
            stop_for_gradients(self.counters.step, bad, batch, self.models.tokenizer)
        return overflowed

    def _step(
        self, learning: dict[str, Trained], overflowed: dict[str, bool], exploded: bool, metrics: Accumulator
    ) -> None:
        """Make the optimizer steps of all engines, or skip all of them."""
        lrs = {"value": self.counters.critic_lr, "policy": self.counters.actor_lr}
        for host in dict.fromkeys(model.host for model in learning.values()):
            models = {name: model for name, model in learning.items() if model.host is host}
            stepped = host.step_roles(
                {model.role: lrs[name] for name, model in models.items()},
                overflow=any(overflowed[name] for name in models),
                skip=exploded or any(overflowed.values()),
            )
            for name, model in models.items():
                if stepped:
                    metrics.add(f"{name}/grad_norm", model.grad_norm, 1)
                if model.scales_loss:
                    metrics.add(f"{name}/skipped", float(overflowed[name]), 1)
                    metrics.add_max(f"{name}/loss_scale", model.loss_scale)
                metrics.add_max(f"{name}/lr", lrs[name])
            if stepped and "policy" in models and self.models.ema is not None:
                self.models.ema.update()


def mini_batch_rows(rows: int, mini_batches: int, key: tuple[int, ...]) -> list[Tensor]:
    """This rank's rows of each mini-batch: a list of (rows / mini_batches,) int64 on the rank's device.

    Of each group of `mini_batches` neighbouring rows, each mini-batch gets one, drawn at random. The draw is over the
    rows of all ranks and depends on `key` only. So each rank has equally many rows in each mini-batch, and mini-batches
    do not depend on the number of ranks. Within a mini-batch a rank's rows are shuffled, for dialects in which the
    choice of a micro-batch's rows matters.

    rows: the number of this rank's rows, the same on all ranks and a multiple of `mini_batches`.
    """
    assert rows % mini_batches == 0, f"{rows} rows do not divide into {mini_batches} mini-batches"
    groups = rows // mini_batches
    everywhere = np.tile(np.arange(mini_batches), (groups * distributed.data_parallel_size(), 1))
    drawn = np.random.default_rng(key).permuted(everywhere, axis=1)
    own = torch.from_numpy(drawn[distributed.rank_share(len(drawn))].reshape(-1))
    shuffled = torch.from_numpy(np.random.default_rng((*key, distributed.data_parallel_rank())).permutation(rows))
    return [shuffled[own[shuffled] == index].to(distributed.device()) for index in range(mini_batches)]


def accumulate_gradients(model: Trained, losses: Iterable[Tensor], passes: int, last: bool = True) -> Tensor:
    """Make a backward pass for each weighted loss; returns this rank's losses, (passes,).

    losses: `passes` scalar losses, the same number on all ranks; each is computed right before its backward pass.
    last: whether the optimizer step follows, without passes of another model in the same engine before it.
    """
    found = []
    with model.host.accumulating(passes):
        for number, loss in enumerate(losses, start=1):
            found.append(loss.detach())
            model.backward(loss, last=last and number == passes)
    return torch.stack(found)


class TextFeed(Protocol):
    """This rank's plain texts."""

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64: blocks of L tokens without padding, for an optimizer step of the run, counted from 0.

        There is at least one block; the number of blocks may differ between ranks.
        """


class MixedPretraining:
    """Mixed pretraining: in its optimizer steps the actor also learns from plain texts, so that it forgets less.

        gradient of one optimizer step = (PPO's + coefficient * the language model's) / 2

    The language-model loss is the mean over all predicted tokens of the optimizer step, over all ranks. Source: Ouyang
    et al. 2022 (InstructGPT), eq. 2; the half is DeepSpeed-Chat's (DeepSpeedExamples 83757d9c), which takes the mean
    over the passes of both losses.
    """

    def __init__(self, actor: Trained, feed: TextFeed, coefficient: float, micro_batch_size: int):
        self.actor, self.feed = actor, feed
        self.coefficient, self.micro_batch_size = coefficient, micro_batch_size

    def losses(self, optimizer_step: int, metrics: Accumulator) -> tuple[Iterator[Tensor], int]:
        """(an iterator of this rank's weighted losses, which are not halved; their number, the same on all ranks). All
        ranks call this together."""
        parts = self.feed.texts(optimizer_step).to(distributed.device()).split(self.micro_batch_size)
        own = torch.tensor(float(sum(map(_targets, parts))), device=distributed.device())
        weight = self.coefficient / distributed.data_parallel_sum(own).item()
        count = distributed.largest(len(parts))
        losses = (self._loss(part, metrics) * weight for part in parts)
        dummies = (self._loss(parts[0], None) * 0.0 for _ in range(count - len(parts)))
        return chain(losses, dummies), count

    def _loss(self, blocks: Tensor, metrics: Accumulator | None) -> Tensor:
        """The sum of the negative log-probs of all tokens but the first of each block, which is not predicted."""
        mask = torch.ones_like(blocks)
        logprobs, _ = self.actor(blocks, mask, position_ids(mask), response_length=blocks.shape[1] - 1)
        loss = -logprobs.sum()
        if metrics is not None:
            metrics.add("policy/lm_loss", loss, _targets(blocks))
        return loss


def _targets(blocks: Tensor) -> int:
    """The number of tokens that are predicted."""
    return blocks.numel() - len(blocks)
