"""The rule of `--rollout_backend auto`, from sizes that are known when a run starts."""

from collections.abc import Mapping
from dataclasses import dataclass

# Fractions of the memory that is free when gradients and Adam's moments have been set aside. KEPT: what the copy, keys
# and values may take to stay while models train. MOST: what they may take to be made at all.
KEPT, MOST = 0.7, 0.9


@dataclass(frozen=True, slots=True)
class Placing:
    """backend: "replica" or "zero3". between_steps: as in ActorCopy. why: the reason, as a text. ranks: the number of
    ranks that hold the actor's copy together."""

    backend: str
    between_steps: str
    why: str
    ranks: int = 1


def placed(copies: Mapping[int, int], cache: int, free: int, between_steps: str = "keep") -> Placing:
    """Where responses are drawn: with the copy that the fewest ranks hold together and that fits.

    copies: {number of ranks that hold a copy together: its bytes on each of them}; 0 bytes if weights are not
    partitioned. cache: the bytes of keys and values on a rank. free: the bytes that are free on each rank, less those
    of gradients and Adam's moments.
    """
    sizes = ""
    for ranks, copy in sorted(copies.items()):
        sizes = f"{(copy + cache) / 1e9:.2f} of {free / 1e9:.1f} GB free beside gradients and moments"
        if copy + cache > MOST * free and copy:
            continue
        what = f"a copy on {ranks} ranks, keys and values" if ranks > 1 else "a copy, keys and values"
        why = f"{what if copy else 'keys and values'} take {sizes}"
        if between_steps == "keep" and copy + cache > KEPT * free:
            return Placing("replica", "free", f"{why}, and are given back while training", ranks)
        return Placing("replica", between_steps, why, ranks)
    return Placing("zero3", between_steps, f"a copy, keys and values would take {sizes} (--inference_tp_size)")
