"""What is said of a flag that another system has: the row of its page, docs/from_*.md, in which the name stands."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A wheel has these pages beside this file; a checkout has them in its documents.
_INSTALLED = Path(__file__).with_name("pages")
PAGES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "docs"
HEADINGS = {"in step 3": (3,), "in steps 1 and 2": (1, 2), "no counterpart; instead": (1, 2, 3)}
"""Of the column that says what there is here, and in which steps that is so."""


class Row(NamedTuple):
    """A line of a table: the names in its first cell, the heading of what there is here, that, and a remark."""

    system: str
    names: list[str]
    heading: str
    here: str
    remark: str


def flag_of_other_systems(name: str, step: int) -> str | None:
    """What there is in this step in place of the flag `name` of another system, of any that has one of this name (or of
    this last part: `algo.kl.init_coef`), or what there is in other steps; None where no page has it."""
    found = [(row, known) for row in rows() for known in row.names if name in (known, known.rpartition(".")[2])]
    found = [one for one in found if step in HEADINGS[one[0].heading]] or found
    sentences = [
        f"{row.system}'s {known}: {row.heading} {row.here}{f' ({row.remark})' if row.remark else ''}."
        for row, known in found
    ]
    return " ".join(sentences) or None


def rows() -> Iterator[Row]:
    """The lines of all pages' tables that have one of the headings."""
    for page in sorted(PAGES.glob("from_*.md")):
        text = re.sub(r"\[[^]]*\]\(([^)]*)\)", r"docs/\1", page.read_text(encoding="utf-8"))
        system, heading, column = text.partition("\n")[0].removeprefix("# From "), "", 0
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            named = [place for place, cell in enumerate(cells) if cell in HEADINGS]
            if named or not cells:
                column = named[0] if named else 0
                heading = cells[column] if named else ""
            elif column:
                names = re.findall(r"`([\w.]+)", cells[0])
                here, remark = (*(cell.replace("`", "") for cell in cells[column:]), "")[:2]
                yield Row(system, names, heading, here, remark)
