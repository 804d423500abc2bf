"""Which models compute through whole copies of their weights, as memory allows: what `--rollout_backend auto` decides,
for models that are there and for models that are planned."""

from collections.abc import Sequence
from dataclasses import dataclass

# Of the free memory: for a copy of each model, for copies that models share, for shared ones given back in training.
OWN_SHARE, KEPT_SHARE, FREED_SHARE = 0.2, 0.4, 0.8


@dataclass(frozen=True, slots=True)
class CopyNeed:
    """What a whole copy of a model takes.

    stage: the ZeRO stage of its engine; at 0 to 2 its own module computes. kind: equal for models that can take turns
    in one copy. size: bytes of a copy. gradients: bytes of what comes with the first step, of which a rank has not
    taken the memory yet.
    """

    role: str
    stage: int
    kind: object
    size: int
    gradients: int = 0


@dataclass(frozen=True, slots=True)
class Copies:
    """Which models have one (their places in the list that was given), whether they share, what becomes of them between
    steps, and why."""

    models: tuple[int, ...]
    why: str
    shared: bool = True
    between_steps: str = "keep"


def copies_bytes(needs: Sequence[CopyNeed], shared: bool) -> int:
    """Memory on each rank for these models' copies."""
    sizes = {(need.kind if shared else number): need.size for number, need in enumerate(needs) if need.stage == 3}
    return sum(sizes.values())


def place_copies(needs: Sequence[CopyNeed], cache: int, free: int, between_steps: str) -> Copies:
    """Copies of as many models as fit. The first is the actor, which a copy helps most.

    cache: bytes of keys and values. free: bytes that are free on each rank, before keys, values and gradients come.
    between_steps: as in WholeCopies.
    """
    everyone, later = tuple(range(len(needs))), cache + sum(need.gradients for need in needs)
    if all(need.stage < 3 for need in needs):
        why = "no weights are partitioned, so the models' own modules compute"
        kept = between_steps
        if kept == "keep" and later > KEPT_SHARE * free:
            kept, why = "free", f"{why}; keys and values, {cache / 1e9:.2f} GB, are given back while training"
        return Copies(everyone, why, between_steps=kept)
    room = f"with keys, values and gradients, of {free / 1e9:.1f} GB free on each rank"
    fitting: tuple[int, ...] = ()
    for number in everyone:
        if copies_bytes([needs[place] for place in (*fitting, number)], shared=True) + later <= FREED_SHARE * free:
            fitting = (*fitting, number)
    copied = [needs[number] for number in fitting if needs[number].stage == 3]
    everything = f"{(copies_bytes(needs, shared=True) + later) / 1e9:.2f} GB"
    if not copied:
        return Copies(fitting, f"whole copies would take {everything} {room}", between_steps=between_steps)
    shared, kept, size, note = _kind(copied, later, free, between_steps)
    whose = "for models of one shape" if shared else "of each model"
    why = f"a whole copy {whose} takes {size / 1e9:.2f} GB {room}{note}"
    left = [need for number, need in enumerate(needs) if number not in fitting]
    if left:
        why += (
            f"; so it is with {_roles(copied)}, while {_roles(left)} compute through partitions: with all models it "
            f"would be {everything}"
        )
    return Copies(fitting, why, shared, kept)


def _kind(needs: Sequence[CopyNeed], later: int, free: int, between_steps: str) -> tuple[bool, str, int, str]:
    """The fastest kind of copies for which there is room: whether shared, what becomes of them between steps, the bytes
    that they take with `later`, and a note on them."""
    own, shared = (copies_bytes(needs, shared) + later for shared in (False, True))
    if own <= OWN_SHARE * free:
        return False, between_steps, own, ""
    if shared <= KEPT_SHARE * free:
        return True, between_steps, shared, ""
    given_back = "free" if between_steps == "keep" else between_steps
    return True, given_back, shared, ", and is given back while training"


def _roles(needs: Sequence[CopyNeed]) -> str:
    return " and ".join(need.role for need in needs)
