"""Masked sums and whitening: the published numbers, NumPy in float64, and what stands outside the mask."""

import math

import numpy as np
import pytest
import torch

from engine.algo.masked import masked_sum, mean_and_variance, moments, whiten

NAN, INF = float("nan"), float("inf")

# lm-human-preferences' own test of `whiten`, see "The N Implementation Details of RLHF with PPO".
PUBLISHED = [[1.2, 1.3, 1.4], [1.5, 1.6, 1.7], [1.8, 1.9, 2.0]]
BIASED = [[0.0508, 0.4381, 0.8254], [1.2127, 1.6000, 1.9873], [2.3746, 2.7619, 3.1492]]
UNBIASED = [[0.1394, 0.5046, 0.8697], [1.2349, 1.6000, 1.9651], [2.3303, 2.6954, 3.0606]]


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """By `moments`."""
    return mean_and_variance(moments(values, mask))[0].to(values.dtype)


def test_masked_sum_over_everything_and_over_a_dimension():
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, False, True], [False, True, True]])
    assert masked_sum(values, mask).item() == 53.0
    assert masked_sum(values, mask, dim=-1).tolist() == [5.0, 48.0]
    assert masked_sum(values, mask, dim=0).tolist() == [1.0, 16.0, 36.0]


def test_masked_mean_divides_by_what_is_counted():
    values = torch.tensor([1.0, 2.0, 4.0, 100.0])
    assert masked_mean(values, torch.tensor([True, True, True, False])).item() == pytest.approx(7 / 3)
    assert masked_mean(values, torch.zeros(4, dtype=torch.bool)).item() == 0.0


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_stands_outside_the_mask_is_harmless(poison):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    clean = torch.tensor([[1.0, 3.0, 0.0], [8.0, 0.0, 0.0]])
    dirty = torch.where(mask, clean, torch.tensor(poison)).requires_grad_()
    assert masked_sum(dirty, mask).item() == 12.0
    assert masked_sum(dirty, mask, dim=-1).tolist() == [4.0, 8.0]
    assert masked_mean(dirty, mask).item() == 4.0
    assert moments(dirty, mask).tolist() == [3.0, 12.0, 74.0]  # 1 + 9 + 64
    # mean 4, variance (9 + 1 + 16) / 3
    scale = 1 / math.sqrt(26 / 3)
    expected = torch.tensor([[-3 * scale, -scale, 0.0], [4 * scale, 0.0, 0.0]])
    torch.testing.assert_close(whiten(dirty, mask).detach(), expected, rtol=0, atol=1e-6)
    kept = whiten(dirty, mask, center=False).detach()
    torch.testing.assert_close(kept, torch.where(mask, expected + 4, torch.zeros(2, 3)), rtol=0, atol=1e-6)
    masked_sum(dirty, mask).backward()
    assert dirty.grad.tolist() == mask.float().tolist()


@pytest.mark.parametrize("unbiased, expected", [(False, BIASED), (True, UNBIASED)])
def test_published_whitening_with_the_mean_kept(unbiased, expected):
    values = torch.tensor(PUBLISHED)
    white = whiten(values, torch.ones(3, 3, dtype=torch.bool), center=False, unbiased=unbiased)
    torch.testing.assert_close(white, torch.tensor(expected), rtol=0, atol=6e-5)


def test_whitening_against_numpy_on_a_ragged_mask():
    rng = np.random.default_rng(0)
    values = rng.normal(3.0, 5.0, (6, 7))
    mask = rng.random((6, 7)) < 0.6
    chosen = values[mask]
    for unbiased in (False, True):
        expected = np.where(mask, (values - chosen.mean()) / np.sqrt(chosen.var(ddof=int(unbiased)) + 1e-8), 0.0)
        white = whiten(torch.tensor(values, dtype=torch.float32), torch.tensor(mask), unbiased=unbiased)
        assert white.dtype == torch.float32
        np.testing.assert_allclose(white.numpy(), expected, rtol=0, atol=2e-6)


def test_a_large_common_offset_costs_no_precision():
    values = torch.tensor([4096.0, 4096.25, 4096.5, 4096.75])  # exact in float32; variance 0.078125, deviation 0.27951
    white = whiten(values, torch.ones(4, dtype=torch.bool), eps=0.0)
    expected = [step / math.sqrt(0.078125) for step in (-0.375, -0.125, 0.125, 0.375)]
    torch.testing.assert_close(white, torch.tensor(expected), rtol=0, atol=1e-5)


def test_eps_stands_under_the_root():
    white = whiten(torch.tensor([-1.0, 1.0]), torch.ones(2, dtype=torch.bool), eps=3.0)
    assert white.tolist() == pytest.approx([-0.5, 0.5])  # 1 / sqrt(1 + 3); added to the deviation it would be 1 / 4


def test_an_empty_mask_gives_zeros():
    values, nothing = torch.tensor([NAN, 1.0]), torch.zeros(2, dtype=torch.bool)
    assert [part.item() for part in mean_and_variance(moments(values, nothing))] == [0.0, 0.0]
    assert [part.item() for part in mean_and_variance(moments(values, nothing), unbiased=True)] == [0.0, 0.0]
    assert whiten(values, nothing).tolist() == [0.0, 0.0]


def test_given_statistics_are_used_instead_of_the_own_ones():
    values, mask = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
    statistics = torch.tensor(5.0, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    assert whiten(values, mask, statistics=statistics).tolist() == pytest.approx([-2.0, -1.5, 0.0])
    assert whiten(values, mask, center=False, statistics=statistics).tolist() == pytest.approx([3.0, 3.5, 0.0])


def test_moments_add_up_over_splits_and_means_do_not():
    rng = np.random.default_rng(1)
    values, mask = rng.normal(1.0, 2.0, (10, 4)), rng.random((10, 4)) < 0.5
    values[:3] += 6.0  # so that the parts differ
    wide, cover = torch.tensor(values, dtype=torch.float32), torch.tensor(mask)
    parts = (slice(0, 3), slice(3, 4), slice(4, 10))
    total = sum(moments(wide[rows], cover[rows]) for rows in parts)
    chosen = [float(value) for value in wide[cover].double()]
    expected = [len(chosen), math.fsum(chosen), math.fsum(v * v for v in chosen)]
    assert total.dtype == torch.float64 and total.tolist() == pytest.approx(expected, rel=1e-12)
    mean, variance = mean_and_variance(total)
    centre = math.fsum(chosen) / len(chosen)
    assert mean.item() == pytest.approx(centre, rel=1e-12)
    assert variance.item() == pytest.approx(math.fsum((v - centre) ** 2 for v in chosen) / len(chosen), rel=1e-9)
    means = [masked_mean(wide[rows], cover[rows]).item() for rows in parts]
    assert abs(sum(means) / 3 - centre) > 0.1  # the wrong formula would be seen
