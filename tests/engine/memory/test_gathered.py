"""What a gather of weights holds, by hand."""

import pytest

from engine.memory.gathered import bucket_numbers
from engine.zero.gathering import GATHER_BUCKET


@pytest.mark.parametrize(
    "gpus, nodes, expected",
    [
        (4, 1, 80 + 20),  # received and sent
        (4, 2, 80 + 10 + 20),  # and the parts of two ranks, which came from the other node first
        (1, 4, 80 + 20),  # one rank a node: all at once
    ],
)
def test_what_is_sent_received_and_passed_on(gpus, nodes, expected):
    assert bucket_numbers(80, 10, gpus, nodes) == expected


def test_at_most_a_bucket_and_a_weight_that_no_longer_fits_into_it():
    assert bucket_numbers(10**10, 6, 2, 1) == 1.5 * (GATHER_BUCKET + 6)
