"""The critic's training before the first PPO step: it learns the value of responses of the initial policy.

    trainer = PPOTrainer(..., config=PPOConfig(total_steps=200, critic_pretrain_steps=20))
    for report in CriticPretraining(trainer).fit(feed):  # trainer.steps_done goes from -20 to 0
        print(report.step, report.metrics["critic_pretrain/explained_variance"])
    for report in trainer.fit(other_feed): ...

A critic that starts as a reward model has been trained at the last token of texts only, and a critic with a new head
has not been trained at all. In both cases the first advantages consist mostly of the critic's error. During the
pretraining the critic alone learns, from the score that each response got (returns with lambda 1). Actor and reference
are still the same model, so the KL is 0, and neither model's log-probs are computed. After the pretraining the critic's
Adam is reset to its initial state. Therefore a run that starts from the saved critic computes the same as this run.

Source: Yuan et al. 2025, "What's behind PPO's collapse in long-CoT? Value optimization holds the secret" (VC-PPO, arXiv
2503.01491), "value pretraining": the critic learns the Monte-Carlo returns of responses of the fixed SFT policy.
"""

import json
from collections.abc import Iterator
from dataclasses import replace

from engine import distributed
from engine.algorithms import Algorithm
from engine.atomic_files import write_whole
from engine.errors import in_words, without_query
from engine.experience import PromptBatch, TrainingBatch
from engine.models.checking import PRETRAINING_RECORD
from training.group_sampling import PromptFeed
from training.learner import Counters, Learner, mini_batch_rows
from training.ppo_trainer import PPOTrainer, StepReport, batch_to_learn
from training.reporting.guards import stop_unless_finite, stop_unless_weights_finite
from training.reporting.metrics import Accumulator
from training.reporting.step_metrics import add_advantages, add_counts
from training.runtime import model_folders
from training.runtime.loop import Run
from training.runtime.processes import phase
from training.runtime.stopping import unwritten_noted

SEED = 0xC817C  # XORed with the run's seed, so that the pretraining and the PPO steps share no random numbers
OF_RESPONSES = ("scores", "response_length")
OF_VALUES = ("loss", "mean", "explained_variance", "slope", "bias", "grad_norm", "lr", "skipped", "loss_scale")


class CriticPretraining:
    """Trains the critic of a PPOTrainer before its first step.

    lr: the critic's peak learning rate during pretraining; by default the dialect's learning rate of the critic. The
    learning rate's schedule spans the pretraining steps alone.
    """

    def __init__(self, trainer: PPOTrainer, lr: float | None = None):
        given, config = trainer.algorithm, trainer.config
        dialect, (epochs, mini_batches) = given.dialect, given.dialect.critic_passes
        own = dialect.replaced(
            ppo_epochs=epochs,
            mini_batches=mini_batches,
            critic_epochs=None,
            critic_mini_batches=None,
            value_lam=1.0,
            length_adaptive_alpha=None,
            value_clip_range=None,
            whiten_advantages=False,
            correction="none",
            ratio_limit=None,
            critic_lr=dialect.critic_lr if lr is None else lr,
        )
        self.trainer, self.steps = trainer, config.critic_pretrain_steps
        self.algorithm = Algorithm(
            own,
            pad_token_id=given.pad_token_id,
            end_token_id=given.end_token_id,
            reduce=given.reduce,
            ranks=given.ranks,
            max_response_length=given.max_response_length,
        )
        # The PPO steps will scale scores and likelihoods in the same way.
        self.algorithm.score_scale, self.algorithm.likelihood_scale = given.score_scale, given.likelihood_scale
        self.counters = Counters(own, config.seed ^ SEED, self.steps, first_step=-self.steps)
        self.learner = Learner(
            trainer.models, self.algorithm, self.counters, config.micro_batch_size, padded=config.padded
        )
        self.sampling = replace(trainer.sampling, seed=trainer.sampling.seed ^ SEED)

    @property
    def steps_done(self) -> int:
        """How many pretraining steps are done."""
        return self.steps + self.trainer.steps_done

    def fit(self, feed: PromptFeed) -> Iterator[StepReport]:
        """Make the remaining pretraining steps; yields a report after each. feed: gives the prompts; the first
        pretraining step uses batch 0."""
        while self.trainer.steps_done < 0:
            yield self.step(feed.prompts(self.steps_done))

    def step(self, prompts: PromptBatch) -> StepReport:
        """Draw responses to these prompts and train the critic on their returns (all ranks call this together, with
        equally many prompts each)."""
        trainer = self.trainer
        counters = self.counters
        metrics = Accumulator()
        counters.steps_done = trainer.steps_done  # a resumed run has restored trainer.steps_done only
        batch = self._batch(prompts.to(distributed.device()).repeat(self.algorithm.dialect.samples_per_prompt))
        trainer.counters.begin_updates()
        self._train(batch, metrics)
        if counters.step == 0:
            trainer.models.critic.forget_moments()
        trainer.counters.end_step(samples=0, prompt_batches=0)
        add_advantages(metrics, batch, self.algorithm)
        metrics.add("scores", batch.scores.sum(), len(batch))
        metrics.add("response_length", batch.rollout.actions.sum(), len(batch))
        found = {name.removeprefix("value/"): value for name, value in metrics.reduce().items()}
        found = {f"critic_pretrain/{name}": found[name] for name in (*OF_RESPONSES, *OF_VALUES) if name in found}
        counted = Accumulator()
        add_counts(counted, trainer.rollouts.counts(), "critic_pretrain")
        return StepReport(counters.step, 0, found | counted.reduce(), batch)

    def _batch(self, prompts: PromptBatch) -> TrainingBatch:
        """Draw a response to each prompt; returns the responses with their scores, values and returns."""
        trainer = self.trainer
        rollout = trainer.rollouts.generate(prompts, self.sampling)
        policies = self.algorithm.dialect.likelihood_coef > 0  # the score has a part that the reference computes
        experience = trainer.experience_maker.make_experience(rollout, policies=policies)
        trainer.rollouts.release_memory()
        stop_unless_finite(self.counters.step, experience, trainer.models.tokenizer)
        return batch_to_learn(self.algorithm, experience, kl_coef=0.0)

    def _train(self, batch: TrainingBatch, metrics: Accumulator) -> None:
        """Make the critic's optimizer steps on this batch, as many as in a PPO step."""
        counters, dialect = self.counters, self.algorithm.dialect
        counters.optimizer_steps = self.steps_done * dialect.updates
        for epoch in range(dialect.ppo_epochs):
            for rows in mini_batch_rows(len(batch), dialect.mini_batches, counters.key(epoch)):
                self.learner.update(batch, rows, metrics, actor=False, critic=True)
                counters.optimizer_steps += 1
        stop_unless_weights_finite(counters.step, {"critic": self.trainer.models.critic})


