"""The four corrections by hand."""

import math

import pytest
import torch

from engine.algo.corrections import CORRECTIONS, importance_ratios, outside

# Ratios, with a last position that was not drawn. Of the whole responses: 2 x 1/4 x 4 = 2, and 1/2 x 1/2 = 1/4.
RATIOS = torch.tensor([[2.0, 0.25, 4.0, 1.0], [0.5, 0.5, 1.0, 1.0]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
BY_HAND = {  # between 1/3 and 3
    "token_truncate": [[2.0, 1 / 3, 3.0, 1.0], [0.5, 0.5, 1.0, 1.0]],
    "token_mask": [[2.0, 0.0, 0.0, 1.0], [0.5, 0.5, 1.0, 1.0]],
    "sequence_truncate": [[2.0] * 4, [1 / 3] * 4],
    "sequence_mask": [[2.0] * 4, [0.0] * 4],
}


@pytest.mark.parametrize("poison", [0.0, 7.0, math.nan, math.inf])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_by_hand(name, poison):
    correction = CORRECTIONS[name]
    ratios = correction.ratios(RATIOS.log().masked_fill(~MASK, poison), MASK)
    found = correction.cut(ratios, 1 / 3, 3.0)
    torch.testing.assert_close(found, torch.tensor(BY_HAND[name]), rtol=1e-5, atol=0)
    assert found.shape == MASK.shape and correction.of_responses == name.startswith("sequence")


def test_what_is_cut_is_outside_of_the_bounds_and_they_belong_to_what_is_kept():
    ratios = torch.tensor([0.25, 0.5, 1.0, 2.0, 2.5])
    assert outside(ratios, 0.5, 2.0).tolist() == [True, False, False, False, True]
    assert CORRECTIONS["token_mask"].cut(ratios, 0.5, 2.0).tolist() == [0.0, 0.5, 1.0, 2.0, 0.0]
    assert CORRECTIONS["token_truncate"].cut(ratios, 0.0, 2.0).tolist() == [0.25, 0.5, 1.0, 2.0, 2.0]


def test_ratios_are_finite_whatever_is_between_the_policies():
    assert importance_ratios(torch.tensor([-200.0, 200.0])).tolist() == pytest.approx(
        [math.exp(-20), math.exp(20)], rel=1e-6
    )


def test_with_the_sampler_as_policy_every_correction_is_1():
    for correction in CORRECTIONS.values():
        assert (correction.cut(correction.ratios(torch.zeros(2, 4), MASK), 1.0, 1.0) == 1).all()
