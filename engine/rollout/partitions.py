"""Rollouts through the partitioned engine itself: no second copy of the weights, but each token gathers every layer."""

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler
from engine.zero.engines import TrainedModel


class Zero3Rollouts:
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors that fit no device as a whole.

    between_steps: "keep" the memory of keys and values, or give it back ("free", "host").
    """

    why = ""  # what a choice among backends went by

    def __init__(self, actor: TrainedModel, tokenizer, rows_at_once: int | None = None, between_steps: str = "keep"):
        self.actor, self.between_steps = actor, between_steps
        self.sampler = Sampler(tokenizer, rows_at_once, agree=distributed.largest)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        learning = self.actor.engine.training
        self.actor.engine.eval()
        try:
            return self.sampler.responses(self.actor.module.model, prompts, sampling)
        finally:
            self.actor.engine.train(learning)

    def release_memory(self) -> None:
        """Give back the memory that is not needed until the next call, if it is to be."""
        if self.between_steps != "keep":
            self.sampler.release_memory()
