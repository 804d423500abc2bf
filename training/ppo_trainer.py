"""PPO training. `PPOTrainer.step` is one PPO step, from the rollout to the optimizer steps.

    trainer = PPOTrainer(models=models, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)
    for report in trainer.fit(feed):
        print(report.step, report.metrics["objective/scores"])

Shapes: B responses of this rank, T response positions; position t belongs to response token t. A dialect is the set of
a run's algorithmic choices. The dialect decides which formula each line of `PPOTrainer.step` uses: see
engine/algorithms/algorithm.py, and engine/algo/ for the formulas. `Learner.update` in training/learner.py makes one
optimizer step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine import distributed
from engine.algo.losses import went_too_far
from engine.algo.rewards import at_drawn_tokens, mean_logprobs
from engine.algorithms import Algorithm, Dialect, end_token_id
from engine.errors import RunStopped
from engine.experience import Experience, PromptBatch, TrainingBatch
from engine.experience_maker import ExperienceMaker
from engine.reward.base import CombinedReward, RewardModel, RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.group_sampling import GroupSampler, PromptFeed, Sampled
from training.learner import Counters, Learner, MixedPretraining, StepReport, TextFeed, mini_batch_rows
from training.reporting.guards import Guards
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import (
    STEP_METRICS,
    Arithmetic,
    StepLog,
    StepMetric,
    add_counts,
    add_hidden_tokens,
    add_parts,
)

CRITIC = 0xC817  # part of the keys of a critic's separate mini-batches, so that they differ from the actor's


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig:
    """The settings of a run that are not part of the dialect.

    total_steps: number of PPO steps. Each PPO step makes one rollout and then ppo_epochs x mini_batches optimizer
        steps. A critic that is trained in separate passes makes optimizer steps of its own in addition.
    micro_batch_size: responses in one forward and backward pass of one rank.
    critic_pretrain_steps: number of `CriticPretraining` steps before the first PPO step. During these steps
        `steps_done` is negative and rises to 0.
    critic_warmup_steps: number of PPO steps at the start in which only the critic is trained.
    unsup_coef: coefficient of the language-model loss, if texts are given; InstructGPT used 27.8.
    max_kl: limit in nats per response. A rollout whose KL to the current reference is larger ends the run. None for no
        limit.
    first_kl_bound: largest allowed difference between the log-probs of actor and reference while both are the same
        model (`rounding_bound`): before the first update, and after a refresh of the reference. None for no check.
    exact_sampler: whether the log-probs that the sampler returns equal those of the actor's forward pass within
        rounding, as in fp32 with a backend that `computes_as_actor`. If so, `old_logprobs` "auto" uses the sampler's.
    padded: whether padding counts among the tokens of a forward pass; False if all models pack sequences
        (`RLHFEngine.packs`).
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


