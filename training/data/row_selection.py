"""Chooses the rows that a step trains on and the rows that are held out. A row is a record's checked texts.

    rows, held_out = load_rows(["Dahoas/rm-static", "own.jsonl"], PAIRS, tokenizer, phase=2, seed=1234,
                               weights=[1, 0.5], split="2,4,4", held_out=0.05)

Data sets are opened and divided among the steps. Then rows are held out, and the remaining rows are repeated by their
weights and concatenated. Rows are chosen by their numbers, before they are read, and the choice depends only on the
seed; therefore all ranks choose the same rows. A row is read and checked when it is used. Rows that will be dropped for
their length cannot be held out: rows are tried in a random order until enough are held out, so that few rows are
tokenised twice.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from engine.errors import UserError
from training.data.files import Records
from training.data.record_forms import Form, alternatives
from training.data.sources import Source, open_source
from training.data.token_cache import Progress, handed_over, say

PLACE = np.int32  # a place takes eight bytes; each rank holds the places of all rows, maybe tens of millions
EMPTY = np.empty((0, 2), PLACE)  # no places
HASHED = 100_000  # number of rows that are hashed at once
# purposes of a draw, parts of its seed: draws for different purposes are independent
DIVIDE = 1
DRAW = 2
LIMIT = 3


@dataclass(frozen=True, slots=True, eq=False)
class Rows(Sequence):
    """Rows of one form, each a dict of texts.

    places: (n, 2) int32; for each row, where its record is: (index of the file or split in `records`, number of the
    record in that file or split).
    """

    records: list[Records]
    places: np.ndarray
    form: Form
    tokenizer: object

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int | slice) -> "dict | Rows":
        """A row, or a part of the rows; raises UserError for a record that the form cannot read."""
        if isinstance(index, slice):
            return replace(self, places=self.places[index])
        part, number = self.places[index].tolist()
        where, record = self.records[part][number]
        return self.form.row(where, record, self.tokenizer)

    def __iter__(self):  # Sequence's own would take any IndexError for the end
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """The place of a row's record, in words: "pairs.jsonl, line 3"."""
        part, number = self.places[index].tolist()
        return self.records[part][number][0]

    @property
    def fingerprint(self) -> str:
        """A hash of the records, the form and the choice of rows; the tokenizer is not part of the hash."""
        parts = [self.form.name, *(records.fingerprint for records in self.records)]
        total = hashlib.sha256("\n".join(parts).encode() + b"\n")
        for start in range(0, len(self.places), HASHED):
            total.update(self.places[start : start + HASHED].astype(np.int64).tobytes())
        return total.hexdigest()


@handed_over
def load_rows(
    data_path: str | Sequence[str],
    form: Form,
    tokenizer,
    *,
    phase: int,
    seed: int,
    weights: Sequence[float] | None = None,
    split: str | None = None,
    eval_data_path: str | Sequence[str] | None = None,
    held_out: float = 0.0,
    eval_limit: int | None = None,
    held_out_flag: str = "--held_out",
    keeps: Callable[[dict], bool] | None = None,
    undivided: Sequence[str] = (),
    config_name: str | None = None,
) -> tuple[Rows, Rows]:
    """(training rows, held-out rows) of the data sets. The two have no row in common.

    The held-out rows are the rows of eval_data_path. Without eval_data_path, they are the held-out splits of the data
    sets; `held_out` of the rows are drawn from all data sets that have no such split.

    Args:
        tokenizer: the tokenizer whose chat template turns messages into texts.
        phase: number of the training step (1, 2 or 3) that reads the rows.
        split: shares of the three steps, such as "2,4,4"; only the rows of step `phase` are read. Without `split` all
            rows are read.
        weights: how often the rows of each data set are seen in one epoch. With 1.5, half of the rows, drawn with the
            seed, are seen twice, and the others once.
        held_out: a fraction of the rows if below 1, otherwise a number of rows; 0 for none.
        eval_limit: the largest number of held-out rows; if there are more, this many are drawn with the seed.
        keeps: held-out row -> whether it is kept; False for a row that is too long, for example. Rows that are not kept
            are not held out. By default all rows are kept.
        held_out_flag: the name of `held_out` in messages.
        undivided: further data sets, which `split` does not divide.
        config_name: the configuration to read of each data set in data_path that is on the Hub.

    Raises: UserError for data sets that cannot be read, and for flags that leave no rows.
    """
    divided, eval_paths = listed(data_path), listed(eval_data_path)
    proportions = parse_split(split)
    factors = [*checked_weights(weights, divided), *[1.0] * len(undivided)]
    paths = [*divided, *undivided]
    sources = [_opened(path, form, config_name) for path in paths]
    _refuse_twice(sources)
    mixture = _Mixture(form, tokenizer, seed, proportions, phase)

    def kept(place: np.ndarray) -> bool:
        return keeps is None or keeps(mixture.rows([place[None]])[0])

    parts = [
        mixture.add(source.training, source.name, divide=number < len(divided)) for number, source in enumerate(sources)
    ]
    if keeps is not None:
        for part in parts:
            mixture.rows([part[:1]])[0]  # if all records are wrong, the message names the first one
    if eval_paths:
        eval_sources = [_opened(path, form, held_out=True) for path in eval_paths]
        _refuse_trained_on(sources, eval_sources)
        apart = [mixture.add(source.held_out or source.training, source.name, divide=False) for source in eval_sources]
    elif held_out:
        _refuse_trained_on(sources, [source for source in sources if source.held_out])
        apart = [
            mixture.add(source.held_out, source.name, divide=number < len(divided))
            for number, source in enumerate(sources)
            if source.held_out
        ]
        own = [number for number, source in enumerate(sources) if not source.held_out]
        what = f"--data_path {' '.join(paths)}, {held_out_flag}"
        advice = f"Lower {held_out_flag}, give --eval_data_path, or add rows."
        apart += [hold_out(parts, own, held_out, seed, kept, what, advice)] if own else []
    else:
        apart = []
    training = [weighted(part, factor, seed, path) for part, factor, path in zip(parts, factors, paths)]
    return mixture.rows(training), mixture.rows([limited(_joined(apart), eval_limit, seed, kept)])


