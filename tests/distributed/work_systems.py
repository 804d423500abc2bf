"""Run by ranks: a step of PPOTrainer on given rows in every dialect, with its gradients; and runs of five steps."""

import torch
from torch import Tensor

from engine import distributed
from engine.algorithms import Dialect, algorithm
from engine.experience import PromptBatch, Rollout
from engine.reward.base import CombinedReward, RewardSource
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, SamplingConfig, build_rollouts
from engine.zero.engines import TrainedModel
from tests.distributed.tiny_run import SAMPLING, TinyPrompts, engine_spec
from tests.engine.zero.inspecting import gradients
from training.learner import Learner
from training.ppo_trainer import PPOConfig, PPOTrainer

MINI_BATCHES = {"openai": 2, "trlx": 2}
MICRO_BATCH = 2
SCORE_WEIGHT = 6.0  # so that some scores are clipped
NOISE = {"rollout": (21, 0.02), "learning": (22, 0.04)}  # seed and size of what is added to the saved weights


def moved(weights: dict[str, Tensor], phase: str) -> dict[str, Tensor]:
    """The weights (float32) in a phase of the step: old log-probs and values, gradients."""
    seed, size = NOISE[phase]
    generator = torch.Generator().manual_seed(seed)
    return {name: weight + size * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}


class GivenRollouts(RolloutBackend):
    """Gives the same rows whatever it is asked for, and moves the weights before and after the experience is made."""

    def __init__(self, rollout: Rollout, engine: RLHFEngine, dialect: Dialect):
        self.rollout, self.engine, self.dialect = rollout, engine, dialect
        self.saved = {role: named_weights(model) for role, model in engine.trained.items()}

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """The rows, with what a sampler would have told of them."""
        self.move("rollout")
        rollout = self.rollout
        if self.dialect.old_logprobs == "forward":
            return rollout
        with torch.no_grad():
            logprobs, entropy = self.engine.actor(
                rollout.sequences,
                rollout.attention_mask,
                rollout.position_ids,
                with_entropy=True,
                response_length=rollout.response_length,
                temperature=self.dialect.logprob_temperature,
            )
        return Rollout(
            **{
                name: getattr(rollout, name)
                for name in ("sequences", "attention_mask", "response_mask", "ended", "indices", "samples")
            },
            logprobs=logprobs,
            entropy=entropy,
        )

    def release_memory(self) -> None:
        """The experience is made: what is trained is another model than what it was made with."""
        self.move("learning")

    def move(self, phase: str) -> None:
        """Put the weights of a phase into the engines; of "" the saved ones."""
        put(self.engine, {role: moved(weights, phase) if phase else weights for role, weights in self.saved.items()})


def put(engine: RLHFEngine, weights: dict[str, dict[str, Tensor]]) -> None:
    """Give the engines these weights, by role and name; at stage 0 in float32, where the module's are the only ones."""
    for role, model in engine.trained.items():
        for name, parameter in model.module.model.named_parameters():
            parameter.data.copy_(weights[role][name])
        model.version += 1


def named_weights(model: TrainedModel) -> dict[str, Tensor]:
    """Copies, by Hugging Face's names."""
    return {name: parameter.detach().clone() for name, parameter in model.module.model.named_parameters()}


class GivenScores(RewardSource):
    """Scores that do not depend on the response, by the number of the prompt."""

    def __init__(self, scores: list[float]):
        self.scores = scores

    def score(self, rollout: Rollout) -> Tensor:
        """(B,) float32."""
        return torch.tensor([self.scores[index] for index in rollout.indices.tolist()])


def gradients_of_all(
    folder: str, cases: dict[str, tuple[Dialect, list[Rollout]]], scores: list[float] | None = None
) -> dict[str, list[dict]]:
    """By case, for each optimizer step: this rank's rows in their order, and the gradients by role.

    cases: a dialect, and each rank's rows. scores: of all rows, by their numbers; by default the reward model's.
    """
    engine = RLHFEngine.from_pretrained(engine_spec(folder, 0))
    reward = GivenScores(scores) if scores else CombinedReward({"model": (engine.rewards[0], SCORE_WEIGHT)})
    return {
        name: one_step(engine, dialect, rows[distributed.rank()], reward) for name, (dialect, rows) in cases.items()
    }


def one_step(engine: RLHFEngine, dialect: Dialect, rollout: Rollout, reward: RewardSource) -> list[dict]:
    """A step at learning rate 0, so that weights stay what `moved` makes them."""
    engine = fitting(engine, dialect)
    still = dialect.override(actor_lr=0.0, critic_lr=0.0)
    rollouts = GivenRollouts(rollout, engine, dialect)
    trainer = PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=still,
        sampling=SAMPLING,
        config=PPOConfig(total_steps=1, micro_batch_size=MICRO_BATCH),
        reward=reward,
    )
    steps, found = [], {}

    def watch(role: str, model: TrainedModel) -> None:
        def step(*args, **kwargs):
            found[role] = gradients(model)
            return TrainedModel.step(model, *args, **kwargs)

        model.step = step

    def update(batch, rows, metrics, **which):
        sums = Learner.update(trainer.learner, batch, rows, metrics, **which)
        steps.append({"rows": rows.tolist(), **found})
        return sums

    for role, model in engine.trained.items():
        watch(role, model)
    trainer.learner.update = update
    trainer.step(TinyPrompts(2 * distributed.world_size()).prompts(0))
    rollouts.move("")
    for model in engine.trained.values():
        del model.step
    return steps


def fitting(engine: RLHFEngine, dialect: Dialect) -> RLHFEngine:
    """The same engines, without the critic where the dialect has none."""
    return RLHFEngine(
        actor=engine.actor,
        critic=engine.critic if dialect.has_critic else None,
        ema=None,
        reference=engine.reference,
        rewards=engine.rewards,
        tokenizer=engine.tokenizer,
    )


def five_steps(folder: str, dialects: dict[str, Dialect]) -> dict[str, dict]:
    """By dialect: the trainer's state after five steps of sampled rows, and the statistics that were whitened with."""
    engine = RLHFEngine.from_pretrained(engine_spec(folder, 0))
    rollouts = build_rollouts("replica", engine.actor, engine.tokenizer)
    saved, found = {role: named_weights(model) for role, model in engine.trained.items()}, {}
    for name, dialect in dialects.items():
        put(engine, saved)
        statistics, whiten = [], algorithm.whiten

        def noted(*args, **kwargs):
            statistics.append(tuple(float(number) for number in kwargs["statistics"]))
            return whiten(*args, **kwargs)

        algorithm.whiten = noted
        sampling = SamplingConfig.of(
            dialect, SAMPLING.stop_token_ids, "fp32", max_new_tokens=12, seed=3, pad_token_id=SAMPLING.pad_token_id
        )
        trainer = PPOTrainer(
            models=fitting(engine, dialect),
            rollouts=rollouts,
            dialect=dialect,
            sampling=sampling,
            config=PPOConfig(total_steps=5, micro_batch_size=MICRO_BATCH),
        )
        reports = list(trainer.fit(TinyPrompts(8)))
        algorithm.whiten = whiten
        found[name] = {
            "state": trainer.state_dict(),
            "statistics": statistics,
            "coefficients": [report.metrics["objective/kl_coef"] for report in reports],
            "rows": [report.batch.rollout.sequences for report in reports],
            "measured": [report.batch.measured_kl for report in reports],
            "metrics": [report.metrics for report in reports],
        }
    return found
