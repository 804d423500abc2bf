"""Makes the optimizer steps of actor and critic (`Learner.update`) and counts a run's progress (`Counters`).

    learner = Learner(models, algorithm, counters, micro_batch_size=8)
    for rows in mini_batch_rows(len(batch), mini_batches, counters.key(epoch)):
        learner.update(batch, rows, metrics, actor=True, critic=True)

How a loss is normalised: the loss of a micro-batch is a sum over its tokens (or responses). This sum is multiplied by a
weight from `Losses.weights`. In most dialects the weight is 1 / N, where N is the number of tokens of the whole
optimizer step over all ranks. One all-reduce before the first backward pass computes N. Gradients are summed over
micro-batches and over ranks (`TrainedModel.backward` undoes the mean that DeepSpeed takes over ranks). Therefore the
gradients do not depend on how the responses are divided into micro-batches and among ranks.

Learning rates and the random keys of mini-batches are computed from the counters.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine import distributed
from engine.algo.losses import ratio_exploded
from engine.algo.schedules import lr_factor
from engine.algorithms import Algorithm, Dialect
from engine.distributed import ALONE, RankGroup
from engine.experience import TrainingBatch, position_ids
from engine.packing import micro_batches, passes
from engine.rlhf_engine import RLHFEngine
from engine.zero.engines import TrainedModel
from engine.zero.shared_engine import TrainedRole
from training.reporting.guards import stop_for_gradients, stop_unless_losses_finite
from training.reporting.metrics import Accumulator


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of a finished step. step: the step's number, from 1; at most 0 in the critic's pretraining. samples:
    number of responses, or examples of steps 1 and 2, in the run so far, over all ranks. batch: this rank's batch, from
    which the models learned; in steps 1 and 2 its micro-batches."""

    step: int
    samples: int
    metrics: dict[str, float]
    batch: Any


class Counters:
    """The counters of a run, which its checkpoints hold.

    steps_done: number of PPO steps done; negative during the critic's pretraining, at whose end it is 0.
    optimizer_steps: number of optimizer steps of the actor, and of a critic that is trained along with the actor.
    critic_optimizer_steps: number of optimizer steps of a critic that is trained in separate passes.
    samples: number of responses drawn, over all ranks. prompt_batches: number of prompt batches taken from the feed.
    weights_are_whole: False from a step's first optimizer step until the step has been counted. A checkpoint taken then
        would hold weights that fit no value of `steps_done`.

    Args:
        seed: the seed from which mini-batches are drawn.
        total_steps: length of the learning rates' schedule, in PPO steps. first_step: the first value of steps_done.
    """

    def __init__(self, dialect: Dialect, seed: int, total_steps: int, first_step: int = 0):
        self.dialect = dialect
        self.seed = seed
        self.total_steps = total_steps
        self.first_step = first_step
        self.steps_done = first_step
        self.optimizer_steps = self.critic_optimizer_steps = self.samples = self.prompt_batches = 0
        self.weights_are_whole = True

    @property
    def step(self) -> int:
        """The number of the step that is being made: steps_done + 1."""
        return self.steps_done + 1

    def begin_updates(self) -> None:
        """Called before a step's optimizer steps. Computes critic_optimizer_steps from the number of steps: a critic
        that is trained in separate passes makes equally many optimizer steps in each step."""
        self.weights_are_whole = False
        self.critic_optimizer_steps = (self.steps_done - self.first_step) * math.prod(self.dialect.critic_passes)

    def end_updates(self) -> None:
        """Called after a step's optimizer steps. Optimizer steps that early stopping omitted are counted too, because
        the learning-rate schedule includes them."""
        self.optimizer_steps = (self.step - self.first_step) * self.dialect.updates

    def end_step(self, samples: int, prompt_batches: int) -> None:
        """Called after a step. samples: number of responses drawn in the step, over all ranks. prompt_batches: number
        of prompt batches that the step used."""
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
        """The factor by which the schedule multiplies the peak learning rate after `optimizer_steps` optimizer steps.
        updates: number of optimizer steps in a PPO step."""
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
    """One forward and backward pass of a micro-batch. rows: the micro-batch. policy_weight, value_weight: the weights
    of its summed policy loss and value loss. metrics: the accumulator to which the pass adds its metrics.

    All ranks make equally many passes, because under ZeRO-3 all ranks gather the weights together in each pass. A rank
    with fewer micro-batches than the others makes dummy passes, with weight 0 and without metrics.
    """

    rows: TrainingBatch
    policy_weight: float = 0.0
    value_weight: float = 0.0
    metrics: Accumulator | None = None


