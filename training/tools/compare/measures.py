"""Measures one model's responses, and compares two models' responses to the same prompts, with standard errors.

With k samples of each prompt, the samples of prompt i are samples[i * k : (i + 1) * k]. Several samples of one prompt
are not independent of each other. Therefore the unit of standard errors is the prompt, with the mean of its samples.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from training.reporting.evaluation import POLICY, text_by
from training.reporting.standard_errors import NOISE, Estimate
from training.reporting.variety import distinct_bigrams, repetition


@dataclass(frozen=True, slots=True)
class Sample:
    """A response and its measurements. scores: {name of the reward: score}. kl: log-prob under the model that drew the
    response minus log-prob under the first model, in nats. ended: whether the response ended by itself. turns: those of
    a conversation, as in `turns_of`; kl and tokens are then those of the tokens that the model drew."""

    response: str
    scores: dict[str, float]
    kl: float
    tokens: int
    ended: bool
    turns: Sequence[Mapping] = ()


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
    """A mean and its interval of two standard errors. null: the mean that is expected if there is no difference."""

    value: float
    low: float
    high: float
    null: float

    @property
    def differs(self) -> bool:
        """Whether the interval does not contain `null`: the difference is more than noise."""
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
    """The measurements of a model. each: number of samples of each prompt. Standard errors are taken over prompts.
    Repetition and bigrams are those of the model's own turns."""
    tokens = by_prompt([sample.tokens for sample in samples], each)
    kl = by_prompt([sample.kl for sample in samples], each)
    texts = [text_by(POLICY, {"response": sample.response, "turns": sample.turns}) for sample in samples]

    def mean(values: Sequence[float]) -> Value:
        return Value.of(Estimate.of(by_prompt(values, each)))

    return ModelMeasures(
        scores={name: mean([sample.scores[name] for sample in samples]) for name in samples[0].scores},
        kl=Value.of(Estimate.of(kl)),
        kl_per_token=Value.of(Estimate.of(kl, tokens)),
        tokens=Value.of(Estimate.of(tokens)),
        ended=mean([float(sample.ended) for sample in samples]),
        repetition=repetition(texts),
        bigrams=distinct_bigrams(texts) / max(sum(sample.tokens for sample in samples), 1),
    )


def of_pair(samples: Sequence[Sample], first: Sequence[Sample], reward: str, each: int) -> PairMeasures:
    """Compare a model with the first model: each of its samples with the first model's sample of the same prompt and
    number. each: number of samples of each prompt."""
    changes = np.array([change(one, other, reward) for one, other in zip(samples, first, strict=True)])
    signs = np.sign(changes)
    return PairMeasures(
        wins=int((signs > 0).sum()),
        ties=int((signs == 0).sum()),
        losses=int((signs < 0).sum()),
        win_rate=interval(by_prompt((signs + 1) / 2, each), 0.5),
        difference=interval(by_prompt(changes, each), 0.0),
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


def histogram(columns: Sequence[Sequence[float]], bins: int = 24) -> tuple[list[float], list[list[int]]]:
    """Returns (edges, counts): the edges of equally wide bins over the numbers of all columns, and for each column how
    many of its numbers are in each bin."""
    every = np.concatenate([np.asarray(column, dtype=np.float64) for column in columns])
    edges = np.histogram_bin_edges(every, bins)
    return edges.tolist(), [np.histogram(column, edges)[0].tolist() for column in columns]


def interval(values: np.ndarray, null: float) -> Interval:
    """The mean of the values (n,), one value for each prompt, with an interval of NOISE standard errors to either side,
    but not beyond the smallest and the largest value.

    With many ties, or with values that are all equal, the standard error is too small. Therefore a sign-flip test is
    made, too: if both models had the same distribution, each prompt's difference d_i = values_i - null would be equally
    likely with the opposite sign (R. A. Fisher 1935, The Design of Experiments, section 21), and sum(d_i) would have
    the standard deviation sqrt(sum(d_i^2)). If the sum is within NOISE of these, the interval is widened up to `null`.
    """
    mean = Estimate.of(values)
    margin = NOISE * (mean.error or 0.0)
    low, high = max(mean.value - margin, float(values.min())), min(mean.value + margin, float(values.max()))
    differences = values - null
    if abs(differences.sum()) <= NOISE * math.sqrt((differences**2).sum()):
        low, high = min(low, null), max(high, null)
    return Interval(mean.value, low, high, null)
