"""Measured times in words, by hand."""

from tests.training.preflight.nodes import healthy
from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured
from training.preflight.promised import lines, slower

MIB = 1 << 20


def test_what_was_measured_is_told():
    nodes = [healthy(), healthy("gpu02", 2)]
    (_, told) = lines(nodes, [Measured(ALL_REDUCE, 4, {MIB: 1e-3})], [])
    assert told == "  between 2 nodes, 4 ranks: all-reduce 1.57 GB/s (1 MiB 1 ms)"


def test_a_node_at_less_than_half_of_the_others_rate_is_slow():
    nodes = [healthy(), healthy("gpu02", 2), healthy("gpu03", 4)]
    fast, slow = [Measured(ALL_GATHER, 2, {MIB: 1e-3})], [Measured(ALL_GATHER, 2, {MIB: 3e-3})]
    assert slower(nodes, [fast, slow, fast]) == ["gpu02"]
