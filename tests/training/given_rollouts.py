"""A PPO step on given rows, up to where training begins: PPOTrainer with stand-ins for the models and the sampler."""

from types import SimpleNamespace

from engine.algorithms import Dialect
from engine.distributed import ALONE
from engine.experience import PromptBatch, Rollout, TrainingBatch
from engine.rollout import RolloutBackend, SamplingConfig
from training.ppo_trainer import PPOConfig, PPOTrainer, StepReport


class GivenRollouts(RolloutBackend):
    """Gives the rows that it was given, whatever it is asked for."""

    def __init__(self, *rollouts: Rollout):
        self.rollouts, self.released = list(rollouts), 0

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """The next rows."""
        return self.rollouts.pop(0)

    def release_memory(self) -> None:
        """Counts how often it is asked to."""
        self.released += 1


def untrained(
    roles: dict, dialect: Dialect, *rollouts: Rollout, pad: int, micro_batch_size: int = 8, exact_sampler: bool = True
) -> PPOTrainer:
    """A trainer whose steps end before anything is learned. `roles`: actor, critic, reference and reward; EOS is 2, and
    a text "w07" is token 7."""
    tokenizer = SimpleNamespace(eos_token_id=2, get_vocab=lambda: {"w07": 7})
    models = SimpleNamespace(**roles, rewards=[roles["reward"]], ema=None, tokenizer=tokenizer, group=ALONE)
    if not dialect.has_critic:
        models.critic = None
    trainer = PPOTrainer(
        models=models,
        rollouts=GivenRollouts(*rollouts),
        dialect=dialect,
        config=PPOConfig(total_steps=9, micro_batch_size=micro_batch_size, exact_sampler=exact_sampler),
        sampling=SamplingConfig(max_new_tokens=9, pad_token_id=pad, stop_token_ids=()),
    )
    trainer.train_actor_and_critic = lambda batch, kl, metrics: (0, 0)
    return trainer


def next_step(trainer: PPOTrainer) -> StepReport:
    """A step; which prompts it is given does not matter."""
    return trainer.step(SimpleNamespace(to=lambda device: SimpleNamespace(repeat=lambda k: None)))


def batch_of(
    roles: dict, rollout: Rollout, dialect: Dialect, *, pad: int, micro_batch_size: int = 8, kl_coef: float = 0.1
) -> TrainingBatch:
    """What a step would learn from these rows, at this KL coefficient."""
    trainer = untrained(roles, dialect, rollout, pad=pad, micro_batch_size=micro_batch_size)
    trainer.kl_controller.value = kl_coef
    return next_step(trainer).batch