class Learner:
    """Trains the actor of an RLHFEngine, and its critic if there is one, at the learning rates of `counters`.

    micro_batch_size: number of sequences of full length in one pass. pretraining: computes the language-model loss that
    is added to the actor's loss; None to add no such loss. padded: whether padding counts among the tokens of a pass;
    True if the models compute the padding too.
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
        self.models = models
        self.algorithm = algorithm
        self.counters = counters
        self.micro_batch_size = micro_batch_size
        self.pretraining = pretraining
        self.padded = padded

    def update(self, batch: TrainingBatch, rows: Tensor, metrics: Accumulator, *, actor: bool, critic: bool) -> Tensor:
        """Make one optimizer step of actor and critic from the same rows of the batch (all ranks call this).

        Both models skip the step if the gradients of either overflow in fp16, or if the mean ratio is over the
        dialect's limit. If only one model skipped the step, the two would have learned from different data.

        Args:
            rows: (N,) int64, indices into this rank's batch.
            actor: whether the actor learns.
            critic: whether the critic learns.

        Returns: (3,) float64: the sum of the policy's ratios and the sum of approxkl over the tokens of this rank's
            rows, and the number of these tokens.
        Raises: RunStopped on all ranks if a loss on any rank is not finite, or if a gradient is not finite outside of
            fp16.
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
        """The passes over these rows of the batch, with their loss weights; equally many on all ranks."""
        parts = self._micro_batches(batch, rows)
        policy_weights, value_weights = self._loss_weights(parts)
        dummies = distributed.largest(len(parts)) - len(parts)
        passes = [Pass(*one, metrics) for one in zip(parts, policy_weights, value_weights, strict=True)]
        return passes + [Pass(parts[0] if parts else batch.select(slice(0, 1)))] * dummies

    def _micro_batches(self, batch: TrainingBatch, rows: Tensor) -> list[TrainingBatch]:
        """The micro-batches of an update, each with at most as many tokens as `micro_batch_size` rows of full length.

        In dialects that average or whiten per micro-batch, the result depends on which rows share a micro-batch. In
        these dialects each micro-batch has `micro_batch_size` rows, in the order of `rows`.
        """
        if not len(rows) and self.models.group.size == 1:
            return []
        algorithm, size = self.algorithm, self.micro_batch_size
        kept = algorithm.dialect.positions_past_response
        chosen = algorithm.for_mini_batch(batch.select(rows, kept))
        if algorithm.dialect.micro_batches_matter:
            pieces = list(torch.arange(len(rows), device=rows.device).split(size))
        else:
            most = size * batch.rollout.sequences.shape[1]
            pieces = micro_batches(chosen.rollout, most, padded=self.padded, group=self.models.group)
        return [algorithm.for_micro_batch(chosen.select(piece, kept)) for piece in pieces]

    def _loss_weights(self, parts: list[TrainingBatch]) -> list[list[float]]:
        """[the weight of each micro-batch's policy loss, the weight of each micro-batch's value loss] (all ranks call
        this)."""
        losses = self.algorithm.losses
        # A row for each micro-batch: the policy loss's count, the value loss's count, and 1. The ones are summed to the
        # number of micro-batches.
        counts = torch.ones(len(parts), 3, dtype=torch.float64, device=distributed.device())
        for row, part in zip(counts, parts):
            row[0], row[1] = losses.policy_count(part.policy_mask), part.value_mask.sum()
        totals = distributed.data_parallel_sum(counts.sum(0, keepdim=True))
        *own, (*everywhere, all_parts) = torch.cat([counts, totals]).tolist()  # one wait for the GPU
        return [
            losses.weights([row[column] for row in own], total, int(all_parts), distributed.data_parallel_size())
            for column, total in enumerate(everywhere)
        ]

    def _value_gradients(self, passes: list[Pass], last: bool) -> Tensor:
        """Make the critic's forward and backward passes; returns the loss of each pass, (N,). last: see
        `accumulate_gradients`."""
        losses = (self._value_pass(one.rows, one.metrics) * one.value_weight for one in passes)
        return accumulate_gradients(self.models.critic, losses, len(passes), last)

    def _value_pass(self, rows: TrainingBatch, metrics: Accumulator | None) -> Tensor:
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
        """Make the actor's forward and backward passes; returns the loss of each pass, (N,). The passes over plain
        texts, if any, come last.

        Adds to `ratios`: the sum of the policy's ratios, the sum of approxkl, and the number of tokens.
        """
        losses = (self._policy_pass(one.rows, one.metrics, ratios) * one.policy_weight for one in passes)
        if self.pretraining is None:
            return accumulate_gradients(self.models.actor, losses, len(passes))
        texts, more = self.pretraining.losses(self.counters.optimizer_steps, metrics)
        halves = (0.5 * loss for loss in chain(losses, texts))
        return accumulate_gradients(self.models.actor, halves, len(passes) + more)

    def _policy_pass(self, rows: TrainingBatch, metrics: Accumulator | None, ratios: Tensor) -> Tensor:
        rollout, losses = rows.rollout, self.algorithm.losses
        logprobs, entropy = self.models.actor(
            rollout.sequences,
            rollout.attention_mask,
            rollout.position_ids,
            response_length=rollout.response_length,
            temperature=self.algorithm.dialect.logprob_temperature,
            with_entropy=self.algorithm.dialect.entropy_coef > 0,
        )
        sums = losses.policy_loss(
            logprobs,
            rows.logprobs,
            rows.ref_logprobs,
            rows.advantages,
            rows.policy_mask,
            rows.kl_coef,
            rows.correction,
            entropy,
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
        """Whether the policy's mean ratio over all ranks is over the dialect's limit. All ranks get the same answer."""
        limit = self.algorithm.dialect.ratio_limit
        if limit is None:
            return False
        ratio, _, count = distributed.data_parallel_sum(ratios).tolist()
        exploded = ratio_exploded(ratio, count, limit)
        metrics.add("policy/left_out", float(exploded), 1)
        return exploded

    def _overflowed(self, learning: dict[str, Trained], batch: TrainingBatch) -> dict[str, bool]:
        """For each model, whether its gradients overflowed. Raises: RunStopped if gradients overflowed outside of
        fp16."""
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

    The rows of all ranks are divided into groups of `mini_batches` neighbouring rows. Each mini-batch gets one row of
    each group, drawn at random; the draw depends on `key` only. Therefore each rank has equally many rows in each
    mini-batch, and the mini-batches do not depend on the number of ranks. Within a mini-batch a rank's rows are
    shuffled, because in some dialects the result depends on which rows share a micro-batch.

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

    losses: scalar losses; each is computed right before its backward pass. passes: number of losses, the same on all
    ranks. last: whether the engine's optimizer step comes next. False if another model of the same engine makes its
    passes first.
    """
    found = []
    with model.host.accumulating(passes):
        for number, loss in enumerate(losses, start=1):
            found.append(loss.detach())
            model.backward(loss, last=last and number == passes)
    return torch.stack(found)


class TextFeed(Protocol):
    """Gives this rank's plain texts."""

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64: B blocks of L tokens without padding. B is at least 1 and may differ between ranks.

        optimizer_step: number of the run's optimizer step for which the texts are, counted from 0.
        """


class MixedPretraining:
    """Mixed pretraining: in each optimizer step the actor also learns from plain texts, to forget less of its
    pretraining.

        gradient of one optimizer step = (PPO's gradient + coefficient * gradient of the language-model loss) / 2

    The language-model loss is the mean over all predicted tokens of the optimizer step, over all ranks. Source: Ouyang
    et al. 2022 (InstructGPT), eq. 2. The division by 2 is from DeepSpeed-Chat (DeepSpeedExamples 83757d9c), which takes
    the mean over the passes of both losses.
    """

    def __init__(
        self, actor: Trained, feed: TextFeed, coefficient: float, micro_batch_size: int, group: RankGroup = ALONE
    ):
        self.actor, self.feed, self.group = actor, feed, group
        self.coefficient, self.micro_batch_size = coefficient, micro_batch_size

    def losses(self, optimizer_step: int, metrics: Accumulator) -> tuple[Iterator[Tensor], int]:
        """(an iterator of this rank's weighted losses; their number, the same on all ranks). The caller divides the
        losses by 2. All ranks call this together."""
        texts = self.feed.texts(optimizer_step).to(distributed.device())
        blocks, length = texts.shape
        pieces = passes([0] * blocks, [length] * blocks, self.micro_batch_size * length, group=self.group)
        parts = [texts[piece] for piece in pieces]
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
    """The number of predicted tokens: all tokens but the first of each block."""
    return blocks.numel() - len(blocks)
