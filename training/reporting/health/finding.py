"""A finding, and the places that it names."""

from collections.abc import Sequence
from dataclasses import dataclass

ALARM, LOOK, FINE = "alarm", "look", "fine"
"""The run is probably spoilt; it may be well, but look; nothing stood out."""


@dataclass(frozen=True)
class Finding:
    """What stood out: `severity` is ALARM, LOOK or FINE, `text` says what was seen and what to try."""

    severity: str
    text: str


def at_steps(steps: Sequence[int]) -> str:
    """Where something was seen: the first few steps by number."""
    shown = ", ".join(map(str, steps[:3]))
    return f"at step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 3} more" if len(steps) > 3 else "")
