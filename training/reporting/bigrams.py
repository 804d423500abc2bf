"""How varied texts are, by their pairs of neighbouring words."""

from collections.abc import Iterable
from itertools import pairwise


def distinct_bigrams(texts: Iterable[str]) -> int:
    """How many different pairs of neighbouring words the texts hold, pairs within one text only.

    It falls when responses become alike, and grows with their number: compare equal numbers.
    """
    return len({pair for text in texts for pair in pairwise(text.split())})
