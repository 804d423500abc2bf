"""Rollouts from a plain copy of the actor: weights are gathered once per update, tokens cost no communication."""

from engine.experience import PromptBatch, Rollout
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler
from engine.whole_copies import Model, WholeCopies


class ReplicaRollouts(RolloutBackend):
    """Generates with a module without hooks, in the actor's dtype; at ZeRO stages 0 to 2 that is the actor's own.

    copies: what holds the module; others may compute with it between two calls. decoding: as in Sampler.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: WholeCopies | None = None,
        decoding: str = "plain",
    ):
        self.actor, self.copies = actor, copies or WholeCopies()
        self.sampler = Sampler(tokenizer, rows_at_once, decoding=decoding)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks do not wait for each other."""
        return self.sampler.responses(self.copies.of(self.actor).model, prompts, sampling)

    def release_memory(self) -> None:
        """Give back the memory that is not needed until the next call, as far as `copies` are to."""
        if self.copies.between_steps != "keep":
            self.sampler.release_memory()
        self.copies.release_memory()
