"""Rollouts from a plain copy of the actor: weights are gathered once per update, tokens cost no communication."""

from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler
from engine.whole_copies import Replicas
from engine.zero.engines import TrainedModel


class ReplicaRollouts:
    """Generates with a module without hooks, in the actor's dtype; at ZeRO stages 0 to 2 that is the actor's own.

    replicas: who lends the module; others may compute with it between two calls. decoding: as in Sampler.
    """

    why = ""  # what a choice among backends went by

    def __init__(
        self,
        actor: TrainedModel,
        tokenizer,
        rows_at_once: int | None = None,
        replicas: Replicas | None = None,
        decoding: str = "plain",
    ):
        self.actor, self.replicas = actor, replicas or Replicas()
        self.sampler = Sampler(tokenizer, rows_at_once, decoding=decoding)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks do not wait for each other."""
        model = self.replicas.of(self.actor).model
        learning = model.training
        model.eval()
        try:
            return self.sampler.responses(model, prompts, sampling)
        finally:
            model.train(learning)

    def release_memory(self) -> None:
        """Give back the memory that is not needed until the next call, as far as `replicas` is to."""
        if self.replicas.between_steps != "keep":
            self.sampler.release_memory()
        self.replicas.release_memory()
