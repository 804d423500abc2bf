"""Decides which models compute with copies of their weights, as far as memory allows. A copy is a module without ZeRO's
hooks that is whole on each rank, or divided among a few ranks. `--rollout_backend auto` and the memory plan both use
this file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

# Fractions of the free memory. OWN_SHARE: for separate copies of all models. FREED_SHARE: for copies that models share.
# TRAINING_SHARE: for training together with everything that is kept during it. KEPT_SHARE: for everything that is kept
# during training, if it is not known how much training needs.
OWN_SHARE, FREED_SHARE, TRAINING_SHARE, KEPT_SHARE = 0.2, 0.8, 0.9, 0.4
UNPLANNED = "what training takes is not known"
"""The reason, for messages, why a run without a memory plan keeps less. Runs on CPUs have no memory plan, because the
models would have to be traced for it, which takes seconds."""


@dataclass(frozen=True, slots=True)
class CopyNeed:
    """The memory that a copy of a model takes.

    stage: the ZeRO stage of the model's engine; at stages 0 to 2 the model's own module computes.
    kind: a value to compare; models with equal values can use the same copy, one after the other.
    size: the number of bytes of a whole copy.
    gradients: the number of bytes that the first optimizer step will allocate on a rank.
    divided: {number of ranks that hold a copy together: bytes on each of them}.
    obstacle: the reason why the model can have no divided copy, or None.
    """

    role: str
    stage: int
    kind: object
    size: int
    gradients: int = 0
    divided: Mapping[int, int] = field(default_factory=dict)
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Copies:
    """The decision about copies: which models have a whole copy (by their index in the given list), whether models
    share copies, what happens to copies, keys and values between steps, and the reason.

    divided: the models whose copies are divided among groups of `ranks` ranks.
    freed: the models whose copies are freed between steps, while the actor's copy is kept.
    """

    models: tuple[int, ...]
    why: str
    shared: bool = True
    between_steps: str = "keep"
    divided: tuple[int, ...] = ()
    ranks: int = 1
    freed: tuple[int, ...] = ()

    def kept(self, place: int) -> bool:
        """Whether the model with this index keeps its copy, if it has one, between steps."""
        return self.between_steps == "keep" and place not in self.freed


def copies_bytes(needs: Sequence[CopyNeed], shared: bool, ranks: int = 1) -> int:
    """The number of bytes that copies of these models take on each rank, if `ranks` ranks hold each copy together.
    shared: whether models share copies."""
    partitioned = [(number, need) for number, need in enumerate(needs) if need.stage == 3]
    sizes = {
        (need.kind if shared else number): need.divided[ranks] if ranks > 1 else need.size
        for number, need in partitioned
    }
    return sum(sizes.values())


# A function from a model's index in the list to its `CopyNeed.divided` and `CopyNeed.obstacle`.
Divide = Callable[[int], tuple[Mapping[int, int], str | None]]


def place_copies(
    needs: Sequence[CopyNeed],
    cache: int,
    free: int,
    between_steps: str,
    divide: Divide | None = None,
    training: int | str = UNPLANNED,
) -> Copies:
    """Decide which models get copies; as many as possible get one. If there is no room for a whole copy of a model, the
    model gets a copy that as few ranks as possible hold together. The first model is the actor, which gains most from a
    copy. Between steps all copies, keys and values are kept if training leaves room for them. If not everything can be
    kept, keys, values and the actor's copy are kept if they fit, because captured passes need them to stay at the same
    place in memory.

    cache: the number of bytes of keys and values. free: the number of bytes that are free on each rank before keys,
    values and gradients are allocated. between_steps: as in WholeCopies. divide: a function that is called only if not
    all models can have a whole copy. training: how many of the `free` bytes training takes at its peak, not counting
    copies, keys and values; or a text that says why this number is not known.
    """
    later = cache + sum(need.gradients for need in needs)
    if isinstance(training, str):
        most, reason = KEPT_SHARE * free - later, f"{training}, so no more than {KEPT_SHARE} of the free may stay"
    else:
        most = TRAINING_SHARE * free - training - cache
        reason = f"training takes {training / 1e9:.1f} of {free / 1e9:.1f} GB free"
    without, no_room = between_steps, ""  # the result if there are no copies
    if between_steps == "keep" and most < 0:
        without, no_room = "free", f"; keys and values, {cache / 1e9:.2f} GB, are given back while training: {reason}"
    if all(need.stage < 3 for need in needs):
        why = f"no weights are partitioned, so the models' own modules compute{no_room}"
        return Copies(tuple(range(len(needs))), why, between_steps=without)
    room = f"with keys, values and gradients, of {free / 1e9:.1f} GB free on each rank"
    fits = max(FREED_SHARE * free - later, most)
    if divide is not None and copies_bytes(needs, shared=True) > fits:
        asked = [divide(number) if need.stage == 3 else ({}, None) for number, need in enumerate(needs)]
        needs = [replace(need, divided=parts, obstacle=why) for need, (parts, why) in zip(needs, asked, strict=True)]
    whole, divided, ranks = _fitting(needs, fits)
    copied, parts = [needs[number] for number in whole if needs[number].stage == 3], [needs[n] for n in divided]
    everything = f"{(copies_bytes(needs, shared=True) + later) / 1e9:.2f} GB"
    left = [need for number, need in enumerate(needs) if number not in (*whole, *divided)]
    obstacles = "".join(
        f"; no group of ranks can hold the {need.role}: {need.obstacle}" for need in left if need.obstacle
    )
    if not copied and not parts:
        return Copies(whole, f"whole copies would take {everything} {room}{obstacles}{no_room}", between_steps=without)
    together = copies_bytes(parts, True, ranks)
    own, size = (copies_bytes(copied, shared) + together for shared in (False, True))
    shared = bool(parts) or own > min(OWN_SHARE * free - later, most)
    size = size if shared else own
    freed: tuple[int, ...] = ()
    note = ""
    if between_steps == "keep" and size > most:
        between_steps, freed = _given_back(needs, whole, divided, most)
        whose = "but for the actor's is" if freed else "is"
        note = f", and {whose} given back while training: {reason}"
    whose = "for models of one shape" if shared else "of each model"
    if parts and copied:
        whose += f", and one of {_roles(parts)} that {ranks} ranks hold together,"
    held = f"a copy of {_roles(parts)} that {ranks} ranks hold together" if not copied else f"a whole copy {whose}"
    why = f"{held} takes {(size + later) / 1e9:.2f} GB {room}{note}"
    if left:
        why += f"; so it is with {_roles([*parts, *copied])}, while {_roles(left)} compute through partitions"
    if left or parts:
        why += (
            f"{':' if left else ';'} with {'all models' if left else 'whole ones'} it would be {everything}{obstacles}"
        )
    return Copies(whole, why, shared, between_steps, divided, ranks, freed)


def copies_together(needs: Sequence[CopyNeed], ranks: int, between_steps: str, divide: Divide) -> Copies:
    """Divide the copies of all models among groups of `ranks` ranks; returns this decision. Models that cannot be
    divided among this number of ranks get whole copies."""
    whole: list[int] = []
    divided: list[int] = []
    obstacles = ""
    for place, need in enumerate(needs):
        parts, obstacle = divide(place) if need.stage == 3 else ({}, None)
        (divided if ranks in parts else whole).append(place)
        if obstacle is not None:
            obstacles += f"; each rank has a whole copy of the {need.role}: {obstacle}"
    why = f"as asked; {ranks} ranks hold a copy together" if divided else "as asked"
    return Copies(tuple(whole), why + obstacles, True, between_steps, tuple(divided), ranks)


def _given_back(
    needs: Sequence[CopyNeed], whole: tuple[int, ...], divided: tuple[int, ...], most: float
) -> tuple[str, tuple[int, ...]]:
    """The values of (`Copies.between_steps`, `Copies.freed`) for the case that not all copies can be kept between
    steps. most: the number of bytes of copies that can be kept."""
    others = tuple(n for n in (*whole, *divided) if needs[n].stage == 3 and needs[n].kind != needs[0].kind)
    if 0 in whole and others and copies_bytes(needs[:1], shared=True) <= most:
        return "keep", others
    return "free", ()


def _fitting(needs: Sequence[CopyNeed], room: float) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(the models with a whole copy, the models with a divided copy, the number of ranks that hold a divided copy). All
    these copies together fit into `room` bytes.

    The actor's copy has priority. After that, as many models as possible get copies, and as few ranks as possible hold
    a copy together.
    """

    def of_groups(ranks: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        whole: tuple[int, ...] = ()
        divided: tuple[int, ...] = ()

        def size(whole: tuple[int, ...], divided: tuple[int, ...]) -> int:
            first, second = ([needs[number] for number in numbers] for numbers in (whole, divided))
            return copies_bytes(first, shared=True) + copies_bytes(second, True, ranks)

        for number, need in enumerate(needs):
            if size((*whole, number), divided) <= room:
                whole = (*whole, number)
            elif ranks in need.divided and size(whole, (*divided, number)) <= room:
                divided = (*divided, number)
        return whole, divided, ranks

    ways = [of_groups(ranks) for ranks in (1, *sorted({ranks for need in needs for ranks in need.divided}))]
    return max(ways, key=lambda way: (0 in way[0] + way[1], len(way[0] + way[1])))  # the first of the best


def _roles(needs: Sequence[CopyNeed]) -> str:
    return " and ".join(need.role for need in needs)
