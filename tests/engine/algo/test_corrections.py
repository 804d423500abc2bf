"""Corrections by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from engine.algo.corrections import CORRECTIONS, binary_kl, importance_ratios, outside

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
@pytest.mark.parametrize("name", BY_HAND)
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
    for correction in map(CORRECTIONS.get, BY_HAND):
        assert (correction.cut(correction.ratios(torch.zeros(2, 4), MASK), 1.0, 1.0) == 1).all()
    for name, _ in KEPT:
        ratios, cut = CORRECTIONS[name].weights(RATIOS, RATIOS, MASK, 0.0, 0.0)
        assert (ratios == 1).all() and not cut.any()


# Probabilities under policy and sampler. Total variations: 0.1, 0.02, and 0.002 at a ratio of 5. Binary KLs:
#  0.5 ln(0.5 / 0.6) + 0.5 ln(0.5 / 0.4) = 0.020411          0.5 ln(0.5 / 0.52) + 0.5 ln(0.5 / 0.48) = 0.000801
#  0.0005 ln(0.0005 / 0.0025) + 0.9995 ln(0.9995 / 0.9975) = -0.000805 + 0.002002 = 0.001197
# Their means over the three are 0.122 / 3 = 0.040667 and 0.022409 / 3 = 0.007470; over the second row 0 and 0.
PI, MU = torch.tensor([[0.6, 0.52, 0.0025], [0.3, 0.3, 0.3]]), torch.tensor([[0.5, 0.5, 0.0005], [0.3, 0.3, 0.3]])
DRAWN = torch.tensor([[True, True, True, False], [True, False, False, False]])
KEPT = {  # (name, upper bound): the tokens of the first row that keep their ratio of 1.2, 1.04 and 5
    ("token_tv", 0.05): [0, 1, 1],
    ("token_tv", 0.001): [0, 0, 0],
    ("token_binary_kl", 0.02): [0, 1, 1],
    ("token_binary_kl", 0.001): [0, 1, 0],
    ("sequence_tv", 0.041): [1, 1, 1],
    ("sequence_tv", 0.040): [0, 0, 0],
    ("sequence_binary_kl", 0.0075): [1, 1, 1],
    ("sequence_binary_kl", 0.0074): [0, 0, 0],
}


@pytest.mark.parametrize("poison", [0.0, 7.0, math.nan, -math.inf])
@pytest.mark.parametrize("name, highest", KEPT)
def test_ratios_are_kept_where_the_divergence_is_small(name, highest, poison):
    policy, sampler = (F.pad(one.log(), (0, 1)).masked_fill(~DRAWN, poison) for one in (PI, MU))
    found, cut = CORRECTIONS[name].weights(policy, sampler, DRAWN, 0.0, highest)
    kept = KEPT[name, highest]
    expected = [keep * ratio for keep, ratio in zip(kept, (1.2, 1.04, 5.0))]
    assert found[DRAWN].tolist() == pytest.approx([*expected, 1.0], rel=1e-4)
    assert cut[DRAWN].tolist() == [*(not keep for keep in kept), False]


def test_a_token_that_is_certain_has_a_finite_binary_kl():
    # mu 1 and pi 1/2: ln 2; mu 1/2 and pi 1 (kept at 1 - 1e-6): 0.5 ln 0.5 + 0.5 ln (0.5 / 1e-6) = 6.21
    found = binary_kl(torch.tensor([0.5, 1.0]).log(), torch.tensor([1.0, 0.5]).log())
    assert found.tolist() == pytest.approx([math.log(2), 0.5 * math.log(0.25 / 1e-6)], rel=0.02)
