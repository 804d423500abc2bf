"""How engines come by their weights, as a memory plan has it: what ranks exchange in a step follows from that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.memory.copies import Copies, CopyNeed
from engine.memory.zero_memory import REDUCED_AT_ONCE, ZeroMemory
from engine.zero.long_batch import NOTHING_KEPT, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine.

    stage: of ZeRO. numbers: of all parameters; trains: of those that train; width: bytes of one. bucket: numbers of
    gradients that are reduced at once. unmerged: numbers that a whole copy gets anew once it has had an adapter merged
    (`Blueprint.unmerged`); 0 without adapters. hpz: ranks of a group that holds the weights a second time; 1 for none.
    shared: whether other models fill the same copy. kept: what stays whole over the passes of an optimizer step.
    """

    stage: int
    numbers: int
    trains: int
    width: int
    bucket: int
    unmerged: int = 0
    hpz: int = 1
    shared: bool = False
    kept: Kept = NOTHING_KEPT

    @classmethod
    def of(cls, engine: ZeroMemory, shared: bool = False, kept: Kept = NOTHING_KEPT) -> "EnginePlan":
        """That of an engine; shared, kept: what it does not decide by itself."""
        model, partitioned = engine.model, engine.stage == 3
        return cls(
            stage=engine.stage,
            numbers=model.numbers,
            trains=model.trains,
            width=model.width,
            bucket=REDUCED_AT_ONCE if engine.stage == 0 else engine.zero.reduce_bucket_size,
            unmerged=model.unmerged if model.module.adapters is not None else 0,
            hpz=min(int(engine.zero.zero_hpz_partition_size), engine.world) if partitioned else 1,
            shared=shared,
            kept=kept,
        )


def engine_plans(
    engines: Mapping[str, ZeroMemory], needs: Sequence[CopyNeed], copies: Copies, kept: Mapping[str, Kept]
) -> dict[str, EnginePlan]:
    """Those of all engines, by role. needs: of the engines, in their order."""
    kinds = [needs[place].kind for place in (*copies.models, *copies.divided)]
    return {
        role: EnginePlan.of(
            engine,
            shared=copies.shared and kinds.count(needs[place].kind) > 1,
            kept=kept.get(role, NOTHING_KEPT),
        )
        for place, (role, engine) in enumerate(engines.items())
    }