def listed(paths: str | Sequence[str] | None) -> list[str]:
    """One path, several or none, as a list."""
    return [paths] if isinstance(paths, str) else list(paths or [])


def _opened(path: str, form: Form, config_name: str | None = None, held_out: bool = False) -> Source:
    """The data set, which has rows to train on, or to hold out if held_out is True. Prints what is not trained on."""
    source = open_source(path, config_name)
    if not held_out and source.held_out and not source.training:
        raise UserError(f"{source.note} There is nothing else in it.")
    if not sum(map(len, (held_out and source.held_out) or source.training)):
        raise UserError(f"{path}: found no records; it needs at least one with {alternatives(form.columns)}.")
    if source.note and not held_out:
        say(source.note)
    return source


class _Mixture:
    """The records of all data sets of a run, and the choice of this step's records."""

    def __init__(self, form: Form, tokenizer, seed: int, proportions: list[float] | None, phase: int):
        self.form = form
        self.tokenizer = tokenizer
        self.seed = seed
        self.proportions = proportions
        self.phase = phase
        self.records = []

    def add(self, records: list[Records], name: str, divide: bool) -> np.ndarray:
        """Add a data set; returns the places of its records (n, 2), as in `Rows.places`. divide: whether only this
        step's part of the records is taken."""
        first = len(self.records)
        self.records.extend(records)
        numbered = enumerate(map(len, records), start=first)
        places = _joined([_numbered(number, count) for number, count in numbered])
        if not divide or self.proportions is None:
            return places
        part = places[split_part(len(places), self.proportions, self.phase, self.seed)]
        if not len(part):
            shares = ",".join(f"{share:g}" for share in self.proportions)
            raise UserError(
                f"--data_split {shares}: of the {len(places)} rows of {name}, none is left for step "
                f"{self.phase}. Give it a larger share."
            )
        return part

    def rows(self, parts: list[np.ndarray]) -> Rows:
        """The rows at these places."""
        return Rows(self.records, _joined(parts), self.form, self.tokenizer)


def _numbered(part: int, count: int) -> np.ndarray:
    """The places of all `count` records of file or split number `part`."""
    places = np.empty((count, 2), PLACE)
    places[:, 0], places[:, 1] = part, np.arange(count, dtype=PLACE)
    return places


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate([EMPTY, *parts])


def _refuse_twice(sources: list[Source]) -> None:
    """Raise UserError if two data sets have the same records: rows that are held out from one would be trained on in
    the other."""
    seen: dict[str, tuple[Source, Records]] = {}
    for source in sources:
        for records in filter(len, source.training):
            first, same = seen.setdefault(records.fingerprint, (source, records))
            if first is not source:
                raise UserError(
                    f"--data_path: {source.name} holds the same records as {first.name}. Give "
                    "it once, with --data_weights if it is to be seen more often."
                )
            if same is not records:
                raise UserError(
                    f"--data_path: {source.name} holds the same records twice, from {same[0][0]} and from "
                    f"{records[0][0]} on: what is held out of one would be trained on in the other. Take one out."
                )


def _refuse_trained_on(sources: list[Source], eval_sources: list[Source]) -> None:
    trained = {records.fingerprint for source in sources for records in source.training}
    for source in eval_sources:
        if any(records.fingerprint in trained for records in source.held_out or source.training):
            raise UserError(
                f"{source.name}: its held-out records are trained on, by --data_path. Give --eval_data_path other "
                "records, or leave it out (some rows are then held out)."
            )


def parse_split(split: str | None) -> list[float] | None:
    """Parse the shares of steps 1, 2 and 3, such as "2,4,4"; None for None. Raises UserError for any other text."""
    if split is None:
        return None
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if len(shares) != 3 or not all(share >= 0 and math.isfinite(share) for share in shares) or not sum(shares) > 0:
        raise UserError(
            f"--data_split {split!r}: give the shares of steps 1, 2 and 3 as three numbers of at least 0 "
            "with commas between, like 2,4,4."
        )
    return shares


