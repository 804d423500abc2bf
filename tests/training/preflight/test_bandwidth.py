"""Bandwidth and times of what was measured, by hand."""

import pytest

from engine.speed.measured import read
from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured

MIB = 1 << 20


def test_bandwidth_is_what_goes_through_a_link():
    gathered = Measured(ALL_GATHER, 4, {MIB: 1.0, 64 * MIB: 2.0})
    assert gathered.bandwidth == 3 / 4 * 64 * MIB / 2.0
    summed = Measured(ALL_REDUCE, 4, {MIB: 1.0, 64 * MIB: 2.0})
    assert summed.bandwidth == 2 * 3 / 4 * 64 * MIB / 2.0


def test_a_call_takes_a_start_and_so_much_a_byte():
    measured = Measured(ALL_GATHER, 2, {100: 3.0, 600: 9.0, 1100: 5.0})
    assert read(measured.curve, 0) == 3.0  # no fewer than of the smallest size
    assert read(measured.curve, 600) == pytest.approx(4.0)  # 2 ms a byte; what is between is noise
    assert read(measured.curve, 2100) == pytest.approx(7.0)
    assert read(Measured(ALL_GATHER, 2, {100: 3.0}).curve, 50) == 1.5  # nothing larger was tried
    assert read(Measured(ALL_GATHER, 2, {100: 3.0, 200: 2.0}).curve, 10_000) == 3.0  # noise
