"""What is measured of a model's responses, and of two models' responses to the same prompts.

Samples stand by prompt, and then by number: those of prompt i are samples[i * k : (i + 1) * k].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.compare.bootstrap import Interval, interval
from training.reporting.standard_errors import Estimate
from training.reporting.variety import distinct_bigrams

N = 3  # words of an n-gram whose repetition is counted


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and what was measured of it. scores: by the name of the reward. kl: log-prob by the model that drew it
    minus log-prob by the first model, nats. ended: whether it came to an end of its own."""

    response: str
    scores: dict[str, float]
    kl: float
    tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Value:
    """A mean and its standard error; None where that is not known."""

    value: float
    error: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> "Value":
        """From an estimate over prompts."""
        return cls(estimate.value, estimate.error)


@dataclass(frozen=True, slots=True)
class ModelMeasures:
    """A model's responses in numbers.

    scores: mean score by reward. kl: nats a response, to the first model; kl_per_token: nats a token. tokens: of a
    response. ended: share of the responses. repetition: share of repeated n-grams. bigrams: distinct pairs of
    neighbouring words, a token.
    """

    scores: dict[str, Value]
    kl: Value
    kl_per_token: Value
    tokens: Value
    ended: Value
    repetition: float
    bigrams: float


@dataclass(frozen=True, slots=True)
class PairMeasures:
    """A model beside the first, by one reward.

    wins, ties, losses: samples. win_rate: wins, and ties half, of all. difference: mean score minus the first's.
    """

    wins: int
    ties: int
    losses: int
    win_rate: Interval
    difference: Interval


def of_model(samples: Sequence[Sample], each: int) -> ModelMeasures:
    """What is measured of a model; each: samples of a prompt. Standard errors are over prompts."""
    tokens = by_prompt([sample.tokens for sample in samples], each)
    kl = by_prompt([sample.kl for sample in samples], each)
    responses = [sample.response for sample in samples]

    def mean(values: Sequence[float]) -> Value:
        return Value.of(Estimate.of(by_prompt(values, each)))

    return ModelMeasures(
        scores={name: mean([sample.scores[name] for sample in samples]) for name in samples[0].scores},
        kl=Value.of(Estimate.of(kl)),
        kl_per_token=Value.of(Estimate.of(kl, tokens)),
        tokens=Value.of(Estimate.of(tokens)),
        ended=mean([float(sample.ended) for sample in samples]),
        repetition=repetition(responses),
        bigrams=distinct_bigrams(responses) / max(sum(sample.tokens for sample in samples), 1),
    )


def of_pair(samples: Sequence[Sample], first: Sequence[Sample], reward: str, each: int, seed: int) -> PairMeasures:
    """A model's samples beside the first model's, which are paired prompt by prompt and number by number."""
    changes = np.array([change(one, other, reward) for one, other in zip(samples, first, strict=True)])
    signs = np.sign(changes)
    return PairMeasures(
        wins=int((signs > 0).sum()),
        ties=int((signs == 0).sum()),
        losses=int((signs < 0).sum()),
        win_rate=interval(by_prompt((signs + 1) / 2, each), 0.5, seed),
        difference=interval(by_prompt(changes, each), 0.0, seed),
    )


def change(sample: Sample, first: Sample, reward: str) -> float:
    """By how much a sample's score is above the first model's sample of the same number to the same prompt.

    0 where both are the same response: what makes scores of one text differ, such as the texts that went through the
    reward model beside it, is no difference of the models.
    """
    if (sample.response, sample.tokens, sample.ended) == (first.response, first.tokens, first.ended):
        return 0.0
    return sample.scores[reward] - first.scores[reward]


def by_prompt(values: Sequence[float] | np.ndarray, each: int) -> np.ndarray:
    """(n,) float64, the mean of each prompt's `each` samples."""
    return np.asarray(values, dtype=np.float64).reshape(-1, each).mean(1)


def repetition(texts: Sequence[str], n: int = N) -> float:
    """1 - distinct / all n-grams of words, both counted within each text and summed over the texts; 0 without any.

    What a text says twice counts, what two texts both say does not.
    """
    every = distinct = 0
    for text in texts:
        words = text.split()
        grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        every, distinct = every + len(grams), distinct + len(set(grams))
    return 1 - distinct / every if every else 0.0


def histogram(columns: Sequence[Sequence[float]], bins: int = 24) -> tuple[list[float], list[list[int]]]:
    """Edges of equally wide bins over all columns together, and how many numbers of each column are in each."""
    every = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
    edges = np.histogram_bin_edges(every, bins)
    return edges.tolist(), [np.histogram(column, edges)[0].tolist() for column in columns]
