"""How far a run of step 3 has come, and what follows from it: learning rates, and the keys of mini-batches."""

import math

from engine.algo.schedules import lr_factor
from engine.algorithms import Dialect


class Counters:
    """What a run counts; its checkpoints hold it.

    steps_done: PPO steps; the critic's pretraining counts from below up to 0.
    optimizer_steps: of the actor, and of a critic that learns with it.
    critic_optimizer_steps: of a critic that learns apart.
    samples: responses drawn, over all ranks. prompt_batches: batches of prompts taken from the feed.
    weights_are_whole: whether weights and counters are those after `steps_done` steps; not while a step changes them.

    Args:
        seed: of the mini-batches.
        total_steps: at whose end learning rates have fallen as far as they do. first_step: where the count begins.
    """

    def __init__(self, dialect: Dialect, seed: int, total_steps: int, first_step: int = 0):
        self.dialect, self.seed, self.total_steps, self.first_step = dialect, seed, total_steps, first_step
        self.steps_done = first_step
        self.optimizer_steps = self.critic_optimizer_steps = self.samples = self.prompt_batches = 0
        self.weights_are_whole = True

    @property
    def step(self) -> int:
        """The number of the step that is being made."""
        return self.steps_done + 1

    def begin_updates(self) -> None:
        """The optimizer steps of a step begin. A critic that learns apart leaves none out."""
        self.weights_are_whole = False
        self.critic_optimizer_steps = (self.steps_done - self.first_step) * math.prod(self.dialect.critic_passes)

    def end_updates(self) -> None:
        """They are over. Those that were left out count, so that learning rates fall as planned."""
        self.optimizer_steps = (self.step - self.first_step) * self.dialect.updates

    def end_step(self, samples: int, prompt_batches: int) -> None:
        """A step is over, for which so many responses to so many batches of prompts were drawn."""
        self.steps_done += 1
        self.samples += samples
        self.prompt_batches += prompt_batches
        self.weights_are_whole = True

    def key(self, epoch: int, *more: int) -> tuple[int, ...]:
        """What the mini-batches of this step's epoch are drawn from."""
        return self.seed, self.steps_done - self.first_step, epoch, *more

    @property
    def actor_lr(self) -> float:
        """The learning rate of the actor's next optimizer step."""
        return self.dialect.actor_lr * self._lr_factor(self.optimizer_steps, self.dialect.updates)

    @property
    def critic_lr(self) -> float:
        """The critic's."""
        if not self.dialect.critic_learns_apart:
            return self.dialect.critic_lr * self._lr_factor(self.optimizer_steps, self.dialect.updates)
        updates = math.prod(self.dialect.critic_passes)
        return self.dialect.critic_lr * self._lr_factor(self.critic_optimizer_steps, updates)

    def _lr_factor(self, optimizer_steps: int, updates: int) -> float:
        """Of a model that has made so many optimizer steps, of so many a step."""
        dialect, position = self.dialect, (self.steps_done - self.first_step, self.total_steps)
        if dialect.lr_per == "optimizer_step":
            position = optimizer_steps, self.total_steps * updates
        return lr_factor(*position, dialect.warmup_steps, dialect.lr_schedule, dialect.warmup_from_zero)

    def state_dict(self) -> dict:
        """What a checkpoint holds."""
        return {
            "steps_done": self.steps_done,
            "optimizer_steps": self.optimizer_steps,
            "samples": self.samples,
            "prompt_batches": self.prompt_batches,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self.steps_done, self.optimizer_steps = state["steps_done"], state["optimizer_steps"]
        self.samples, self.prompt_batches = state["samples"], state["prompt_batches"]
