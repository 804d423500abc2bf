"""What a gather of weights holds, by hand."""

from engine.memory.zero_memory import bucket_numbers
from engine.zero.gathering import GATHER_BUCKET


def test_what_is_received_and_sent():
    assert bucket_numbers(80, 10, world=4) == 80 + 20


def test_at_most_a_bucket_and_a_weight_that_no_longer_fits_into_it():
    assert bucket_numbers(10**10, 6, world=2) == 1.5 * (GATHER_BUCKET + 6)
