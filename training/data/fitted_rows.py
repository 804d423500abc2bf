"""Rows made to fit: what the examples of steps 1 and 2 and the prompts of step 3 have in common."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow

from engine.errors import UserError
from training.data import build_lock
from training.data.cache import cached_table, count_of
from training.data.lengths import CUT, DROPPED, EMPTY, EQUAL, Fit, RowFit
from training.data.progress import Progress
from training.data.records import Unread
from training.data.table_files import MadeTable

NOTED = 3  # rows of each kind whose numbers are kept, so that they can be shown
ENOUGH = 0.95  # where a smaller share of the rows fits, that is warned of


class FittedRows(Sequence):
    """An Arrow table of the rows that are kept, and counts of the others.

    rows: where they are from; fit: what of a row is shown to the model. cut, dropped: how many rows were cut, and left
    out for their length; equal: left out because their answers are the same; empty: because the tokenizer makes no
    tokens of them. needed: the length that 95 % of the rows but these two kinds would fit into. noted: by kind, the
    numbers of the first rows of this kind. notes: (the number of the first row, how many rows) by the note that they
    have (`Row.notes`). unread: what the columns hold that were not read, by name.
    """

    def __init__(
        self,
        rows: Sequence[dict],
        fit: RowFit,
        schema: pyarrow.Schema,
        columns: Callable[[Fit, dict], tuple],
        tokenizer,
        cache: Path | None,
        **settings,
    ):
        """columns: what stands in the table of a row that is kept. settings: all that `fit` depends on.

        Raises UserError where the tokenizer makes no tokens of any row.
        """

        def examples(counts: Counter) -> Iterator[tuple]:
            lengths, noted, notes, unread = Counter(), defaultdict(list), {}, {}
            progress = Progress(len(rows), "tokenising", told=build_lock.note)
            for number, (row, found) in enumerate(progress.over(fit.each(rows))):
                counts[found.kind] += 1
                for note in getattr(row, "notes", ()):
                    first, count = notes.get(note, (number, 0))
                    notes[note] = first, count + 1
                if found.kind not in (EQUAL, EMPTY):  # which would be left out at any length
                    lengths[found.needed] += 1
                if len(noted[found.kind]) < NOTED:
                    noted[found.kind].append(number)
                unread |= {name: value.why for name, value in row.items() if isinstance(value, Unread)}
                if not found.reason:
                    yield columns(found, row)
            counts.update(needed=_enough(lengths))
            counts["noted"], counts["notes"], counts["unread"] = map(json.dumps, (noted, notes, unread))

        self.source, self.fit = rows, fit
        self.table = cached_table(MadeTable(schema, examples), cache, rows, tokenizer, **settings)
        self.cut, self.dropped, self.equal = (count_of(self.table, kind) for kind in (CUT, DROPPED, EQUAL))
        self.empty = count_of(self.table, EMPTY)
        self.needed = count_of(self.table, "needed")
        metadata = self.table.schema.metadata
        self.noted, self.notes, self.unread = (
            json.loads(metadata.get(name, b"{}")) for name in (b"noted", b"notes", b"unread")
        )
        if 0 < self.empty == len(rows):
            raise UserError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} makes no tokens of any of the {len(rows):,} "
                f"rows, from {place_of(rows, 0)} on. Give data, or a model, that its tokenizer was made for."
            )

    def __len__(self) -> int:
        return len(self.table)

    def told(self, noun: str) -> str:
        """How many are kept, cut and dropped: "1,834 of 1,842 texts (226 cut: 12.3 %, 8 dropped: 0.4 %)", of 1,842."""
        parts = [self._share(self.cut, "cut"), self._share(self.dropped, "dropped")]
        if self.equal:
            parts.append(self._share(self.equal, "left out as chosen and rejected are the same"))
        if self.empty:
            parts.append(self._share(self.empty, "left out as the tokenizer makes no tokens of them"))
        whole = f" of {len(self.source):,}" if len(self) < len(self.source) else ""
        return f"{len(self):,}{whole} {noun} ({', '.join(parts)})"

    def note_lines(self) -> list[str]:
        """A line for each note, with the share of the rows that have it."""
        return [
            f"in {100 * count / len(self.source):.1f} % of these {len(self.source):,} rows, first in "
            f"{place_of(self.source, first)}: {note}"
            for note, (first, count) in self.notes.items()
        ]

    def warnings(
        self, flag: str, limit: int, overlong: str, most: Callable[[], int | None] = lambda: None
    ) -> list[str]:
        """A line where more than 5 % of the rows do not fit, with what to do; `limit` is the value of `flag`.

        most: asked for the largest value of `flag` for which the models have positions, if they have a number of them.
        """
        too_long = self.cut + self.dropped
        if self.needed <= limit or too_long <= (1 - ENOUGH) * len(self.source):
            return []
        other = "" if overlong == "cut_prompt" else ", or give --overlong cut_prompt, which keeps answers"
        share = 100 * too_long / len(self.source)
        done = " or ".join(word for word, count in (("cut", self.cut), ("dropped", self.dropped)) if count)
        return [
            f"warning: {share:.1f} % of these {len(self.source):,} rows are longer than {flag} {limit}, and were "
            f"{done}; {100 * ENOUGH:.0f} % of them fit into {self.needed}. "
            f"{_remedy(flag, limit, self.needed, most())}{other}."
        ]

    def _share(self, count: int, what: str) -> str:
        return f"{count:,} {what}" + (f": {100 * count / len(self.source):.1f} %" if count else "")


def place_of(rows: Sequence[dict], number: int) -> str:
    """Where a row is from, in words."""
    return rows.where(number) if hasattr(rows, "where") else f"row {number + 1}"


def _enough(lengths: Mapping[int, int]) -> int:
    """The length that a share ENOUGH of the rows do not exceed, of how many rows have each length; 0 for none."""
    place, seen = math.ceil(ENOUGH * sum(lengths.values())), 0
    for length in sorted(lengths):
        seen += lengths[length]
        if seen >= place:
            return length
    return 0


def _remedy(flag: str, limit: int, needed: int, most: int | None) -> str:
    if most is None:
        return f"Give {flag} {needed}, if the model and memory allow"
    if needed <= most:
        return f"Give {flag} {needed}, if memory allows"
    if limit < most:
        return (
            f"The model's positions allow {flag} {most} at most: give that, if memory allows, or another model, or "
            "shorter rows"
        )
    return "The model has no positions for more: give another model, or shorter rows"
