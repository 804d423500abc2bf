"""The search that tunes every entry alike: runs of one seed at each of the task's rates, chosen by score under a KL.

They are as long as those that are compared: shorter ones would choose rates that come to a KL sooner.
Its seed is none that is compared, so that an entry's choice is not made by luck that then counts as its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import UserError
from scripts.comparison.entries import Entry
from scripts.comparison.frontier import best_score_under
from scripts.comparison.runs import Run

SEED = 1000


@dataclass(frozen=True, slots=True)
class Search:
    """scores: by rate, the best score under the task's search_kl; None where a run broke off before any evaluation."""

    scores: dict[float, float | None]
    cpu_seconds: float
    chosen: float


def choose(scores: Mapping[float, float | None]) -> float | None:
    """The rate of the best score, the lowest of equally good ones; None where no rate has a score."""
    found = [(-score, rate) for rate, score in scores.items() if score is not None]
    return min(found)[1] if found else None


def searched(entry: Entry, runs: list[Run]) -> Search:
    """The choice, once the search's runs are complete; raises UserError where all of them broke off at once."""
    scores = {}
    for run in runs:
        course = run.result.course(entry.line)
        scores[run.rate] = best_score_under(course, run.task.search_kl) if course[1:] else None
    chosen = choose(scores)
    if chosen is None:
        raise UserError(
            f"{entry.label}: each rate of {', '.join(f'{rate:g}' for rate in scores)} broke off before its first "
            f"evaluation ({runs[0].result.why}). Give lower --rates."
        )
    return Search(scores, sum(run.result.cpu_seconds for run in runs), chosen)
