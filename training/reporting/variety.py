"""Measures how varied texts are, by their words and by their compressed size. It needs no word list and no library.

A single number says little: compare it with an earlier number on the same prompts. Words are separated by spaces; in a
language without spaces a whole response is one word.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

N = 3  # number of words in the n-grams whose repetition is counted


def distinct_bigrams(texts: Iterable[str]) -> int:
    """The number of different pairs of neighbouring words in the texts. Both words of a pair are in the same text.

    The number falls when responses become alike. It grows with the number of texts, so compare equally many texts.
    """
    return len({pair for text in texts for pair in pairwise(text.split())})


def compressed_bytes(texts: Iterable[str]) -> int:
    """The number of bytes that the texts take when zlib compresses them together. A passage that several texts share
    counts about once."""
    return len(zlib.compress("\n".join(texts).encode("utf-8", "surrogatepass"), 9))


def new_words(texts: Sequence[str], first: Sequence[str], prompts: Sequence[str]) -> list[float]:
    """For each text the share of its new words; 0 if the text has no words. A word is new if it occurs in no prompt and
    in no `first` text of another prompt.

    prompts: the prompts, each with what an environment said behind it. texts: a response to each prompt. first: the
    response to each prompt before training. The `first` response to the same prompt is not considered, so that the same
    rule can be applied to the first responses themselves: their share shows how often an unchanged policy uses a word
    that no other text has. A policy that invents words has a higher share; the share of a policy that only learns to
    say other things in its language hardly rises.
    """
    texts_with = Counter(word for text in first for word in set(text.split()))
    known = {word for prompt in prompts for word in prompt.split()}
    shares = []
    for text, own in zip(texts, map(set, map(str.split, first)), strict=True):
        words = text.split()
        new = sum(word not in known and texts_with[word] == (word in own) for word in words)
        shares.append(new / max(len(words), 1))
    return shares


def repetition(texts: Sequence[str], n: int = N) -> float:
    """1 - (number of distinct n-grams) / (number of n-grams) of words; 0 if there are no n-grams. Both numbers are
    counted within each text and summed over the texts.

    An n-gram that one text repeats counts; an n-gram that occurs in two texts does not.
    """
    every = distinct = 0
    for text in texts:
        words = text.split()
        grams = [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]
        every, distinct = every + len(grams), distinct + len(set(grams))
    return 1 - distinct / every if every else 0.0
