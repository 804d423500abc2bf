"""The built-in backends: rollouts from a plain copy of the actor, and through its partitions."""

from collections.abc import Sequence

from engine import distributed
from engine.experience import PromptBatch, Rollout
from engine.models.backbone import Backbone
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.decode import Sampler
from engine.tensor_parallel_copies import TensorParallelCopies
from engine.whole_copies import Model, WholeCopies

Copies = WholeCopies | TensorParallelCopies


class _SampledRollouts(RolloutBackend):
    """What both have in common.

    copies: of the actor and other models, which compute with them between two calls; what becomes of them between
    steps, becomes of keys and values too. others: more copies, of other models alone.
    """

    computes_as_actor = True

    def __init__(self, actor: Model, copies: Copies | None, sampler: Sampler, others: Sequence[Copies] = ()):
        self.actor, self.copies, self.sampler, self.others = actor, copies or WholeCopies(), sampler, others

    def _responses(self, policy: Backbone, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        policy.take_role(None)  # whichever it computed as last
        return self.sampler.responses(policy.model, prompts, sampling)

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

    decoding: as in Sampler. others: copies of other models, to be released with those of the actor.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: Copies | None = None,
        decoding: str = "plain",
        others: Sequence[Copies] = (),
    ):
        group = copies.group if isinstance(copies, TensorParallelCopies) else None
        super().__init__(actor, copies, Sampler(tokenizer, rows_at_once, decoding=decoding, group=group), others)
        self.rows_at_once, self.copied = rows_at_once, True

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks do not wait for each other, but for those of their group.

        Where there turns out to be no memory for the copy, responses are drawn through the partitions from then on.
        """
        policy = self.copies.of(self.actor, merged=True) if self.copied else None
        if policy is None and self.copied:
            self.copied, self.actor.copies = False, None
            self.sampler = Sampler(self.sampler.tokenizer, self.rows_at_once, agree=distributed.largest)
        return self._responses(self.actor.module if policy is None else policy, prompts, sampling)


class Zero3Rollouts(_SampledRollouts):
    """Generates with the actor's own module, under ZeRO's hooks. Slow; for actors whose weights fit no device.

    No second copy of the weights, but each token gathers every layer. copies, others: of other models.
    """

    def __init__(
        self,
        actor: Model,
        tokenizer,
        rows_at_once: int | None = None,
        copies: Copies | None = None,
        *others: Copies,
    ):
        super().__init__(actor, copies, Sampler(tokenizer, rows_at_once, agree=distributed.largest), others)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One response for each row; ranks go on together until the last row of all has ended."""
        return self._responses(self.actor.module, prompts, sampling)
