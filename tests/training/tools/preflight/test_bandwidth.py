"""Bandwidth of what was measured, by hand."""

from training.tools.preflight.preflight import Timed, slower

MIB = 1 << 20


def test_bandwidth_is_what_goes_through_a_link():
    summed = Timed(4, {MIB: 1.0, 64 * MIB: 2.0})
    assert summed.bandwidth == 2 * 3 / 4 * 64 * MIB / 2.0
    assert str(summed) == "4 ranks: 0.0503 GB/s (1 MiB 1e+03 ms, 64 MiB 2e+03 ms)"


def test_nodes_at_less_than_half_of_the_others_rate_are_slow():
    assert slower([Timed(2, {MIB: seconds}) for seconds in (1.0, 4.0, 1.2)]) == [1]
    assert slower([]) == slower([Timed(2, {MIB: 4.0})]) == []
