"""Measures one model's responses, and compares two models' responses to the same prompts, with standard errors and
confidence intervals.

With k samples of each prompt, the samples of prompt i are samples[i * k : (i + 1) * k]. Several samples of one prompt
are not independent of each other. Therefore the unit of standard errors and of the bootstrap is the prompt, with the
mean of its samples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from training.reporting.standard_errors import Estimate
from training.reporting.variety import distinct_bigrams

N = 3  # number of words in the n-grams whose repetition is counted
RESAMPLES = 10_000
LEVEL = 0.95
AT_ONCE = 1 << 20  # how many random numbers are drawn at a time
EXACT = 12  # with up to so many differences that are not 0, all patterns of signs (up to 4,096) are counted


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and its measurements. scores: {name of the reward: score}. kl: log-prob under the model that drew the
    response minus log-prob under the first model, in nats. ended: whether the response ended by itself."""

    response: str
    scores: dict[str, float]
    kl: float
    tokens: int
    ended: bool


@dataclass(frozen=True, slots=True)
class Value:
    """A mean and its standard error. The error is None if it is not known."""

    value: float
    error: float | None

    @classmethod
    def of(cls, estimate: Estimate) -> "Value":
        """Make a value and its standard error from an estimate over prompts."""
        return cls(estimate.value, estimate.error)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval. null: the mean that is expected if there is no difference. p: the
    probability that chance alone moves the mean at least as far from `null`."""

    value: float
    low: float
    high: float
    p: float
    null: float

    @property
    def differs(self) -> bool:
        """Whether the interval does not contain `null`: the difference is significant at the 5 % level."""
        return not self.low <= self.null <= self.high


@dataclass(frozen=True, slots=True)
class ModelMeasures:
    """The measurements of a model's responses.

    scores: {reward: mean score}. kl: KL to the first model in nats per response. kl_per_token: the same in nats per
    token. tokens: mean number of tokens of a response. ended: share of responses that ended by themselves. repetition:
    share of repeated n-grams. bigrams: number of distinct pairs of neighbouring words, divided by the number of tokens.
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

    wins, ties, losses: numbers of samples. win_rate: the share of wins; a tie counts as half a win. difference: the
    model's mean score minus the first model's mean score.
    """

    wins: int
    ties: int
    losses: int
    win_rate: Interval
    difference: Interval


def of_model(samples: Sequence[Sample], each: int) -> ModelMeasures:
    """The measurements of a model. each: number of samples of each prompt. Standard errors are taken over prompts."""
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
    """Compare a model with the first model: each of its samples with the first model's sample of the same prompt and
    number. each: number of samples of each prompt."""
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
    """A sample's score minus the score of the first model's sample of the same prompt and number.

    If both are the same response, the result is 0: the scores of the same text may differ a little between batches, but
    this is no difference between the models.
    """
    if (sample.response, sample.tokens, sample.ended) == (first.response, first.tokens, first.ended):
        return 0.0
    return sample.scores[reward] - first.scores[reward]


def by_prompt(values: Sequence[float] | np.ndarray, each: int) -> np.ndarray:
    """The mean of each prompt's `each` samples, as (n,) float64 for n prompts."""
    return np.asarray(values, dtype=np.float64).reshape(-1, each).mean(1)


def repetition(texts: Sequence[str], n: int = N) -> float:
    """1 - (number of distinct n-grams) / (number of n-grams) of words; 0 if there are no n-grams. Both numbers are
    counted within each text and summed over the texts.

    An n-gram that one text repeats counts; an n-gram that occurs in two texts does not.
    """
    every = distinct = 0
    for text in texts:
        words = text.split()
        grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        every, distinct = every + len(grams), distinct + len(set(grams))
    return 1 - distinct / every if every else 0.0


def histogram(columns: Sequence[Sequence[float]], bins: int = 24) -> tuple[list[float], list[list[int]]]:
    """Returns (edges, counts): the edges of equally wide bins over the numbers of all columns, and for each column how
    many of its numbers are in each bin."""
    every = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
    edges = np.histogram_bin_edges(every, bins)
    return edges.tolist(), [np.histogram(column, edges)[0].tolist() for column in columns]


def interval(values: np.ndarray, null: float, seed: int) -> Interval:
    """The mean of the values (n,), one value for each prompt, n >= 2, with a bootstrap confidence interval at LEVEL.

    n values are drawn with replacement and averaged, RESAMPLES times. The bounds of the interval are the quantiles a
    and 1 - a of these means (the expanded percentile interval):

        a = Phi(-sqrt(n / (n - 1)) * t_(n - 1)),    t_(n - 1) Student's quantile at 0.975

    With a = 0.025, the interval of few values would be too narrow. (T. Hesterberg 2015, What Teachers Should Know About
    the Bootstrap, section 5.2.)

    If nearly all values are `null` (ties), or all values are equal, the resampled means hardly differ, and the interval
    is too narrow with any quantile. Therefore `p` is used too, which is exact for any number of ties: if the interval
    excludes `null` although p is above 5 %, the interval is widened up to `null`. If all values are `null`, p is 1 and
    the interval has no width.
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
    """The two-sided p of a mean difference by a sign-flip test: how often the mean is at least as far from 0 if the
    sign of each difference is chosen at random.

    If both models had the same distribution, each prompt's difference would be equally likely with the opposite sign,
    whatever its size (R. A. Fisher 1935, The Design of Experiments, section 21). Differences of 0 (ties) have no
    effect. With up to EXACT other differences, all patterns of signs are counted. With more, RESAMPLES random patterns
    and the observed one are.
    """
    decided = differences[differences != 0.0]
    n, found = len(decided), abs(decided.sum())
    least = found - 1e-9 * np.abs(decided).sum()  # sums in another order differ in their last bits
    if n <= EXACT:
        patterns = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((2 * patterns - 1) @ decided) >= least).mean())
    count, step = 1, max(1, AT_ONCE // n)
    for start in range(0, RESAMPLES, step):
        patterns = rng.integers(0, 2, (min(step, RESAMPLES - start), n), dtype=np.int8)
        count += int((np.abs(2 * (patterns @ decided) - decided.sum()) >= least).sum())
    return count / (RESAMPLES + 1)


def student_quantile(degrees: int) -> float:
    """The quantile at 0.975 of Student's t distribution with `degrees` degrees of freedom.

    With t = sqrt(degrees) tan(theta), the density of theta between 0 and pi/2 is proportional to
    cos(theta)^(degrees - 1). This density is integrated numerically.
    """
    theta = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(theta) ** (degrees - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(degrees) * math.tan(float(np.interp(LEVEL * mass[-1], mass, theta)))
