"""What all checks found, as a table."""

from collections import Counter
from collections.abc import Sequence

from scripts.benchmark_report import markdown
from scripts.gpu_checks.check import Outcome


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """A row for each check, and a last line that counts them."""
    rows = [("check", "result", "s", "figures, and why")]
    rows += [(found.name, found.status, f"{found.seconds:.0f}", "; ".join(_words(found))) for found in outcomes]
    counted = Counter(found.status for found in outcomes)
    return [*markdown(rows), "", ", ".join(f"{number} {status}" for status, number in counted.items())]


def _words(found: Outcome) -> list[str]:
    words = [found.why.replace("|", "/").replace("\n", " ")] if found.why else []
    words += [f"{name} {_figure(value)}" for name, value in found.figures.items()]
    if found.left_out:
        words.append(f"needs CUDA and was left out: {', '.join(found.left_out)}")
    return words


def _figure(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
