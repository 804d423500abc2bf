"""The built-in backends: rollouts from a plain copy of the actor, and through its partitions."""

from collections.abc import Sequence
from functools import partial

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.models.backbone import Backbone
from engine.plain_copies import Model, PlainCopies
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler
from engine.whole_copies import WholeCopies


class _SampledRollouts(RolloutBackend):
    """What both have in common.

    copies: of the actor and other models, which compute with them between two calls; what becomes of them between
    steps, becomes of keys and values too. others: more copies, of other models alone.
    """

    computes_as_actor = True

    def __init__(self, actor: Model, copies: PlainCopies | None, sampler: Sampler, others: Sequence[PlainCopies] = ()):
        self.actor, self.copies, self.sampler, self.others = actor, copies or WholeCopies(), sampler, others
        for each in (self.copies, *others):
            each.let_go = self._let_go

    @property
    def decoding_ran(self) -> str:  # type: ignore[override]
        """As Sampler.decoding_ran."""
        return self.sampler.decoding_ran

    @property
    def fallback(self) -> str | None:  # type: ignore[override]
        """As Sampler.fallback."""
        return self.sampler.fallback

    def _responses(self, policy: Backbone, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        policy.take_role(None)  # whichever it computed as last
        return self.sampler.responses(policy.model, prompts, sampling, self.finished)

    def _let_go(self) -> None:
        self.sampler.release_memory()

    def release_memory(self) -> None:
        """Give back the memory that is not needed until the next call, as far as `copies` are to."""
        if self.copies.between_steps != "keep":
            self.sampler.release_memory()
        for copies in (self.copies, *self.others):
            copies.release_memory()


class ReplicaRollouts(_SampledRollouts):
    """Generates with a module without hooks, in the actor's dtype; at ZeRO stages 0 to 2 that is the actor's own.

    Weights are gathered once per update, tokens cost no communication. With tensor-parallel copies a group of ranks
    holds one module, decodes the rows of all of them, and sums what its parts compute, twice in each layer.

    decoding, row_length: as in Sampler. others: copies of other models, to be released with those of the actor.
    """

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
        group = None if copies is None else copies.group_of(actor)
        sampler = Sampler(tokenizer, rows_at_once, decoding=decoding, group=group, row_length=row_length)
        super().__init__(actor, copies, sampler, others)
        self.rows_at_once, self.copied = rows_at_once, True

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks wait for each other at the end, and for those of their group.

        Where a rank runs out of memory, all of them draw their responses again with less of it: random numbers have
        keys, so that they are the same. Where there is none for any copy, they are drawn through the partitions from
        then on.
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
        """Have a new sampler decode, as many rows at once as at the beginning. how: as in Sampler."""
        self.sampler = Sampler(self.sampler.tokenizer, self.rows_at_once, row_length=self.sampler.row_length, **how)


class Zero3Rollouts(_SampledRollouts):
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors whose weights fit no device.

    No second copy of the weights, but each token gathers every layer. copies, others: of other models.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: PlainCopies | None = None,
        others: Sequence[PlainCopies] = (),
    ):
        super().__init__(actor, copies, Sampler(tokenizer, rows_at_once, agree=distributed.largest), others)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        return self._responses(self.actor.module, prompts, sampling)
