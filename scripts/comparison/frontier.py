"""Score against KL: what a run's course says at a given KL, what several seeds say together.

A course is the held-out evaluations of one run in their order, from the SFT model (KL 0) on. All functions are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation: KL to the SFT model in nats a response, and the mean score."""

    kl: float
    score: float


@dataclass(frozen=True, slots=True)
class Band:
    """Mean and standard error over the seeds that came so far, `count` of them; one seed has no error."""

    mean: float
    error: float | None
    count: int


def score_at(course: Sequence[Point], kl: float) -> float | None:
    """The best score where the course is at this KL, on the lines between two evaluations; None if it never is.

    A course may come back to a KL with a better score than on its way out, as learning rates fall.
    """
    place = place_of(course, kl)
    return None if place is None else read_at([point.score for point in course], place)


def place_of(course: Sequence[Point], kl: float) -> float | None:
    """Where the course is at this KL with the best score: 2.25 is a quarter of the way from its third point to the
    next."""
    scores, found = [point.score for point in course], []
    for number, (before, after) in enumerate(pairwise(course)):
        if min(before.kl, after.kl) <= kl <= max(before.kl, after.kl):
            share = (kl - before.kl) / (after.kl - before.kl) if after.kl != before.kl else 1.0
            found.append(number + share)
    return max(found, key=lambda place: read_at(scores, place), default=None)


def read_at(values: Sequence[float], place: float) -> float:
    """One measure of a course's points, at a place on the lines between them."""
    number = min(int(place), len(values) - 2)
    return values[number] + (place - number) * (values[number + 1] - values[number])


def best_place_under(course: Sequence[Point], kl: float) -> float | None:
    """Where a course has its best score at no more than this KL: an evaluation, or where it is at this KL; None for a
    course that is above it throughout."""
    scores = [point.score for point in course]
    found = [float(number) for number, point in enumerate(course) if point.kl <= kl]
    crossing = place_of(course, kl)
    found += [] if crossing is None else [crossing]
    return max(found, key=lambda place: read_at(scores, place), default=None)


def best_score_under(course: Sequence[Point], kl: float) -> float | None:
    """The best score at no more than this KL; None for a course that is above it throughout."""
    place = best_place_under(course, kl)
    return None if place is None else read_at([point.score for point in course], place)


def band(values: Sequence[float | None]) -> Band | None:
    """Mean and standard error of the values that are there, stdev / sqrt(n); None if none is."""
    there = [value for value in values if value is not None]
    if not there:
        return None
    error = stdev(there) / math.sqrt(len(there)) if len(there) > 1 else None
    return Band(fmean(there), error, len(there))


def curve(courses: Sequence[Sequence[Point]], points: int = 60) -> list[tuple[float, Band]]:
    """The band at evenly spaced KLs, as far as every course came: beyond that the mean would be of other seeds."""
    reach = min((max(point.kl for point in course) for course in courses if course), default=0.0)
    found = []
    for number in range(points + 1 if reach > 0 else 0):
        kl = reach * number / points
        values = band([score_at(course, kl) for course in courses])
        if values is not None:
            found.append((kl, values))
    return found
