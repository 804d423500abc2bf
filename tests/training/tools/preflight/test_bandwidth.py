"""Bandwidth of what was measured, by hand."""

from training.tools.preflight.preflight import Timed

MIB = 1 << 20


def test_bandwidth_is_what_goes_through_a_link():
    summed = Timed(4, {MIB: 1.0, 64 * MIB: 2.0})
    assert summed.bandwidth == 2 * 3 / 4 * 64 * MIB / 2.0
    assert str(summed) == "4 ranks: 0.0503 GB/s (1 MiB 1e+03 ms, 64 MiB 2e+03 ms)"