class PPOTrainer:
    """Trains the actor of an RLHFEngine, and its critic if there is one.

    reward: the source of scores; by default the reward model.
    unsupervised: texts whose language-model loss is added to the actor's loss; None to add no such loss.
    metrics: functions (accumulator, batch, algorithm). Each is called in each step and adds metrics to the accumulator.
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
        assert not dialect.likelihood_coef or models.reference.moves(0) is None, "a likelihood under a moving reference"
        if reward is None:
            assert len(models.rewards) == 1, f"{len(models.rewards)} reward models, and no `reward` was given"
            (reward,) = models.rewards
            if dialect.cut_responses == "closed":
                reward = RewardModel(reward.model, models.tokenizer.eos_token_id)
        self.models = models
        self.rollouts = rollouts
        self.config = config
        self.sampling = sampling
        self.algorithm = Algorithm(
            dialect,
            pad_token_id=sampling.pad_token_id,
            end_token_id=end_token_id(models.tokenizer, dialect),
            reduce=distributed.data_parallel_sum,
            ranks=distributed.data_parallel_size(),
            max_response_length=sampling.max_new_tokens,
        )
        self.kl_controller = self.algorithm.kl_controller()
        self.counters = Counters(dialect, config.seed, config.total_steps)
        self.counters.steps_done = -config.critic_pretrain_steps
        self.experience_maker = ExperienceMaker(
            actor=models.actor,
            critic=models.critic,
            reference=models.reference,
            reward=reward,
            algorithm=self.algorithm,
            micro_batch_size=config.micro_batch_size,
            exact_sampler=config.exact_sampler,
            padded=config.padded,
            group=models.group,
        )
        self.sampler = GroupSampler(self.experience_maker, dialect, sampling)
        pretraining = None
        if unsupervised is not None:
            pretraining = MixedPretraining(
                models.actor, unsupervised, config.unsup_coef, config.micro_batch_size, models.group
            )
        self.learner = Learner(
            models, self.algorithm, self.counters, config.micro_batch_size, pretraining, config.padded
        )
        self.guards = Guards(models, config.max_kl, config.first_kl_bound)
        self.step_metrics, self.arithmetic = metrics, Arithmetic(models)

    @property
    def steps_done(self) -> int:
        """How many PPO steps are done; negative until the critic's pretraining is done."""
        return self.counters.steps_done

    def fit(self, feed: PromptFeed) -> Iterator[StepReport]:
        """Train until `total_steps` PPO steps are done; yields a report after each step."""
        while self.steps_done < self.config.total_steps:
            yield self.step(feed.prompts(self.counters.prompt_batches), feed)

    def step(self, prompts: PromptBatch, feed: PromptFeed | None = None) -> StepReport:
        """Make one PPO step on this rank's prompts (all ranks call this together, with equally many prompts each).

        prompts: the feed's batch number `counters.prompt_batches`.
        feed: gives further prompts to a dialect with dynamic sampling; other dialects do not need it.
        """
        assert self.steps_done >= 0, "the critic's pretraining comes first"
        algorithm = self.algorithm
        kl_coef = self.kl_controller.value
        log = StepLog()
        step = self.counters.step
        sampled = self.sampler.sample(self.rollouts, prompts, log, feed, first=self.counters.prompt_batches + 1)
        with log.phase("make_experience"):
            experience = self.experience_maker.make_experience(sampled.rollout, sampled.scores)
            self.rollouts.release_memory()
            self.guards.check_experience(step, experience)
            batch = batch_to_learn(algorithm, experience, kl_coef)
        steered_kl, kl = mean_kls(batch)
        self.guards.check_kl(step, kl)
        with log.phase("train"):
            epochs = self.train_actor_and_critic(batch, steered_kl, log.metrics)
        self.kl_controller.after_step(steered_kl, distributed.data_parallel_size() * len(batch))
        self.models.reference.after_step(step)
        self.counters.end_step(sampled.responses, len(sampled.drawn))
        return StepReport(step, self.counters.samples, self._metrics(log, sampled, experience, batch, epochs), batch)

    def train_actor_and_critic(self, batch: TrainingBatch, kl: float, metrics: Accumulator) -> tuple[int, int]:
        """Make the optimizer steps that follow one rollout; returns (epochs of the actor, epochs of the critic).

        An epoch is a pass over the rollout, divided into mini-batches. A critic that is trained in separate passes
        makes all its epochs before the actor's first one. The actor does not learn in the first `critic_warmup_steps`
        PPO steps.

        kl: the rollout's mean KL over all ranks. If the KL coefficient changes after each epoch, it is updated with
        this KL.
        """
        dialect = self.algorithm.dialect
        counters = self.counters
        epochs = 0
        critic_epochs, critic_mini_batches = dialect.critic_passes
        actor, apart = counters.steps_done >= self.config.critic_warmup_steps, dialect.critic_learns_apart
        counters.begin_updates()
        for epoch in range(critic_epochs if apart else 0):
            for rows in mini_batch_rows(len(batch), critic_mini_batches, counters.key(epoch, CRITIC)):
                self.learner.update(batch, rows, metrics, actor=False, critic=True)
                counters.critic_optimizer_steps += 1
        for epoch in range(dialect.ppo_epochs):
            ratios = torch.zeros(3, dtype=torch.float64, device=distributed.device())
            for rows in mini_batch_rows(len(batch), dialect.mini_batches, counters.key(epoch)):
                ratios += self.learner.update(batch, rows, metrics, actor=actor, critic=not apart)
                counters.optimizer_steps += 1
            epochs = epoch + 1
            # The second argument is the number of this rank's responses in a mini-batch, as in trlX; AdaptiveKL cites
            # the source.
            self.kl_controller.after_epoch(kl, len(batch) // dialect.mini_batches)
            if dialect.early_stop_kl is not None:
                metrics.add_max("policy/epochs", epochs)
                _, approxkl, count = distributed.data_parallel_sum(ratios).tolist()
                if went_too_far(approxkl, count, dialect.early_stop_kl):
                    break
        self.guards.check_weights(counters.step)
        counters.end_updates()
        return epochs * actor, critic_epochs if apart else epochs

    def _metrics(
        self, log: StepLog, sampled: Sampled, experience: Experience, batch: TrainingBatch, epochs: tuple[int, int]
    ) -> dict[str, float]:
        """The step's metrics over all ranks (all ranks call this). epochs: (epochs of the actor, of the critic)."""
        metrics = log.metrics
        sampled.add_to(metrics, self.algorithm.dialect.samples_per_prompt)
        add_parts(metrics, experience)
        add_counts(metrics, self.rollouts.counts(), "rollout")
        if self.algorithm.dialect.length_rule == "not_pad":
            add_hidden_tokens(metrics, sampled.rollout, experience.rollout)
        for add_to in self.step_metrics:
            add_to(metrics, batch, self.algorithm)
        if self.rollouts.fallback is not None:
            metrics.add_max("speed/decoding_fallback", float(self.rollouts.fallback != ""))
        # How often the reference had moved when make_experience used it; steps_done counts this step already.
        moves = self.models.reference.moves(self.steps_done - 1)
        if moves is not None:
            metrics.add_max("objective/reference_moves", moves)
        self.arithmetic.add_to(metrics, log.seconds, sampled.drawn, experience, *epochs)
        return log.end(sampled.tokens)

    # The next three methods import what they use: it imports pyarrow, which starts a thread, and tests fork processes
    # that have imported this file.

    def save_models(
        self,
        folder: str | Path,
        merged: str = "auto",
        written: Callable[[str, Path], None] = lambda name, folder: None,
    ) -> dict[str, Path]:
        """Write the trained models below `folder` as Hugging Face folders with the tokenizer: actor/, critic/, and
        actor_ema/ if there is a moving average, or actor_adapter/ and the like (all ranks call this together, at any
        ZeRO stage). Returns {name: folder}. merged: see `merged_wanted`. written: see `model_folders.save`.
        """
        from training.runtime.model_folders import merged_wanted, save_forms

        models = self.models
        folder = Path(folder)
        saved = {}
        averaged = [models.actor] if models.ema is not None else []
        whole = merged_wanted(merged, [*models.trained.values(), *averaged], folder)
        for name, model in models.trained.items():
            saved |= save_forms(model, models.saved_tokenizer, folder, name, whole, written=written)
        if models.ema is not None:
            with models.ema.swapped():
                saved |= save_forms(models.actor, models.saved_tokenizer, folder, "actor_ema", whole, written=written)
        return saved

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write all from which training goes on into `folder`/checkpoints/step_N, N being `steps_done`; returns that
        folder (all ranks call this together, between steps). Checkpoints of later steps, which an earlier run left in
        `folder`, are renamed to step_N.abandoned. Raises: RunStopped on all ranks if it cannot be written.
        """
        from training.checkpoints.conditions import Conditions
        from training.checkpoints.files import Schedule, config_files
        from training.checkpoints.resuming import set_aside_newer
        from training.checkpoints.saving import CheckpointWriter

        models, step = self.models, self.steps_done
        checkpoints = CheckpointWriter(
            Path(folder),
            Schedule(),
            models=models.trained,
            ema=models.ema,
            reference=models.kept_reference,
            state=self.state_dict,
            conditions=Conditions.of_trainer(self.algorithm.dialect, self.config),
            config_files=config_files(models.trained, models.saved_tokenizer) if distributed.is_main() else {},
            say=lambda line: None,
        )
        saved = checkpoints.save(step, wait=True)
        if saved is None:
            raise RunStopped(f"the checkpoint of step {step} cannot be written into {folder}: {checkpoints.problem}")
        set_aside_newer(Path(folder), step)
        return saved

    def load_checkpoint(self, folder: str | Path) -> Path:
        """Go on from a checkpoint of a trainer that was built in the same way, or of step 3 (all ranks call this
        together). folder: .../checkpoints/step_N, or the folder that holds checkpoints/, whose newest whole one is
        taken. Returns the checkpoint's folder. Raises: UserError on all ranks if none is whole, or it does not fit.
        """
        from training.checkpoints.conditions import Conditions
        from training.checkpoints.resuming import Checkpoint, restore

        models = self.models
        checkpoint = Checkpoint.find(str(folder), str(folder), with_ema=models.ema is not None)
        assert checkpoint is not None, "a folder was given"
        ours, written = Conditions.of_trainer(self.algorithm.dialect, self.config), Conditions.read(checkpoint.state)
        known = {name: value for name, value in written.settings.items() if name in ours.settings}
        ours.check(replace(written, settings=known), checkpoint.folder)
        notes = restore(checkpoint, models.trained, models.ema, models.kept_reference)
        self.load_state_dict(checkpoint.state)
        if distributed.is_main():
            print("\n".join([*checkpoint.lines(), *ours.changes_since(written), *notes]), flush=True)
        return checkpoint.folder

    def state_dict(self) -> dict:
        """The state that a checkpoint holds in addition to the models' weights and Adam moments."""
        state = self.counters.state_dict() | {
            "kl": self.kl_controller.state_dict(),
            "score_scale": self.algorithm.score_scale.state_dict(),
        }
        if self.algorithm.dialect.likelihood_coef:
            state["likelihood_scale"] = self.algorithm.likelihood_scale.state_dict()
        reward = self.experience_maker.reward
        if isinstance(reward, CombinedReward) and reward.standardised:
            state["reward"] = reward.state_dict()
        return state

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        self.counters.load_state_dict(state)
        self.kl_controller.load_state_dict(state["kl"])
        self.algorithm.score_scale.load_state_dict(state["score_scale"])
        if self.algorithm.dialect.likelihood_coef:
            self.algorithm.likelihood_scale.load_state_dict(state["likelihood_scale"])
        reward = self.experience_maker.reward
        if isinstance(reward, CombinedReward) and "reward" in state:
            reward.load_state_dict(state["reward"])


def batch_to_learn(algorithm: Algorithm, experience: Experience, kl_coef: float) -> TrainingBatch:
    """From scores to advantages: all that the losses use of this rank's responses.

    Only scores of whole responses are scaled, clipped and changed for a missing end. Scores of tokens are added to the
    tokens' rewards as they are; that of an inserted token counts at the drawn token before it. Source: verl 1dda039b,
    verl/trainer/ppo/ray_trainer.py, `apply_kl_penalty`: token_level_rewards = token_level_scores - beta * kld.
    """
    rollout = experience.rollout
    positions = algorithm.positions(rollout.responses, rollout.response_mask, rollout.action_mask)
    whole = experience.scores if experience.whole_scores is None else experience.whole_scores
    likelihoods = mean_logprobs(experience.ref_logprobs, rollout.actions)
    scores = algorithm.process_scores(whole, rollout.ended, rollout.actions, likelihoods)
    rewards = algorithm.compute_rewards(experience.logprobs, experience.ref_logprobs, scores, positions, kl_coef)
    if experience.token_scores is not None:
        rewards = rewards + at_drawn_tokens(experience.token_scores, rollout.actions)
        scores = scores + experience.token_scores.sum(-1)
    values = algorithm.kept_values(experience.values, positions)
    advantages, returns = algorithm.compute_advantages(rewards, values, positions.masks)
    return algorithm.training_batch(experience, positions, scores, rewards, values, advantages, returns, kl_coef)


def mean_kls(batch: TrainingBatch) -> tuple[float, float]:
    """(the KL that adjusts the KL coefficient, the KL that is reported). Both are means over the responses of all
    ranks, in nats (all ranks call this)."""
    sums = torch.stack([batch.measured_kl.double().sum(), batch.kl.double().sum()])
    steered, reported = (distributed.data_parallel_sum(sums) / (distributed.data_parallel_size() * len(batch))).tolist()
    return steered, reported
