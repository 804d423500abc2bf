"""Measurements of one model's responses and of two models' responses to the same prompts, with their uncertainty.

Samples are ordered by prompt and then by number: those of prompt i are samples[i * k : (i + 1) * k]. The prompt is the
unit of standard errors and of the bootstrap: several samples of one prompt are not independent, and enter as their
mean.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from training.reporting.standard_errors import Estimate
from training.reporting.variety import distinct_bigrams

N = 3  # words of an n-gram whose repetition is counted
RESAMPLES = 10_000
LEVEL = 0.95
AT_ONCE = 1 << 20  # numbers drawn at a time
EXACT = 12  # up to so many differing prompts all patterns of signs, 4,096, are counted


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and its measurements. scores: by the name of the reward. kl: log-prob by the model that drew it minus
    log-prob by the first model, nats. ended: whether it ended by itself."""

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
class Interval:
    """A mean with its 95 % interval. p: the probability that chance alone moves it at least so far from `null`."""

    value: float
    low: float
    high: float
    p: float
    null: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out `null`: the difference is significant at 5 %."""
        return not self.low <= self.null <= self.high


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
    """A model compared with the first model, by one reward.

    wins, ties, losses: numbers of samples. win_rate: the share of wins, where a tie counts half. difference: the
    model's mean score minus the first model's.
    """

    wins: int
    ties: int
    losses: int
    win_rate: Interval
    difference: Interval


def of_model(samples: Sequence[Sample], each: int) -> ModelMeasures:
    """The measurements of a model. each: samples of a prompt. Standard errors are over prompts."""
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
    """A model compared with the first one: each sample with the first model's sample of the same prompt and number."""
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
    """A sample's score minus that of the first model's sample of the same prompt and number.

    0 where both are the same response: the scores of one text may differ a little between batches, which is no
    difference of the models.
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


def interval(values: np.ndarray, null: float, seed: int) -> Interval:
    """The mean of the values (n,), one a prompt, n >= 2, with a paired bootstrap interval of LEVEL.

    The interval is the expanded percentile one: of RESAMPLES means of n values drawn with replacement it has the
    quantiles a and 1 - a, where

        a = Phi(-sqrt(n / (n - 1)) * t_(n - 1)),    t_(n - 1) Student's quantile at 0.975

    instead of 0.025, since plain percentiles of few values are too narrow. (T. Hesterberg 2015, What Teachers Should
    Know About the Bootstrap, section 5.2.)

    Where nearly all values are `null` (ties), or all are equal, the resamples hardly differ, and the interval is too
    narrow whatever the quantile. So `p` is used too, which is exact for any number of ties: if the interval excludes
    `null` although p is above 5 %, it is widened to reach `null`. Values that are all `null` have a p of 1 and no
    width.
    """
    n = len(values)
    assert n >= 2, "one prompt does not tell how sure a mean is"
    means, rng = np.empty(RESAMPLES), np.random.default_rng(seed)
    step = max(1, AT_ONCE // n)
    for start in range(0, RESAMPLES, step):
        drawn = rng.integers(0, n, (min(step, RESAMPLES - start), n))
        means[start : start + step] = values[drawn].mean(1)
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(n - 1))
    low, high = np.quantile(means, [tail, 1 - tail])
    p = sign_flip_p(values - null, rng)
    if p >= 1 - LEVEL:
        low, high = min(low, null), max(high, null)
    return Interval(float(values.mean()), float(low), float(high), p, null)


def sign_flip_p(differences: np.ndarray, rng: np.random.Generator) -> float:
    """The two-sided p of a mean difference: how often one is at least as large if each sign is a coin's.

    If both models had the same distribution, each prompt's difference would be as likely with the other sign, whatever
    its size (R. A. Fisher 1935, The Design of Experiments, section 21). Differences of 0, ties, change nothing. Up to
    EXACT others all patterns are counted; of more, RESAMPLES random ones, and the one that was found.
    """
    decided = differences[differences != 0.0]
    n, found = len(decided), abs(decided.sum())
    least = found - 1e-9 * np.abs(decided).sum()  # sums in another order are not the same to the last bit
    if n <= EXACT:
        patterns = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((2 * patterns - 1) @ decided) >= least).mean())
    count, step = 1, max(1, AT_ONCE // n)
    for start in range(0, RESAMPLES, step):
        patterns = rng.integers(0, 2, (min(step, RESAMPLES - start), n), dtype=np.int8)
        count += int((np.abs(2 * (patterns @ decided) - decided.sum()) >= least).sum())
    return count / (RESAMPLES + 1)


def student_quantile(degrees: int) -> float:
    """The quantile at 0.975 of Student's t with so many degrees of freedom.

    t = sqrt(degrees) tan(theta) turns its density into one of theta that is proportional to cos(theta)^(degrees - 1)
    between 0 and pi/2, which is summed here.
    """
    theta = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(theta) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(LEVEL * mass[-1], mass, theta)))
