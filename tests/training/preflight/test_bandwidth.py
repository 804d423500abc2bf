"""Bandwidth and times of what was measured, by hand."""

from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured

MIB = 1 << 20


def test_bandwidth_is_what_goes_through_a_link():
    gathered = Measured(ALL_GATHER, 4, {MIB: 1.0, 64 * MIB: 2.0})
    assert gathered.bandwidth == 3 / 4 * 64 * MIB / 2.0
    summed = Measured(ALL_REDUCE, 4, {MIB: 1.0, 64 * MIB: 2.0})
    assert summed.bandwidth == 2 * 3 / 4 * 64 * MIB / 2.0
