"""PPO: what happens in one step, in order.

trainer = PPOTrainer(engine=engine, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)
for report in trainer.fit(feed):
    print(report.step, report.metrics["objective/scores"])
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine import distributed
from engine.algo.guards import went_too_far
from engine.algorithms import Dialect, end_token_id
from engine.experience import Experience, PromptBatch
from engine.experience_maker import ExperienceMaker
from engine.learnable import kl_controller
from engine.optim import lr_factor
from engine.reward.base import RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.learner import Learner
from training.mixed_pretraining import MixedPretraining, TextFeed
from training.reporting.metrics import Accumulator
from training.reporting.phase_clock import PhaseClock, peak_memory_gb
from training.reporting.step_metrics import add_experience, stop_if_not_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Sizes of a run, beside those that the dialect has.

    total_steps: rollouts, each followed by the dialect's ppo_epochs x mini_batches optimizer steps.
    micro_batch_size: responses in one forward and backward pass of one rank.
    critic_warmup_steps: steps at the start in which the critic alone is trained.
    unsup_coef: of the language-model loss where there are texts; 27.8 is InstructGPT's.
    """

    total_steps: int
    micro_batch_size: int = 8
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
    """Trains the actor, and the critic if there is one, of an RLHFEngine.

    reward: where scores come from; by default the engine's reward model alone.
    unsupervised: texts whose language-model loss the actor learns from too; none by default.
    """

    def __init__(
        self,
        *,
        engine: RLHFEngine,
        rollouts: RolloutBackend,
        dialect: Dialect,
        config: PPOConfig,
        sampling: SamplingConfig,
        reward: RewardSource | None = None,
        unsupervised: TextFeed | None = None,
    ):
        self.engine, self.rollouts = engine, rollouts
        self.dialect, self.config, self.sampling = dialect, config, sampling
        self.kl = kl_controller(dialect)
        assert dialect.has_critic or not config.critic_warmup_steps, "warm-up of a critic that is not there"
        reward = reward or engine.reward
        assert reward is not None, "the engine has no reward model, and no other reward was given"
        self.maker = ExperienceMaker(
            actor=engine.actor,
            critic=engine.critic,
            reference=engine.reference,
            reward=reward,
            dialect=dialect,
            pad_token_id=sampling.pad_token_id,
            micro_batch_size=config.micro_batch_size,
            end_token_id=end_token_id(engine.tokenizer, dialect),
        )
        pretraining = (
            None
            if unsupervised is None
            else MixedPretraining(engine.actor, unsupervised, config.unsup_coef, config.micro_batch_size)
        )
        self.learner = Learner(engine, dialect, config.micro_batch_size, pretraining)
        self.steps_done = self.optimizer_steps = self.samples = 0

    def fit(self, feed: PromptFeed) -> Iterator[StepReport]:
        """Train to the last step, reporting after each."""
        while self.steps_done < self.config.total_steps:
            yield self.step(feed.prompts(self.steps_done))

    def step(self, prompts: PromptBatch) -> StepReport:
        """One step: generate, make experience, train."""
        metrics, clock = Accumulator(), PhaseClock()
        prompts = prompts.to(distributed.device()).repeat(self.dialect.samples_per_prompt)
        with clock("generate"):
            rollout = self.rollouts.generate(prompts, self.sampling)
        with clock("make_experience"):
            experience = self.maker.make(
                rollout, self.kl.value, tally=lambda name, part: metrics.add(name, part.sum(), len(part))
            )
            self.rollouts.release_memory()
            stop_if_not_finite(self.steps_done + 1, experience, self.engine.tokenizer)
        responses = distributed.world_size() * len(experience)
        kl = distributed.all_reduce_sum(experience.measured_kl.double().sum()).item() / responses
        with clock("train"):
            self.train(experience, kl, metrics)
        if self.dialect.kl_update == "step":
            self.kl.update(kl, responses)
        add_experience(metrics, experience, self.dialect)
        self.steps_done += 1
        self.samples += responses
        clock.add_to(metrics, tokens=experience.rollout.response_mask.sum())
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        return StepReport(self.steps_done, self.samples, metrics.reduce(), experience)

    def train(self, experience: Experience, kl: float, metrics: Accumulator) -> None:
        """The optimizer steps of one rollout: ppo_epochs passes, each over mini_batches parts of it.

        kl: the rollout's, over all ranks, for a coefficient that changes after each pass.
        """
        dialect = self.dialect
        for epoch in range(dialect.ppo_epochs):
            key, passed = (self.config.seed, self.steps_done, epoch), 0.0
            for rows in deal(len(experience), dialect.mini_batches, key):
                passed = passed + self.optimizer_step(experience, rows, metrics)
                self.optimizer_steps += 1
            if dialect.kl_update == "epoch":
                self.kl.update(kl, len(experience) // dialect.mini_batches)
            if dialect.early_stop_kl is not None:
                metrics.add_max("policy/epochs", epoch + 1)
                _, approxkl, count = distributed.all_reduce_sum(passed).tolist()
                if went_too_far(approxkl, count, dialect.early_stop_kl):
                    break
        # Passes that were left out count, so that learning rates fall as planned.
        self.optimizer_steps = (self.steps_done + 1) * dialect.ppo_epochs * dialect.mini_batches

    def optimizer_step(self, experience: Experience, rows: Tensor, metrics: Accumulator) -> Tensor:
        """One step of the critic, and of the actor once the critic is warm, on these rows; as `Learner.step`."""
        return self.learner.step(
            experience,
            rows,
            metrics,
            step=self.steps_done + 1,
            optimizer_step=self.optimizer_steps,
            lr_factor=self._lr_factor(),
            train_actor=self.steps_done >= self.config.critic_warmup_steps,
        )

    def _lr_factor(self) -> float:
        dialect, total, done = self.dialect, self.config.total_steps, self.steps_done
        if dialect.lr_per == "optimizer_step":
            total, done = total * dialect.ppo_epochs * dialect.mini_batches, self.optimizer_steps
        return lr_factor(done, total, dialect.warmup_steps, dialect.lr_schedule, dialect.warmup_from_zero)

    def state_dict(self) -> dict:
        """What a restart needs beside the engines' own checkpoints."""
        return {
            "steps_done": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "samples": self.samples,
            "kl": self.kl.state_dict(),
            "score_scale": self.maker.score_scale.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self.steps_done, self.optimizer_steps = state["steps_done"], state["optimizer_steps"]
        self.samples = state["samples"]
        self.kl.load_state_dict(state["kl"])
        self.maker.score_scale.load_state_dict(state["score_scale"])


def deal(rows: int, mini_batches: int, key: tuple[int, ...]) -> list[Tensor]:
    """Which of this rank's rows go into which mini-batch: a list of (rows / mini_batches,) int64.

    Like cards: of each run of `mini_batches` neighbouring rows, every mini-batch gets one, in random order. The draw is
    over all ranks' rows at once, from `key` alone, so each rank has equally many in each mini-batch and they do not
    depend on how many ranks there are. `rows` is the same on all ranks and a multiple of `mini_batches`. Within a
    mini-batch a rank's rows are shuffled, for dialects in which it matters which of them form a micro-batch.
    """
    assert rows % mini_batches == 0, f"{rows} rows do not divide into {mini_batches} mini-batches"
    groups = rows // mini_batches
    everywhere = np.tile(np.arange(mini_batches), (groups * distributed.world_size(), 1))
    dealt = np.random.default_rng(key).permuted(everywhere, axis=1)
    own = torch.from_numpy(dealt[distributed.rank_share(len(dealt))].reshape(-1))
    shuffled = torch.from_numpy(np.random.default_rng((*key, distributed.rank())).permutation(rows))
    return [shuffled[own[shuffled] == index] for index in range(mini_batches)]
