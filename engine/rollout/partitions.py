"""Rollouts through the partitioned engine itself: no second copy of the weights, but each token gathers every layer."""

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler
from engine.whole_copies import Model, WholeCopies


class Zero3Rollouts(RolloutBackend):
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors whose weights fit no device.

    copies: through which other models compute; what becomes of them between steps, becomes of keys and values too.
    """

    def __init__(self, actor: Model, tokenizer, rows_at_once: int | None = None, copies: WholeCopies | None = None):
        self.actor, self.copies = actor, copies or WholeCopies()
        self.sampler = Sampler(tokenizer, rows_at_once, agree=distributed.largest)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        return self.sampler.responses(self.actor.module.model, prompts, sampling)

    def release_memory(self) -> None:
        """Give back the memory that is not needed until the next call, as far as `copies` are to."""
        if self.copies.between_steps != "keep":
            self.sampler.release_memory()
        self.copies.release_memory()
