"""Keyed uniforms against arbitrary-precision SplitMix64, their distribution, and the tokens drawn with them."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from engine.algo.sampling import keyed_uniforms, sample_tokens

N = 20_000
# Chi-squared critical values at a probability of 0.001; the draws are fixed, so a test passes always or never.
CHI_SQUARED = {3: 16.266, 4: 18.467}
KOLMOGOROV = 1.949 / math.sqrt(N)  # at 0.001

ROUND = (1 << 64) - 1


def splitmix(state: int) -> int:
    """The output of SplitMix64 that follows `state`, in Python's integers."""
    bits = (state + 0x9E3779B97F4A7C15) & ROUND
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & ROUND
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & ROUND
    return bits ^ (bits >> 31)


def keyed(seed: int, *keys: int) -> float:
    bits = seed & ROUND
    for key in keys:
        bits = splitmix(bits) ^ (key & ROUND)
    return (splitmix(splitmix(bits)) >> 11) / 2**53


def columns(*keys: int, rows: int = 1) -> list[torch.Tensor]:
    return [torch.full((rows,), key) for key in keys]


def test_the_generator_of_this_test_gives_the_published_numbers():
    # The first outputs of SplitMix64 from the states 0 and 1234567.
    assert [splitmix(step * 0x9E3779B97F4A7C15 & ROUND) for step in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert splitmix(1234567) == 6457827717110365317


def test_uniforms_equal_the_arbitrary_precision_ones():
    big = (1 << 63) - 1
    cases = [(0, 0, 0, 0), (1, 2, 3, 4), (42, 0, 1, 0), (big, big, big, big), (7, 10**12, 5, 2047), (-3, 9, 0, 1)]
    rng = np.random.default_rng(0)
    cases += [tuple(int(key) for key in row) for row in rng.integers(0, 2**40, (200, 4))]
    for seed, index, sample, position in cases:
        drawn = keyed_uniforms(seed, *columns(index, sample, position))
        assert drawn.dtype == torch.float64 and drawn.shape == (1,)
        assert drawn.item() == keyed(seed, index, sample, position)


def test_uniforms_depend_on_each_key():
    def one(*keys):
        return keyed_uniforms(keys[0], *columns(*keys[1:])).item()

    keys = (5, 6, 7, 8)
    changed = [one(*keys), *(one(*keys[:k], keys[k] + 1, *keys[k + 1 :]) for k in range(4))]
    assert len(set(changed)) == 5
    # Exchanged keys are other keys: prompt 6's sample 7 is not prompt 7's sample 6.
    assert len({one(5, 6, 7, 8), one(6, 5, 7, 8), one(5, 7, 6, 8), one(5, 6, 8, 7)}) == 4


def test_uniforms_depend_on_nothing_but_the_keys():
    indices, samples, positions = (torch.arange(60) // 12, torch.arange(60) // 4 % 3, torch.arange(60) % 4)
    whole = keyed_uniforms(3, indices, samples, positions)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keyed_uniforms(3, indices[order], samples[order], positions[order]), whole[order])
    for size in (1, 7, 30):
        pieces = zip(indices.split(size), samples.split(size), positions.split(size))
        assert torch.equal(torch.cat([keyed_uniforms(3, *piece) for piece in pieces]), whole)
    torch.manual_seed(1)
    torch.rand(5)
    assert torch.equal(keyed_uniforms(3, indices, samples, positions), whole)
    twos = torch.full((60,), 2)
    assert torch.equal(keyed_uniforms(3, indices, samples, 2), keyed_uniforms(3, indices, samples, twos))


ZERO, LINE = torch.zeros(N, dtype=torch.int64), torch.arange(N)
ALONG = {
    "indices": partial(keyed_uniforms, 0, LINE, ZERO, ZERO),
    "samples": partial(keyed_uniforms, 0, ZERO, LINE, ZERO),
    "positions": partial(keyed_uniforms, 0, ZERO, ZERO, LINE),
    "all": partial(keyed_uniforms, 0, LINE // 400, LINE // 100 % 4, LINE % 100),
}


@pytest.mark.parametrize("key", list(ALONG))
def test_uniforms_are_uniform_along_every_key(key):
    drawn = ALONG[key]().numpy()
    assert drawn.min() >= 0 and drawn.max() < 1 and len(set(drawn)) == N
    # Standard errors: sqrt(1/12 / N) = 0.00204 of the mean, sqrt(1/180 / N) = 0.000527 of the variance; four each.
    assert abs(drawn.mean() - 0.5) < 0.0082
    assert abs(drawn.var() - 1 / 12) < 0.0022
    steps = np.arange(N + 1) / N
    ordered = np.sort(drawn)
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < KOLMOGOROV


@pytest.mark.parametrize("neighbour", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("key", list(ALONG))
def test_neighbouring_keys_give_uncorrelated_numbers(key, neighbour):
    here = ALONG[key]().numpy()
    there = keyed_uniforms(*(own + step for own, step in zip(ALONG[key].args, neighbour))).numpy()
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(N)
    # Nor are their squared deviations, which a mere mirror image (u, 1 - u) would betray.
    assert abs(np.corrcoef((here - 0.5) ** 2, (there - 0.5) ** 2)[0, 1]) < 4 / math.sqrt(N)


def test_tokens_by_hand():
    logits = torch.tensor([0.25, 0.25, 0.5]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.4999, 0.5001, 0.9999], dtype=torch.float64)
    assert sample_tokens(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]
    # At temperature 1/2 the probabilities 1 : 1 : 4 end at 1/6, 2/6, 1.
    uniforms = torch.tensor([0.166, 0.167, 0.333, 0.334, 0.9, 0.0], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 0.5).tolist() == [0, 1, 1, 2, 2, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_counts_follow_the_softmax(temperature):
    logits = np.array([1.5, -1.0, 0.3, 0.0, -0.4])
    probabilities = np.exp(logits / temperature)
    probabilities /= probabilities.sum()
    drawn = sample_tokens(torch.tensor(logits, dtype=torch.float32).expand(N, 5), ALONG["all"](), temperature)
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert ((counts - N * probabilities) ** 2 / (N * probabilities)).sum() < CHI_SQUARED[4]
    # The counts would betray a temperature that is off by a tenth.
    wrong = np.exp(logits / (temperature * 1.1))
    wrong /= wrong.sum()
    assert ((counts - N * wrong) ** 2 / (N * wrong)).sum() > CHI_SQUARED[4]


def test_impossible_tokens_are_never_drawn():
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 0.0, 0.5, -0.5, -math.inf])
    drawn = sample_tokens(logits.expand(N, 7), ALONG["all"]()).numpy()
    counts = np.bincount(drawn, minlength=7)
    possible = np.array([1, 3, 4, 5])
    assert counts[[0, 2, 6]].tolist() == [0, 0, 0]
    probabilities = np.exp(logits.double().numpy()[possible])
    expected = N * probabilities / probabilities.sum()
    assert ((counts[possible] - expected) ** 2 / expected).sum() < CHI_SQUARED[3]


def test_the_ends_of_the_unit_interval():
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    impossible = torch.tensor([-math.inf, -math.inf, 0.2, 0.1, 0.3, -math.inf, -math.inf])
    assert sample_tokens(impossible.expand(2, 7), ends).tolist() == [2, 4]
    assert sample_tokens(torch.zeros(2, 7), ends).tolist() == [0, 6]
    only = torch.full((2, 7), -math.inf)
    only[:, 3] = 5.0
    assert sample_tokens(only, ends).tolist() == [3, 3]


def test_the_ends_whatever_the_cumulative_sum_rounds_to():
    # Float32 probabilities seldom add up to exactly 1; neither end may leave the vocabulary or meet a zero.
    logits = torch.tensor(np.random.default_rng(4).normal(0, 3, (500, 101)), dtype=torch.float32)
    logits[:, 0] = logits[:, -1] = -math.inf
    rows = torch.ones(500, dtype=torch.float64)
    assert sample_tokens(logits, 0 * rows).tolist() == [1] * 500
    last = sample_tokens(logits, (1 - 2.0**-53) * rows)
    assert last.max() <= 99 and logits.gather(1, last.unsqueeze(1)).isfinite().all()
    # A number of 1 is outside the contract; rounding up to it must still not fall off the end.
    assert sample_tokens(logits, rows).max() <= 99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(dtype):
    logits = torch.tensor(np.random.default_rng(5).normal(0, 2, (1, 300)), dtype=dtype)
    wide = np.exp(logits.double().numpy()[0])
    cumulative = np.cumsum(wide / wide.sum())
    targets = (cumulative[:-1] + cumulative[1:]) / 2  # in the middle of a token's share
    drawn = sample_tokens(logits.expand(299, 300), torch.tensor(targets))
    assert drawn.tolist() == list(range(1, 300))
