"""Measured times beside what hardware should give, by hand."""

from dataclasses import replace

from tests.training.preflight.nodes import A100, healthy
from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured
from training.preflight.promised import lines, slower

MIB = 1 << 20


def test_known_hardware_says_what_it_should_give():
    nodes = [healthy(network_speed=12.5e9), healthy("gpu02", 2, network_speed=25e9)]
    # Within: 10 us, a step of 1.9 us, half of the bytes at 300 GB/s, of which 600 GB/s is both ways together.
    size, ideal = 300_000_000, 10e-6 + 1.9e-6 + 0.5e-3
    within = [[Measured(ALL_GATHER, 2, {size: 1.25 * ideal})], [Measured(ALL_GATHER, 2, {size: 4 * ideal})]]
    _, first, second = lines(nodes, [], within)
    assert first.startswith("  within gpu01: all-gather 234 GB/s (286 MiB 0.64 ms), 80% of what the hardware")
    assert "25% of what the hardware should give: SLOW, look at" in second
    assert slower([*nodes, healthy("gpu03", 4)], [within[0], within[1], within[0]]) == ["gpu02"]
    # Between: three quarters of the bytes at the slower node's 12.5 GB/s.
    between = 10e-6 + 2 * 1.9e-6 + 4e-6 + 0.75 * size / 12.5e9
    (_, told) = lines(nodes, [Measured(ALL_GATHER, 4, {size: 2.5 * between})], [])
    assert told.startswith("  between 2 nodes, 4 ranks: all-gather 5 GB/s (286 MiB 45 ms), 40% of what")


def test_of_unknown_hardware_only_what_was_measured_is_told():
    unknown = [healthy(cards=(replace(A100, name="Other"),)), healthy("gpu02", 2)]
    for nodes in (unknown, [healthy(), healthy("gpu02", 2)]):  # whose network tells nothing
        (_, told) = lines(nodes, [Measured(ALL_REDUCE, 4, {MIB: 1e-3})], [])
        assert told == "  between 2 nodes, 4 ranks: all-reduce 1.57 GB/s (1 MiB 1 ms)"
