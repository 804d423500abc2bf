"""How varied texts are, by their words and by what they compress to; a list of words is not needed.

Each number is compared with an earlier one, over the same prompts: alone it says little. Words are what stands between
spaces; where a language has none, a response is one word.
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

    Invented words make texts more varied by every count of what is different: this tells them apart.
    """
    words = [word for text in texts for word in text.split()]
    return sum(word in known for word in words) / len(words) if words else 1.0


def compressed_bytes(texts: Iterable[str]) -> int:
    """How many bytes the texts take when zlib compresses them together: what one shares with another counts once."""
    return len(zlib.compress("\n".join(texts).encode("utf-8", "surrogatepass"), 9))


def new_words(texts: Sequence[str], first: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """Of each text the share of its words that no prompt holds, nor any of the `first` texts but the one in the same
    place; 0 where it has no words.

    texts, first, prompts: one a prompt, in the same order; `first` are what the prompts were answered with before
    training. Leaving out the answer to the same prompt has the first texts judged by the same rule as later ones: what
    they have is how often an unchanged policy uses a word that so many texts do not hold. A policy that invents words
    has more of them; one that learns to say something else in its language hardly has.
    """
    texts_with = Counter(word for text in first for word in set(text.split()))
    known = {word for prompt in prompts for word in prompt.split()}
    shares = []
    for text, own in zip(texts, map(set, map(str.split, first)), strict=True):
        words = text.split()
        new = sum(word not in known and texts_with[word] == (word in own) for word in words)
        shares.append(new / max(len(words), 1))
    return shares
