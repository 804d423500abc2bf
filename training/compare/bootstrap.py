"""How sure a mean over prompts is: a bootstrap interval, and whether chance alone would be as far from a value.

    found = interval(wins_by_prompt, null=0.5, seed=1234)
    found.value, found.low, found.high, found.differs

The unit that is drawn is the prompt: several samples of one prompt are not independent, and stay together as their
mean.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
AT_ONCE = 1 << 20  # numbers drawn at a time
EXACT = 12  # of so many prompts that differ from the value every pattern of signs is looked at, 4,096


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % interval. p: how often chance alone would move it at least so far from `null`."""

    value: float
    low: float
    high: float
    p: float
    null: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out `null`: the difference is significant at 5 %."""
        return not self.low <= self.null <= self.high


def interval(values: np.ndarray, null: float, seed: int) -> Interval:
    """The mean of the values (n,), one a prompt, n >= 2, with a paired bootstrap interval of LEVEL.

    The interval is the expanded percentile one: of RESAMPLES means of n values drawn with replacement it has the
    quantiles a and 1 - a, where

        a = Phi(-sqrt(n / (n - 1)) * t_(n - 1)),    t_(n - 1) Student's quantile at 0.975

    instead of 0.025, since plain percentiles of few values are too narrow. (T. Hesterberg 2015, What Teachers Should
    Know About the Bootstrap, section 5.2.)

    Where nearly all values are `null` (ties), or all are equal, the resamples hardly differ, and what is left is too
    narrow whatever the quantile. So `p` is asked too, which is exact for any number of ties: an interval that leaves
    out `null` where p is above 5 % is widened up to it. Values that are all `null` have a p of 1 and no width.
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
