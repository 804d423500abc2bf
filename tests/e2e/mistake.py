"""A mistake in a command line."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong, in a command line of `step` with these changed flags and words behind them."""

    kind: str
    step: int
    changes: dict = field(default_factory=dict)
    words: tuple[str, ...] = ()
    yaml: str | bytes | None = None