def split_part(size: int, shares: list[float], phase: int, seed: int) -> np.ndarray:
    """The numbers of the rows that training step `phase` (1, 2 or 3) gets, in rising order, if `size` rows are divided
    among the steps in these shares."""
    borders = np.rint(np.cumsum([0.0, *shares]) / sum(shares) * size).astype(int)
    order = np.random.default_rng((seed, DIVIDE)).permutation(size)
    return np.sort(order[borders[phase - 1] : borders[phase]])


def checked_weights(weights: Sequence[float] | None, paths: Sequence[str]) -> list[float]:
    """The weights; by default 1 for each path. Raises UserError unless there is a weight for each path."""
    if not weights:
        return [1.0] * len(paths)
    given = " ".join(f"{weight:g}" for weight in weights)
    if len(weights) != len(paths):
        raise UserError(
            f"--data_weights {given}: {len(weights)} weights for {len(paths)} data sets of --data_path. "
            "Give one for each."
        )
    return list(weights)


def weighted(places: np.ndarray, weight: float, seed: int, name: str) -> np.ndarray:
    """The places, repeated by the weight. With weight 1.5, half of the places, drawn with the seed, occur twice and the
    others once. name: the name of the data set, for messages."""
    parts, drawn = [places] * int(weight), round(weight % 1 * len(places))
    if drawn:
        order = np.random.default_rng((seed, DRAW)).permutation(len(places))
        parts.append(places[np.sort(order[:drawn])])
    result = _joined(parts)
    if not len(result):
        raise UserError(
            f"--data_weights {weight:g}: of the {len(places)} rows of {name} none is left. Give it a "
            "larger weight, or leave the data set out."
        )
    return result


def hold_out(
    parts: list[np.ndarray],
    own: list[int],
    held_out: float,
    seed: int,
    kept: Callable[[np.ndarray], bool],
    what: str,
    advice: str,
) -> np.ndarray:
    """Choose the places to hold out from those parts whose numbers `own` lists, and remove them from these parts (the
    list `parts` is changed). Returns the chosen places.

    kept: place -> whether the row at this place is kept; False if it is dropped. Other arguments: see split_held_out.
    """
    candidates = parts[own[0]] if len(own) == 1 else np.concatenate([parts[number] for number in own])
    stays = split_held_out(len(candidates), held_out, seed, what, advice, lambda number: kept(candidates[number]))
    ends = np.cumsum([len(parts[number]) for number in own])
    for number, end in zip(own, ends):
        piece = slice(end - len(parts[number]), end)
        parts[number] = candidates[piece][stays[piece]]
    return candidates[~stays]


def split_held_out(
    size: int,
    held_out: float,
    seed: int,
    what: str = "held-out rows",
    advice: str = "Give a fraction between 0 and 1, or a whole number smaller than the number of rows.",
    kept: Callable[[int], bool] = lambda number: True,
) -> np.ndarray:
    """(size,) bool: True for the rows that are trained on. The others are held out; the draw depends on `seed` only.

    held_out: a fraction of the rows if below 1, otherwise a number of rows. With a fraction f, the first f * size rows
    of a random order are considered. The kept ones among them are held out, or the next kept row if there are none;
    this is about the fraction f of all kept rows.
    kept: number of a row -> whether the row is kept. Rows that are not kept are never held out.
    what: where `held_out` and the rows come from, for the message. advice: what the message advises.
    Raises UserError if no kept row would be left to train on or to hold out.
    """
    count = round(held_out * size) if held_out < 1 else held_out
    if count != int(count) or not 0 < count < size:
        raise UserError(
            f"{what}: cannot hold out {held_out:g} of {size} rows: both parts need at least one row. {advice}"
        )
    stays, found = np.ones(size, bool), 0
    progress = Progress(int(count), "drawing held-out rows")
    for place, number in enumerate(progress.over(np.random.default_rng(seed).permutation(size))):
        if not kept(number):
            continue
        if found == count or (held_out < 1 and found and place >= count):
            break  # at least this kept row is trained on
        stays[number] = False
        found += 1
    else:
        raise UserError(
            f"{what}: cannot hold out {held_out:g} of {found} rows, which are all that are not left out, for their "
            f"length say (of {size}): both parts need at least one row. {advice} Or raise the length, or give "
            "--overlong cut_prompt."
        )
    return stays


def limited(places: np.ndarray, limit: int | None, seed: int, kept: Callable[[np.ndarray], bool]) -> np.ndarray:
    """At most `limit` of the places, in their given order. They are drawn with the seed from the places whose rows are
    `kept`. None for no limit."""
    if limit is None:
        return places
    order = np.random.default_rng((seed, LIMIT)).permutation(len(places)) if len(places) > limit else range(len(places))
    found = islice((number for number in order if kept(places[number])), limit)
    return places[np.sort(np.fromiter(found, int))]
