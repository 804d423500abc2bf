"""Looks at the best of k responses by a reward: where the reward would take a policy that learns from it.

The responses are the SFT model's, n to each of P prompts, so that no policy has to be trained. What the best of k are
like is an expectation over all subsets of k of a prompt's n responses, computed exactly.

    found = BestOf(scores={"reward": scores}, measures=measures_of(texts, prompts, ended, tokens))
    found.best("reward", "ended", 8)        # the share of the best of 8 that end by themselves
    found.verdict                           # in words
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np

from training.reporting.standard_errors import Estimate, with_error, within_noise
from training.reporting.variety import new_words, repetition

K = 8
"""The verdict is about the best of so many."""
LEAST = 0.2
"""A smaller change, in standard deviations of a response, is not mentioned."""
UNJUDGED = (
    "without a judge these numbers do not tell which reward is safe to optimise: read the texts, or give --judge "
    "file.py:function"
)


@dataclass(frozen=True, slots=True)
class Measure:
    """A measure of responses. label: for tables. form: of a number. falls, rises: what a reward pays for whose best
    responses have less or more of it; None if that is no hack."""

    label: str
    form: str = "{:.3f}"
    falls: str | None = None
    rises: str | None = None

    def text(self, number: float) -> str:
        """The number as text."""
        return self.form.format(number).replace("%", " %")


MEASURES = {
    "ended": Measure("ended", "{:.1%}", falls="responses that do not end"),
    "new_words": Measure("new words", "{:.1%}", rises="invented words"),
    "repeated": Measure("repeated", "{:.1%}", rises="repetition"),
    "tokens": Measure("tokens", "{:.1f}", falls="short responses", rises="long responses"),
    "likelihood": Measure("nats a token", "{:.2f}", falls="unlikely text", rises="likely, plain text"),
}


def measure_of(name: str) -> Measure:
    """The measure of this name, or a reward's score."""
    return MEASURES.get(name) or Measure(name, falls=f"what {name} scores low")


def chances(scores: np.ndarray, k: int) -> np.ndarray:
    """(P, n): for each of a prompt's n responses, the probability that it is the best of k of them, which are drawn
    without replacement. Responses with equal scores share their probability.

    The m lowest of n responses hold all k with probability C(m, k) / C(n, k). A group of equal scores has the best one
    with the difference of two of these: of all responses up to the group, and of all below it.

    scores: (P, n), P prompts with n responses each; k: from 1 to n.
    """
    n = scores.shape[1]
    within = np.array([comb(m, k) / comb(n, k) for m in range(n + 1)])
    ordered = np.sort(scores, axis=1)
    below, up_to = (
        np.stack([np.searchsorted(row, own, side) for row, own in zip(ordered, scores)]) for side in ("left", "right")
    )
    return (within[up_to] - within[below]) / (up_to - below)


