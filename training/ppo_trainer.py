"""PPO: what happens in one step, in order.

    trainer = PPOTrainer(engine=engine, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)
    for report in trainer.fit(feed):
        print(report.step, report.metrics["objective/scores"])
"""
import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from engine import distributed
from engine.algo.kl import FixedKL
from engine.algo.losses import policy_loss, value_loss
from engine.dialects import Dialect
from engine.ds_engine import TrainedModel
from engine.experience import Experience, PromptBatch
from engine.experience_maker import ExperienceMaker
from engine.optim import lr_factor
from engine.packing import micro_batches
from engine.reward.base import RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.metrics import Accumulator
from training.mixed_pretraining import MixedPretraining, TextFeed
from training.step_metrics import add_experience, stop_if_not_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Sizes of a run.

    total_steps: rollouts, each followed by ppo_epochs x mini_batches optimizer steps.
    mini_batches: optimizer steps a PPO epoch; each learns from an equal share of every rank's responses.
    micro_batch_size: responses in one forward and backward pass of one rank.
    samples_per_prompt: responses drawn for each prompt.
    critic_warmup_steps: steps at the start in which the critic alone is trained.
    unsup_coef: of the language-model loss where there are texts; 27.8 is InstructGPT's.
    """
    total_steps: int
    mini_batches: int = 1
    micro_batch_size: int = 8
    samples_per_prompt: int = 1
    critic_warmup_steps: int = 0
    seed: int = 0
    unsup_coef: float = 27.8


class PromptFeed(Protocol):
    """This rank's prompts."""

    def prompts(self, step: int) -> PromptBatch:
        """The prompts of a step, counted from 0; equally many on all ranks."""
        ...


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step: its number (from 1), responses seen so far over all ranks, metrics, what was learned from."""
    step: int
    samples: int
    metrics: dict[str, float]
    experience: Experience


class PPOTrainer:
    """Trains the actor and the critic of an RLHFEngine.

    reward: where scores come from; by default the engine's reward model alone.
    unsupervised: texts whose language-model loss the actor learns from too; none by default.
    """

    def __init__(self, *, engine: RLHFEngine, rollouts: RolloutBackend, dialect: Dialect, config: PPOConfig,
                 sampling: SamplingConfig, reward: RewardSource | None = None, unsupervised: TextFeed | None = None):
        self.engine, self.rollouts = engine, rollouts
        self.dialect, self.config, self.sampling = dialect, config, sampling
        self.kl = FixedKL(dialect.kl_coef)
        reward = reward or engine.reward
        assert reward is not None, "the engine has no reward model, and no other reward was given"
        self.maker = ExperienceMaker(
            actor=engine.actor, critic=engine.critic, reference=engine.reference, reward=reward,
            dialect=dialect, pad_token_id=sampling.pad_token_id, micro_batch_size=config.micro_batch_size)
        self.pretraining = None if unsupervised is None else MixedPretraining(
            engine.actor, unsupervised, config.unsup_coef, config.micro_batch_size)
        self.steps_done = self.optimizer_steps = self.samples = 0

    def fit(self, feed: PromptFeed) -> Iterator[StepReport]:
        """Train to the last step, reporting after each."""
        while self.steps_done < self.config.total_steps:
            yield self.step(feed.prompts(self.steps_done))

    def step(self, prompts: PromptBatch) -> StepReport:
        """One step: generate, make experience, train."""
        metrics, clock = Accumulator(), PhaseClock()
        prompts = prompts.to(distributed.device()).repeat(self.config.samples_per_prompt)
        with clock("generate"):
            rollout = self.rollouts.generate(prompts, self.sampling)
        with clock("make_experience"):
            experience = self.maker.make(rollout, self.kl.value, tally=lambda name, part: metrics.add(
                name, part.sum(), len(part)))
            self.rollouts.rest()
            stop_if_not_finite(self.steps_done + 1, experience, self.engine.tokenizer)
        with clock("train"):
            self.train(experience, metrics)
        responses = distributed.world_size() * len(experience)
        kl = distributed.all_reduce_sum(experience.kl.sum()).item() / responses
        add_experience(metrics, experience, self.maker.clipped(experience.scores), self.kl.value)
        self.kl.update(kl, responses)
        self.steps_done += 1
        self.samples += responses
        clock.add_to(metrics, tokens=experience.rollout.response_mask.sum())
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        return StepReport(self.steps_done, self.samples, metrics.reduce(), experience)

    def train(self, experience: Experience, metrics: Accumulator) -> None:
        """The optimizer steps of one rollout: ppo_epochs passes, each over mini_batches parts of it."""
        for epoch in range(self.dialect.ppo_epochs):
            key = (self.config.seed, self.steps_done, epoch)
            for rows in deal(len(experience), self.config.mini_batches, key):
                self.optimizer_step(experience, rows, metrics)
                self.optimizer_steps += 1

    def optimizer_step(self, experience: Experience, rows: Tensor, metrics: Accumulator) -> None:
        """One step of the critic, and of the actor once the critic is warm, on the same responses.

        Both are skipped together when either overflows in fp16, or they would drift apart.
        """
        engine = self.engine
        parts = self._micro_batches(experience, rows)
        weights = self._loss_weights(parts)
        learners = [(engine.critic, self._value_loss, "value", self.dialect.critic_lr)]
        if self.steps_done >= self.config.critic_warmup_steps:
            learners.append((engine.actor, self._policy_loss, "policy", self.dialect.actor_lr))
        parts = parts or [experience.select(slice(0, 1))]
        for model, loss, name, _ in learners:
            shares = self._shares(loss, parts, weights[name], metrics)
            if model is engine.actor and self.pretraining is not None:
                shares = self.pretraining.mixed(shares, self.optimizer_steps, metrics)
            total = accumulate_gradients(model, shares)
            stop_if_not_finite(self.steps_done + 1, parts[0], engine.tokenizer, {f"{name} loss": total})
        overflows = [model.overflowed() for model, *_ in learners]
        if not engine.actor.scales_loss:
            stop_if_not_finite(self.steps_done + 1, experience, engine.tokenizer, {
                f"{name} gradient": torch.tensor(float("nan"))
                for (_, _, name, _), overflow in zip(learners, overflows) if overflow})
        for (model, _, name, peak), overflow in zip(learners, overflows):
            lr = peak * self._lr_factor()
            stepped = model.step(lr, overflow, skip=any(overflows))
            if stepped:
                metrics.add(f"{name}/grad_norm", model.grad_norm, 1)
            metrics.add_max(f"{name}/lr", lr)
            if stepped and model is engine.actor and engine.ema is not None:
                engine.ema.update()

    def _micro_batches(self, experience: Experience, rows: Tensor) -> list[Experience]:
        """The rows of an optimizer step by passes, each of at most `micro_batch_size` rows' worth of tokens.

        Where each micro-batch has a mean of its own, which rows it holds is part of the algorithm: then they go by
        number, in the order that they were dealt in.
        """
        if not len(rows):
            return []
        chosen, size = experience.select(rows), self.config.micro_batch_size
        if self.dialect.loss_scope == "micro_batch":
            return [chosen.select(piece) for piece in torch.arange(len(rows)).split(size)]
        pieces = micro_batches(chosen.rollout, size * experience.rollout.sequences.shape[1])
        return [chosen.select(piece) for piece in pieces]

    def _loss_weights(self, parts: list[Experience]) -> dict[str, list[float]]:
        """What each micro-batch's loss sum is multiplied by, the same number of entries on all ranks.

        One over the number of valid tokens of the whole optimizer step over all ranks; or, where the dialect takes
        means of means, one over the micro-batch's own tokens and the number of micro-batches.
        """
        counts = torch.tensor([[part.policy_mask.sum(), part.value_mask.sum()] for part in parts],
                              dtype=torch.float64).view(-1, 2)
        longest = int(distributed.all_reduce_max(torch.tensor(float(len(parts)), device=distributed.device())))
        totals = torch.cat([counts.sum(0), torch.tensor([float(len(parts))])]).to(distributed.device())
        *tokens, micro_batches = distributed.all_reduce_sum(totals).tolist()
        weights = {}
        for column, name in enumerate(("policy", "value")):
            if self.dialect.loss_scope == "optimizer_step":
                own = [1.0 / max(tokens[column], 1.0)] * len(parts)
            else:
                own = [1.0 / (max(count, 1.0) * micro_batches) for count in counts[:, column].tolist()]
            weights[name] = own + [0.0] * (longest - len(parts))
        return weights

    def _shares(self, loss, parts: list[Experience], weights: list[float],
                metrics: Accumulator) -> list[Callable[[], Tensor]]:
        """One forward pass a weight, each giving its weighted loss; ranks that have fewer parts end with dummies of
        weight 0."""
        def share(part: Experience, weight: float) -> Tensor:
            return loss(part, metrics if weight else None) * weight

        dummies = [parts[0]] * (len(weights) - len(parts))
        return [partial(share, part, weight) for part, weight in zip([*parts, *dummies], weights)]

    def _policy_loss(self, part: Experience, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        logprobs, _ = self.engine.actor(rollout.sequences, rollout.attention_mask, rollout.position_ids,
                                        response_length=rollout.response_length,
                                        temperature=self.dialect.logprob_temperature)
        sums = policy_loss(logprobs, part.logprobs, part.advantages, part.policy_mask, self.dialect.clip_range)
        if metrics is not None:
            count = part.policy_mask.sum()
            metrics.add("policy/loss", sums.loss, count)
            metrics.add("policy/clipfrac", sums.clipped, count)
            metrics.add("policy/approxkl", sums.approxkl, count)
            metrics.add("policy/ratio_mean", sums.ratio, count)
            metrics.add_max("policy/ratio_max", sums.ratio_max)
        return sums.loss

    def _value_loss(self, part: Experience, metrics: Accumulator | None) -> Tensor:
        rollout = part.rollout
        values = self.engine.critic(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        sums = value_loss(values[:, rollout.prompt_length - 1:-1], part.values, part.returns, part.value_mask,
                          self.dialect.value_clip_range)
        if metrics is not None:
            count = part.value_mask.sum()
            metrics.add("value/loss", sums.loss, count)
            metrics.add("value/clipfrac", sums.clipped, count)
            metrics.add("value/mean", sums.value, count)
        return sums.loss

    def _lr_factor(self) -> float:
        total = self.config.total_steps * self.dialect.ppo_epochs * self.config.mini_batches
        return lr_factor(self.optimizer_steps, total, self.dialect.warmup_steps, self.dialect.lr_schedule,
                         self.dialect.warmup_from_zero)

    def state_dict(self) -> dict:
        """What a restart needs beside the engines' own checkpoints."""
        return {"steps_done": self.steps_done, "optimizer_steps": self.optimizer_steps, "samples": self.samples,
                "kl": self.kl.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self.steps_done, self.optimizer_steps = state["steps_done"], state["optimizer_steps"]
        self.samples = state["samples"]
        self.kl.load_state_dict(state["kl"])


def accumulate_gradients(model: TrainedModel, shares: list[Callable[[], Tensor]]) -> Tensor:
    """Forward and backward pass of each share of the loss, equally many on all ranks; returns this rank's sum."""
    total = 0.0
    for index, share in enumerate(shares):
        value = share()
        total = total + value.detach()
        model.backward(value, last=index == len(shares) - 1)
    return total


def deal(rows: int, mini_batches: int, key: tuple[int, ...]) -> list[Tensor]:
    """Which of this rank's rows go into which mini-batch: a list of (rows / mini_batches,) int64.

    Like cards: of each run of `mini_batches` neighbouring rows, every mini-batch gets one, in random order. The draw is
    over all ranks' rows at once, from `key` alone, so each rank has equally many in each mini-batch and they do not
    depend on how many ranks there are. `rows` is the same on all ranks and a multiple of `mini_batches`.
    """
    assert rows % mini_batches == 0, f"{rows} rows do not divide into {mini_batches} mini-batches"
    groups = rows // mini_batches
    everywhere = np.tile(np.arange(mini_batches), (groups * distributed.world_size(), 1))
    dealt = np.random.default_rng(key).permuted(everywhere, axis=1)
    own = torch.from_numpy(dealt[groups * distributed.rank():groups * (distributed.rank() + 1)].reshape(-1))
    return [(own == index).nonzero().squeeze(-1) for index in range(mini_batches)]


class PhaseClock:
    """Seconds of wall-clock time by phase, with the device's queue emptied at both ends; in a trace, ranges."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with record_function(phase):
            started = self._now()
            yield
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - started

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def add_to(self, metrics: Accumulator, tokens: Tensor) -> None:
        """Put the slowest rank's times, and the tokens generated per second over all ranks, into the metrics."""
        for phase, seconds in self.seconds.items():
            metrics.add_max(f"time/{phase}", seconds)
        metrics.add_max("time/step", sum(self.seconds.values()))
        metrics.add("rollout/tokens_per_second", tokens * distributed.world_size(), self.seconds["generate"])


def peak_memory_gb() -> float:
    """The most memory this process has held, in 10^9 bytes: of the GPU if there is one, else of the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