def pretrain(run: Run, pretraining: CriticPretraining, feed: PromptFeed) -> None:
    """Make the remaining steps of the critic's pretraining within a run, and save the critic."""
    writer = run.writer
    shown = {"loss": "critic_pretrain/loss", "explained variance": "critic_pretrain/explained_variance"}
    writer.count(
        pretraining.steps,
        shown=shown,
        first_step=pretraining.steps_done,
        unit="critic pretraining step",
        below=pretraining.steps,
    )

    def step() -> StepReport:
        report = pretraining.step(feed.prompts(pretraining.steps_done))
        if report.step == 0:
            save_critic(run, pretraining, report.metrics)
        return report

    run.train(step, 0, "pretraining the critic")
    writer.count(run.plan.last_step, shown=run.view.bar)


@phase("saving models")
def save_critic(run: Run, pretraining: CriticPretraining, metrics: dict[str, float]) -> None:
    """Save the critic as at the end of a run, with a record of its pretraining (all ranks call this)."""
    critic, tokenizer = run.models.critic, run.models.saved_tokenizer
    merged = model_folders.merged_wanted(run.args.save_merged, [critic], run.output_dir)
    saved = model_folders.save_forms(
        critic, tokenizer, run.output_dir, "critic_pretrained", merged, written=run.written
    )
    if not distributed.is_main():
        return
    args, dialect = run.args, run.plan.dialect
    record = {
        "steps": pretraining.steps,
        "learning_rate": args.critic_pretrain_learning_rate or dialect.critic_lr,
        "gamma": dialect.gamma,
        "actor": args.actor_model_name_or_path,
        "critic": args.critic_model_name_or_path,
        "reward_models": args.reward_paths,
        "reward_function": args.reward_function,
        "reward_url": list(map(without_query, args.reward_url)),
        **({"environment": args.environment} if args.environment else {}),
        **metrics,
    }
    for folder in saved.values():
        with unwritten_noted(folder / PRETRAINING_RECORD):
            write_whole(folder / PRETRAINING_RECORD, json.dumps(record, indent=2) + "\n")
    explained = metrics.get("critic_pretrain/explained_variance")
    told = f"critic pretrained in {in_words(pretraining.steps, 'step')}"
    told += f", explained variance {explained:.2f}" if explained is not None else ""
    run.writer.write(f"{told}: {', '.join(map(str, saved.values()))}")
