"""The built-in rollout backends. One generates with a copy of the actor without ZeRO's hooks, the other with the
actor's own module, whose weights ZeRO stage 3 has partitioned."""

from collections.abc import Sequence
from functools import partial

from engine import distributed
from engine.copies import Model, PlainCopies, WholeCopies
from engine.experience import PromptBatch, Rollout
from engine.models.policy import Backbone
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler


class ReplicaRollouts(RolloutBackend):
    """Generates with a module without ZeRO's hooks, in the actor's dtype. At ZeRO stage 3 this module is a copy of the
    actor; at stages 0 to 2 it is the actor's own module.

    Weights are gathered once after each update, and generating a token needs no communication. With tensor-parallel
    copies a group of ranks holds one module together, decodes the rows of all its ranks, and sums partial results twice
    in each layer.

    copies: copies of the actor, and of other models that compute between two calls of `generate`. Between steps, keys
    and values are kept or freed like these copies. others: copies of other models only. They are released when the
    actor's copies are released.
    rows_at_once, decoding, row_length: as in Sampler.
    """

    computes_as_actor = True

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: PlainCopies | None = None,
        decoding: str = "plain",
        others: Sequence[PlainCopies] = (),
        row_length: int = 0,
    ):
        self.actor, self.tokenizer, self.copies, self.others = actor, tokenizer, copies or WholeCopies(), others
        self.rows_at_once, self.row_length = rows_at_once, row_length
        self.copied = True
        """Whether the actor generates with a copy, and not through its partitions."""
        self._decode(decoding=decoding, group=self.copies.group_of(actor))
        for each in (self.copies, *others):
            each.let_go = lambda: self.sampler.release_memory()

    @property
    def decoding_ran(self) -> str:  # type: ignore[override]
        """As Sampler.decoding_ran."""
        return self.sampler.decoding_ran

    @property
    def fallback(self) -> str | None:  # type: ignore[override]
        """As Sampler.fallback."""
        return self.sampler.fallback

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row of the prompts. All ranks wait for each other at the end of this call. The ranks of
        a group, which hold a copy together, wait for each other at every token.

        If a rank runs out of memory, all ranks draw their responses again in a way that takes less memory. Random
        numbers are keyed, so the responses are the same. If no copy fits, responses are drawn with the actor's
        partitioned module from then on.
        """
        while self.copied:
            policy = self.copies.of(self.actor, merged=True)
            if policy is None:
                self.copied, self.actor.copies = False, None
                self._decode(agree=distributed.largest)
                break
            group = self.copies.group_of(self.actor)
            if group is not None and group.size != self.sampler.group.size:
                self._decode(group=group)
            draw = partial(self._responses, policy, prompts, sampling)
            rollout = self.copies.attempt(self.actor, "responses were drawn with it", draw)
            if rollout is not None:
                return rollout
            del policy, draw  # before another copy is made
            self._decode(decoding=self.sampler.decoding)
        return self._responses(self.actor.module, prompts, sampling)

    def _decode(self, **how) -> None:
        """Make a new sampler, with as many rows at once as at the beginning. how: as in Sampler."""
        self.sampler = Sampler(self.tokenizer, self.rows_at_once, row_length=self.row_length, **how)

    def _responses(self, policy: Backbone, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        policy.take_role(None)  # the module may last have computed as another role
        return self.sampler.responses(policy.model, prompts, sampling, self.finished)

    def release_memory(self) -> None:
        """Free the memory that is not needed until the next call of `generate`, according to `between_steps` of the
        copies."""
        if self.copies.between_steps != "keep":
            self.sampler.release_memory()
        for copies in (self.copies, *self.others):
            copies.release_memory()


class Zero3Rollouts(ReplicaRollouts):
    """Generates with the actor's own module, under ZeRO's hooks. This is slow; it is meant for actors whose weights do
    not fit on one device.

    It needs no second copy of the weights. But every layer is gathered for each token, and all ranks continue until the
    last row of every rank has ended. copies, others: copies of other models.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: PlainCopies | None = None,
        others: Sequence[PlainCopies] = (),
    ):
        super().__init__(actor, tokenizer, rows_at_once, copies, others=others)
        self.copied = False
        self._decode(agree=distributed.largest)
