"""The built-in rollout backends. One generates with a copy of the actor without ZeRO's hooks, the other with the
actor's own module, whose weights ZeRO stage 3 has partitioned."""

from engine import distributed
from engine.actor_copy import ActorCopy, Model
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler


class ReplicaRollouts(RolloutBackend):
    """Generates with a module without ZeRO's hooks, in the actor's dtype. At ZeRO stage 3 this module is a copy of the
    actor; at stages 0 to 2 it is the actor's own module.

    Weights are gathered once after each update, and generating a token needs no communication. If a group of ranks
    holds one copy together, it decodes the rows of all its ranks, and sums partial results twice in each layer.

    Between steps, keys and values are kept or freed like the copy. rows_at_once, decoding, row_length: as in Sampler.
    """

    computes_as_actor = True

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copy: ActorCopy | None = None,
        decoding: str = "plain",
        row_length: int = 0,
    ):
        self.actor, self.copy = actor, copy or ActorCopy(actor)
        self.sampler = Sampler(tokenizer, rows_at_once, decoding=decoding, group=self.copy.group, row_length=row_length)

    @property
    def decoding_ran(self) -> str:  # type: ignore[override]
        """As Sampler.decoding_ran."""
        return self.sampler.decoding_ran

    @property
    def fallback(self) -> str | None:  # type: ignore[override]
        """As Sampler.fallback."""
        return self.sampler.fallback

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row of the prompts. The ranks of a group, which hold a copy together, wait for each
        other at every token."""
        policy = self.copy.module()
        policy.select_role(None)  # the actor's own module may last have computed as another role
        return self.sampler.responses(policy.model, prompts, sampling, self.finished)

    def release_memory(self) -> None:
        """Free the memory that is not needed until the next call of `generate`, according to `between_steps` of the
        copy."""
        if self.copy.between_steps != "keep":
            self.sampler.release_memory()
        self.copy.release_memory()


class Zero3Rollouts(RolloutBackend):
    """Generates with the actor's own module, under ZeRO's hooks. This is slow; it is meant for actors whose weights do
    not fit on one device.

    It needs no second copy of the weights. But every layer is gathered for each token, and all ranks continue until the
    last row of every rank has ended.
    """

    computes_as_actor = True

    def __init__(self, actor: Model, tokenizer, rows_at_once: int | None = None):
        self.actor, self.sampler = actor, Sampler(tokenizer, rows_at_once, agree=distributed.largest)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row of the prompts (all ranks call this together)."""
        self.actor.module.select_role(None)
        return self.sampler.responses(self.actor.module.model, prompts, sampling, self.finished)