def measures_of(
    texts: Sequence[Sequence[str]],
    prompts: Sequence[str],
    ended: np.ndarray,
    tokens: np.ndarray,
    likelihood: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """{a name in MEASURES: (P, n) float64}. texts: n responses to each of P prompts. ended, tokens, likelihood: (P, n).
    prompts: all prompts, of which no word counts as new; a new word is in no response to another prompt either."""
    every = [" ".join(own) for own in texts]
    new = [new_words([own[number] for own in texts], every, prompts) for number in range(len(texts[0]))]
    found = {
        "ended": ended,
        "new_words": np.transpose(new),
        "repeated": [[repetition([text]) for text in own] for own in texts],
        "tokens": tokens,
        "likelihood": likelihood,
    }
    return {name: np.asarray(values, dtype=np.float64) for name, values in found.items() if values is not None}


@dataclass(frozen=True)
class BestOf:
    """scores: {reward: (P, n) scores}. measures: as from `measures_of`. judge: the name of a score by which no policy
    is trained, or None."""

    scores: Mapping[str, np.ndarray]
    measures: Mapping[str, np.ndarray]
    judge: str | None = None

    @property
    def n(self) -> int:
        """The number of responses to each prompt."""
        return next(iter(self.scores.values())).shape[1]

    @property
    def k(self) -> int:
        """The number of responses of which the verdict looks at the best."""
        return min(K, self.n)

    @property
    def sizes(self) -> list[int]:
        """1, 2, 4 and so on, and n."""
        return [*(2**power for power in range(self.n.bit_length()) if 2**power < self.n), self.n]

    @cached_property
    def rewards(self) -> list[str]:
        """The names of the scores without the judge: with a judge by `judged`, the highest first, else as given."""
        names = [name for name in self.scores if name != self.judge]
        return sorted(names, key=lambda name: -self.judged(name).value) if self.judge else names

    @cached_property
    def weights(self) -> dict[tuple[str, int], np.ndarray]:
        """{(reward, k): the `chances` of the best of k by this reward}."""
        sizes = {*self.sizes, self.k}
        return {(name, k): chances(scores, k) for name, scores in self.scores.items() for k in sizes}

    @property
    def names(self) -> list[str]:
        """The names of the scores: of the rewards in their order, and of the judge."""
        return [*self.rewards, *filter(None, [self.judge])]

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """{name of a score or measure: (P, n)}."""
        return {**{name: self.scores[name] for name in self.names}, **self.measures}

    def best(self, reward: str, name: str, k: int) -> Estimate:
        """The mean of a score or a measure over the best of k by a reward, with its error over prompts."""
        return Estimate.of((self.weights[reward, k] * self.columns[name]).sum(1))

    def change(self, reward: str, name: str) -> np.ndarray:
        """How the best of `self.k` by a reward differ from all responses in a score or a measure, in standard
        deviations of a response: (P,)."""
        column = {**self.scores, **self.measures}[name]
        column = column - column.flat[0]  # so that equal numbers change by 0, not by rounding
        moved = (self.weights[reward, self.k] * column).sum(1) - column.mean(1)
        return moved / (column.std() or 1.0)

    def judged(self, reward: str) -> Estimate:
        """How much higher the judge scores the best of `self.k` by a reward than all responses, in standard deviations
        of a response."""
        return Estimate.of(self.change(reward, self.judge))

    def hacks(self, reward: str) -> list[str]:
        """What the best of `self.k` by a reward have too much of, the largest change first; [] if there is nothing."""
        found = []
        for name in (*self.measures, *(other for other in self.scores if other != reward)):
            change = Estimate.of(self.change(reward, name))
            measure = measure_of(name)
            what = measure.falls if change.value < 0 else measure.rises
            if what and abs(change.value) >= LEAST and not within_noise(change.value, change.error):
                best, all_ = (measure.text(self.best(reward, name, k).value) for k in (self.k, 1))
                found.append((abs(change.value), f"{what} ({measure.label} {best}, of all {all_})"))
        return [text for _, text in sorted(found, key=lambda pair: -pair[0])]

    def told(self, reward: str) -> str:
        """What the reward pays for, in words."""
        return f"{reward} pays for {', '.join(self.hacks(reward)) or 'nothing that looks like a hack'}"

    @cached_property
    def verdict(self) -> list[str]:
        """What each reward pays for, a sentence each. The first sentence says which is the safest to optimise by the
        judge; without one no number of the audit was found to tell (docs/audit.md)."""
        if self.judge is None:
            return [UNJUDGED, *map(self.told, self.rewards)]
        judged = {name: self.judged(name) for name in self.rewards}
        first, *others = self.rewards
        top = judged[first]
        if top.value < 0 or within_noise(top.value, top.error):
            line = f"no reward looks safe to optimise: even the best of {self.k} by {first} are not clearly better"
        else:
            line = f"{first} looks {'safest' if others else 'safe'} to optimise: the best of {self.k} by it are better"
        line = f"judged by {self.judge}, {line} than all responses"
        close = [one for one in others if within_noise(top.value - judged[one].value, top.change_error(judged[one]))]
        line += f"; those by {' and '.join(close)} do not differ from them by more than chance" if close else ""
        lines = (f"{self.told(name)} (judged {with_error(it.value, it.error, '+')}" for name, it in judged.items())
        return [line, *(f"{text} standard deviations of a response)" for text in lines)]
