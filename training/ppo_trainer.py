"""PPO: `PPOTrainer.step` is the algorithm, in order.

    trainer = PPOTrainer(models=models, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)
    for report in trainer.fit(feed):
        print(report.step, report.metrics["objective/scores"])

Shapes: B responses of this rank, T response slots; slot t belongs to response token t. What each line of the step
computes is chosen by the dialect and stands in engine/algorithms/algorithm.py, the formulas in engine/algo/.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import distributed
from engine.algo.guards import went_too_far
from engine.algorithms import Algorithm, Dialect, end_token_id
from engine.experience import PromptBatch, TrainingBatch
from engine.experience_maker import ExperienceMaker
from engine.optim import lr_factor
from engine.reward.base import RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.group_sampling import GroupSampler, PromptFeed
from training.learner import Learner
from training.mini_batches import mini_batch_rows
from training.mixed_pretraining import MixedPretraining, TextFeed
from training.reporting.arithmetic import Arithmetic
from training.reporting.first_kl import stop_unless_at_reference
from training.reporting.guards import stop_if_too_far, stop_unless_finite, stop_unless_weights_finite
from training.reporting.metrics import Accumulator
from training.reporting.phase_clock import PhaseClock, peak_memory_gb
from training.reporting.step_metrics import STEP_METRICS, StepMetric, add_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """Sizes of a run, beside those that the dialect has.

    total_steps: rollouts, each followed by the dialect's ppo_epochs x mini_batches optimizer steps, and those of the
        critic where it learns apart.
    micro_batch_size: responses in one forward and backward pass of one rank.
    critic_pretrain_steps: of `CriticPretraining`, before the first step; steps_done counts them from below up to 0.
    critic_warmup_steps: steps at the start in which the critic alone is trained.
    unsup_coef: of the language-model loss where there are texts; 27.8 is InstructGPT's.
    max_kl: nats a response; a rollout further from the reference, as it stands then, ends the run. None for no limit.
    first_kl_bound: how far actor and reference may be apart where they are one model (`rounding_bound`): before the
        first update, and after a refresh of the reference; None for no look.
    exact_sampler: whether rollouts' log-probs are the actor's own within rounding, as they are in fp32 where a backend
        `computes_as_actor`: `old_logprobs` "auto" takes them then.
    padded: whether padding counts among a pass's tokens; False where all models leave it out (`RLHFEngine.packs`).
    overlap_gather: as in Learner.
    """

    total_steps: int
    micro_batch_size: int = 8
    critic_pretrain_steps: int = 0
    critic_warmup_steps: int = 0
    seed: int = 0
    unsup_coef: float = 27.8
    max_kl: float | None = None
    first_kl_bound: float | None = None
    exact_sampler: bool = True
    padded: bool = True
    overlap_gather: bool = False


CRITIC = 0xC817  # in the keys of a critic's own mini-batches, which are drawn apart from the actor's


@dataclass(frozen=True, slots=True)
class StepReport:
    """A finished step: its number (from 1), responses drawn so far over all ranks, metrics, what was learned from."""

    step: int
    samples: int
    metrics: dict[str, float]
    batch: TrainingBatch


class PPOTrainer:
    """Trains the actor, and the critic if there is one, of an RLHFEngine.

    reward: where scores come from; by default the reward model alone.
    unsupervised: texts whose language-model loss the actor learns from too; none by default.
    metrics: what is added to each step's metrics, functions of the accumulator, the batch and the algorithm.
    """

    def __init__(
        self,
        *,
        models: RLHFEngine,
        rollouts: RolloutBackend,
        dialect: Dialect,
        config: PPOConfig,
        sampling: SamplingConfig,
        reward: RewardSource | None = None,
        unsupervised: TextFeed | None = None,
        metrics: Sequence[StepMetric] = STEP_METRICS,
    ):
        assert dialect.has_critic == (models.critic is not None), (
            f"dialect {dialect.name}, critic_start {dialect.critic_start}"
        )
        alone = config.critic_pretrain_steps, config.critic_warmup_steps
        assert dialect.has_critic or not any(alone), "training of a critic that is not there"
        assert reward or models.reward, "there is no reward model, and no other reward was given"
        self.models, self.rollouts, self.config, self.sampling = models, rollouts, config, sampling
        self.algorithm = Algorithm(
            dialect,
            pad_token_id=sampling.pad_token_id,
            end_token_id=end_token_id(models.tokenizer, dialect),
            reduce=distributed.all_reduce_sum,
            ranks=distributed.world_size(),
            response_slots=sampling.max_new_tokens,
        )
        self.kl_controller = self.algorithm.kl_controller()
        self.experience_maker = ExperienceMaker(
            actor=models.actor,
            critic=models.critic,
            reference=models.reference,
            reward=reward or models.reward,
            algorithm=self.algorithm,
            micro_batch_size=config.micro_batch_size,
            exact_sampler=config.exact_sampler,
            padded=config.padded,
        )
        self.sampler = GroupSampler(self.experience_maker, dialect, sampling)
        pretraining = None
        if unsupervised is not None:
            pretraining = MixedPretraining(models.actor, unsupervised, config.unsup_coef, config.micro_batch_size)
        self.learner = Learner(
            models, self.algorithm, config.micro_batch_size, pretraining, config.padded, config.overlap_gather
        )
        self.step_metrics = metrics
        self.arithmetic = Arithmetic(models)
        self.steps_done = -config.critic_pretrain_steps
        self.optimizer_steps = self.samples = self.prompt_batches = 0
        self.epochs_made = 0  # in the latest step
        self.weights_are_whole = True
        """Whether weights and counters are those after `steps_done` steps; not while a step changes them."""

    def fit(self, feed: PromptFeed) -> Iterator[StepReport]:
        """Train to the last step, reporting after each."""
        while self.steps_done < self.config.total_steps:
            yield self.step(feed.prompts(self.prompt_batches), feed)

    def step(self, prompts: PromptBatch, feed: PromptFeed | None = None) -> StepReport:
        """One PPO step on this rank's prompts (all ranks call this together, with equally many prompts each).

        feed: where a dialect with dynamic sampling takes further ones from; these are its batch `prompt_batches`.
        """
        assert self.steps_done >= 0, "the critic's pretraining comes first"
        algorithm, kl_coef = self.algorithm, self.kl_controller.value
        metrics, clock = Accumulator(), PhaseClock()
        sampled = self.sampler.sample(self.rollouts, prompts, clock, feed, first=self.prompt_batches + 1)
        with clock("make_experience"):
            experience = self.experience_maker.make_experience(sampled.rollout, sampled.scores)
            self.rollouts.release_memory()
            stop_unless_finite(self.steps_done + 1, experience, self.models.tokenizer)
            if self.models.reference.is_actor(self.steps_done):
                stop_unless_at_reference(self.steps_done + 1, experience, self.config.first_kl_bound)
            rollout = experience.rollout
            slots = algorithm.slots(rollout.responses, rollout.response_mask)
            scores = algorithm.process_scores(experience.scores, rollout.ended, rollout.response_mask)
            rewards = algorithm.compute_rewards(experience.logprobs, experience.ref_logprobs, scores, slots, kl_coef)
            values = algorithm.kept_values(experience.values, slots)
            advantages, returns = algorithm.compute_advantages(rewards, values, slots.masks)
            correction, cut = algorithm.correction(experience.logprobs, rollout) or (None, None)
            batch = TrainingBatch.of(
                experience,
                algorithm.learned(slots.masks, rollout.ended),
                processed_scores=scores,
                rewards=rewards,
                values=values,
                advantages=advantages,
                returns=returns,
                kl_coef=kl_coef,
                measured_kl=algorithm.measured_kl(experience, slots),
                correction=correction,
                cut=cut,
            )
        responses = distributed.world_size() * len(batch)
        sums = torch.stack([batch.measured_kl.double().sum(), batch.kl.double().sum()])
        kl, objective_kl = (distributed.all_reduce_sum(sums) / responses).tolist()
        moves = self.models.reference.moves(self.steps_done)
        stop_if_too_far(self.steps_done + 1, objective_kl, self.config.max_kl, moved=bool(moves))
        self.weights_are_whole = False
        with clock("train"):
            self.train_actor_and_critic(batch, kl, metrics)
        self.kl_controller.after_step(kl, responses)
        self.models.reference.after_step(self.steps_done + 1)

        trains_actor = self._trains_actor
        self.steps_done += 1
        self.samples += sampled.responses
        self.prompt_batches += len(sampled.drawn)
        self.weights_are_whole = True
        sampled.add_to(metrics, algorithm.dialect.samples_per_prompt)
        add_parts(metrics, experience)
        for add_to in self.step_metrics:
            add_to(metrics, batch, algorithm)
        clock.add_to(metrics, tokens=sampled.tokens)
        if self.rollouts.fallback is not None:
            metrics.add_max("speed/decoding_fallback", float(self.rollouts.fallback != ""))
        own = algorithm.dialect.critic_passes[0] if algorithm.dialect.critic_learns_apart else self.epochs_made
        epochs = self.epochs_made * trains_actor, own
        self.arithmetic.add_to(metrics, clock.seconds, sampled.drawn, experience, *epochs)
        metrics.add_max("memory/peak_gb", peak_memory_gb())
        if moves is not None:
            metrics.add_max("objective/reference_moves", moves)
        return StepReport(self.steps_done, self.samples, metrics.reduce(), batch)

    def train_actor_and_critic(self, batch: TrainingBatch, kl: float, metrics: Accumulator) -> None:
        """The optimizer steps of one rollout: ppo_epochs passes, each over mini_batches parts of it.

        A critic that has passes of its own makes them first, of all that was rolled out.

        kl: the rollout's mean over all ranks, for a coefficient that changes after each pass.
        """
        dialect = self.algorithm.dialect
        if dialect.critic_learns_apart:
            self._train_critic(batch, metrics)
        for epoch in range(dialect.ppo_epochs):
            key, ratios = (self.config.seed, self.steps_done, epoch), 0.0
            for rows in mini_batch_rows(len(batch), dialect.mini_batches, key):
                ratios = ratios + self.optimizer_step(batch, rows, metrics)
                self.optimizer_steps += 1
            self.epochs_made = epoch + 1
            # By a mini-batch of this rank alone, as trlX has it; its source stands at AdaptiveKL.
            self.kl_controller.after_epoch(kl, len(batch) // dialect.mini_batches)
            if dialect.early_stop_kl is not None:
                metrics.add_max("policy/epochs", epoch + 1)
                _, approxkl, count = distributed.all_reduce_sum(ratios).tolist()
                if went_too_far(approxkl, count, dialect.early_stop_kl):
                    break
        stop_unless_weights_finite(self.steps_done + 1, self.models.trained)
        # Passes that were left out count, so that learning rates fall as planned.
        self.optimizer_steps = (self.steps_done + 1) * dialect.updates

    def _train_critic(self, batch: TrainingBatch, metrics: Accumulator) -> None:
        """The optimizer steps of a critic that learns apart; its rate falls by these."""
        epochs, mini_batches = self.algorithm.dialect.critic_passes
        updates, done = epochs * mini_batches, self.steps_done * epochs * mini_batches
        for epoch in range(epochs):
            for rows in mini_batch_rows(len(batch), mini_batches, (self.config.seed, self.steps_done, epoch, CRITIC)):
                self.learner.optimizer_step(
                    batch,
                    rows,
                    metrics,
                    step=self.steps_done + 1,
                    optimizer_step=done,
                    lr_factor=self._lr_factor(done, updates),
                    train_actor=False,
                )
                done += 1

    def optimizer_step(self, batch: TrainingBatch, rows: Tensor, metrics: Accumulator) -> Tensor:
        """One update of a critic that does not learn apart, and of the actor once it is warm; as in `Learner`."""
        dialect = self.algorithm.dialect
        return self.learner.optimizer_step(
            batch,
            rows,
            metrics,
            step=self.steps_done + 1,
            optimizer_step=self.optimizer_steps,
            lr_factor=self._lr_factor(self.optimizer_steps, dialect.updates),
            train_actor=self._trains_actor,
            train_critic=not dialect.critic_learns_apart,
            last=(self.optimizer_steps + 1) % dialect.updates == 0,
        )

    @property
    def _trains_actor(self) -> bool:
        """Whether the critic is warm."""
        return self.steps_done >= self.config.critic_warmup_steps

    def _lr_factor(self, optimizer_steps: int, updates: int) -> float:
        """Of a model that has made so many optimizer steps, of so many a step."""
        dialect, total = self.algorithm.dialect, self.config.total_steps
        position = self.algorithm.schedule_position(self.steps_done, optimizer_steps, total, updates)
        return lr_factor(*position, dialect.warmup_steps, dialect.lr_schedule, dialect.warmup_from_zero)

    def state_dict(self) -> dict:
        """What a restart needs beside the models' weights and moments."""
        return {
            "steps_done": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "samples": self.samples,
            "prompt_batches": self.prompt_batches,
            "kl": self.kl_controller.state_dict(),
            "score_scale": self.algorithm.score_scale.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self.steps_done, self.optimizer_steps = state["steps_done"], state["optimizer_steps"]
        self.samples = state["samples"]
        self.prompt_batches = state["prompt_batches"]
        self.kl_controller.load_state_dict(state["kl"])
        self.algorithm.score_scale.load_state_dict(state["score_scale"])
