"""How engines come by their weights, as a memory plan has it: what ranks exchange in a step follows from that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.memory.copies import Copies, CopyNeed
from engine.memory.zero_memory import REDUCED_AT_ONCE, ZeroMemory
from engine.zero.long_batch import NOTHING_KEPT, Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One engine.

    stage: of ZeRO. numbers: of all parameters; trains: of those that train; width: bytes of one. units: numbers of what
    is gathered in one piece. bucket: numbers of gradients that are reduced at once. generates, computes: whether
    responses are drawn, and experience is made, with whole weights. shared: whether other models fill the same copy.
    lent: whether training takes a copy's weights. kept: what stays whole over the passes of an optimizer step.
    """

    stage: int
    numbers: int
    trains: int
    width: int
    units: tuple[int, ...]
    bucket: int
    generates: bool = False
    computes: bool = False
    shared: bool = False
    lent: bool = False
    kept: Kept = NOTHING_KEPT

    @classmethod
    def of(cls, engine: ZeroMemory, **how) -> "EnginePlan":
        """That of an engine; how: what it does not decide by itself."""
        model = engine.model
        return cls(
            stage=engine.stage,
            numbers=model.numbers,
            trains=model.trains,
            width=model.width,
            units=tuple(model.units),
            bucket=REDUCED_AT_ONCE if engine.stage == 0 else engine.zero.reduce_bucket_size,
            **how,
        )


def engine_plans(
    engines: Mapping[str, ZeroMemory],
    needs: Sequence[CopyNeed],
    copies: Copies,
    kept: Mapping[str, Kept],
    copied: Callable[[str, bool], bool],
    lent: Callable[[str], bool],
) -> dict[str, EnginePlan]:
    """Those of all engines, by role. needs: of the engines, in their order. copied: whether a role computes with whole
    weights, or (True) generates so."""
    kinds = [needs[place].kind for place in (*copies.models, *copies.divided)]
    return {
        role: EnginePlan.of(
            engine,
            generates=role == "actor" and copied(role, True),
            computes=copied(role, False),
            shared=copies.shared and kinds.count(needs[place].kind) > 1,
            lent=lent(role),
            kept=kept.get(role, NOTHING_KEPT),
        )
        for place, (role, engine) in enumerate(engines.items())
    }
