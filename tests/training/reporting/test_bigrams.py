"""Pairs of neighbouring words, counted by hand."""

from training.reporting.bigrams import distinct_bigrams


def test_distinct_bigrams_counted_by_hand():
    # a-b, b-a, b-c; the pair across the two responses does not count, nor does a single word
    assert distinct_bigrams([" a b a b", " b c", " c"]) == 3
