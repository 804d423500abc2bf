"""The rule of `--rollout_backend auto`, from sizes that are known when a run starts."""

from collections.abc import Mapping
from dataclasses import dataclass

# Fractions of the memory that is free when gradients and Adam's moments have been set aside. MOST: what the copy, keys
# and values may take; the rest is for activations, gathered layers and fragments. KEPT: what they may take to stay
# while models train.
KEPT, MOST = 0.6, 0.75


@dataclass(frozen=True, slots=True)
class Placement:
    """How the actor's copy is held. ranks: the number of ranks that hold it together. between_steps: as in ActorCopy.
    why: the reason, as a text. fits: whether there is memory for it."""

    ranks: int
    between_steps: str
    why: str
    fits: bool = True


def place_copy(
    copies: Mapping[int, int], cache: int, free: int, between_steps: str = "keep", states: int = 0
) -> Placement:
    """The copy that the fewest ranks hold together and that fits. It is freed between steps if it leaves too little to
    passes.

    copies: {number of ranks that hold a copy together: its bytes on each of them}; 0 bytes if weights are not
    partitioned. cache: the bytes of keys, values and states on a rank. free: the bytes that are free on each rank, less
    those of gradients and Adam's moments. states: the bytes of states within `cache`; each rank that holds a copy with
    others keeps the states of all their rows.
    """
    for ranks, copy in sorted(copies.items()):
        kept = copy + cache + states * (ranks - 1)
        what = "keys and values" if not copy else "a copy, keys and values"
        where = f" on {ranks} ranks" if ranks > 1 else ""
        why = f"{what}{where} take {kept / 1e9:.2f} of {free / 1e9:.1f} GB free beside gradients and moments"
        if not copy or kept <= MOST * free:
            given_back = between_steps == "keep" and kept > KEPT * free
            more = ", and are given back while training" if given_back else ""
            return Placement(ranks, "free" if given_back else between_steps, why + more)
    return Placement(ranks, "free", f"{why}, and may take {MOST:.0%} of that", fits=False)
