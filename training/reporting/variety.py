"""How varied texts are, by their words and by how far they compress. It needs no list of words, and no library.

Compare each number with an earlier one over the same prompts: alone it says little. Words are separated by spaces; in
a language without spaces a whole response is one word.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise


def distinct_bigrams(texts: Iterable[str]) -> int:
    """How many different pairs of neighbouring words the texts hold, pairs within one text only.

    It falls when responses become alike, and grows with their number: compare equal numbers.
    """
    return len({pair for text in texts for pair in pairwise(text.split())})


def words_of(texts: Iterable[str]) -> set[str]:
    """All words that the texts hold."""
    return {word for text in texts for word in text.split()}


def known_share(texts: Iterable[str], known: Collection[str]) -> float:
    """The share of the texts' words that are known; 1 where they have none.

    Invented words raise every count of distinct words or pairs; this share tells them from real variety.
    """
    words = [word for text in texts for word in text.split()]
    return sum(word in known for word in words) / len(words) if words else 1.0


def compressed_bytes(texts: Iterable[str]) -> int:
    """How many bytes the texts take when zlib compresses them together: passages that texts share count once."""
    return len(zlib.compress("\n".join(texts).encode("utf-8", "surrogatepass"), 9))


def new_words(texts: Sequence[str], first: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """For each text the share of its words that occur in no prompt and in no `first` text but the one at the same
    place; 0 where it has no words.

    texts, first, prompts: one per prompt, in the same order; `first` are the responses before training. The response
    to the same prompt is left out so that the first texts are judged by the same rule as later ones: their share says
    how often an unchanged policy uses a word that all other texts lack. A policy that invents words has a higher share;
    one that learns to say other things in its language hardly has.
    """
    texts_with = Counter(word for text in first for word in set(text.split()))
    known = {word for prompt in prompts for word in prompt.split()}
    shares = []
    for text, own in zip(texts, map(set, map(str.split, first)), strict=True):
        words = text.split()
        new = sum(word not in known and texts_with[word] == (word in own) for word in words)
        shares.append(new / max(len(words), 1))
    return shares
