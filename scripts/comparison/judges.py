"""Judges: what they say of a response is in no run's reward, and they share no weights and no data with reward models.

They are functions for --reward_function, with --reward_weights 0 where they only measure.
"""

import json
import math
import os
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

from training.tools.toy.reviews import judge

OWN_PAIRS = 2000  # of pairs.jsonl: their sentences are the SFT model's, the first 600 pairs the reward model's
BEGIN, END = "<begin>", "<end>"
WORDS = 200_000  # that English may have: the share of words never seen is divided among them


def grammar(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """1 for a text of the quickstart's grammar in which all opinions are positive, else 0. It is exact."""
    verdicts = map(judge, prompts, responses)
    return [float(verdict.grammatical and verdict.positive) for verdict in verdicts]


def three(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The share of right sentences in responses of three: those that `grammar` gives 1 behind a prompt. More sentences,
    or a rest behind the last one, count as sentences that are not right."""
    found = []
    for prompt, response in zip(prompts, responses, strict=True):
        parts = re.findall(r".*?\s\.(?!\S)|.+$", response, re.DOTALL)
        found.append(sum(grammar([prompt] * 3, parts[:3])) / max(3, len(parts)))
    return found


def sentences(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """`Sentences.value` of each response, by the pairs of the folder REVIEWS_DATA that no model of the task learned
    from."""
    known = known_sentences(os.environ["REVIEWS_DATA"])
    return [known.value(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]


@cache
def known_sentences(folder: str) -> "Sentences":
    """Of the pairs that no model of the task learned from, read once."""
    lines = (Path(folder) / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[OWN_PAIRS:]
    pairs = [json.loads(line) for line in lines]
    return Sentences([pair["chosen"] for pair in pairs], [pair["rejected"] for pair in pairs])


class Sentences:
    """Counts of words in positive and negative sentences, without a neural network.

    The value of a response is the product of four numbers from 0 to 1, so that none makes up for another:
    positive: the probability by naive Bayes on its words and pairs of neighbouring words, each counted once;
    fluent: exp(l - cap), at most 1, where l is the mean log-probability of a word, the end included, by a trigram model
        (Witten and Bell's interpolation), and cap the median of l in every tenth sentence, which was not counted;
    varied: distinct pairs of neighbouring words, divided by the number of pairs;
    whole: a half where the last word is none that mostly ends sentences, as of a response that was cut, else 1; times
        ten times the share of sentences that are as short, or that are as long, prompt included, but at most 1.
    """

    def __init__(self, positive: Sequence[str], negative: Sequence[str]):
        self.odds = _log_odds(positive, negative)
        texts = [text for pair in zip(positive, negative, strict=True) for text in pair]
        self.counts: Counter[tuple[str, ...]] = Counter()  # of words, pairs and triples
        self.total: Counter[tuple[str, ...]] = Counter()  # of what follows a context
        self.kinds: Counter[tuple[str, ...]] = Counter()  # of different words that follow it
        for number, text in enumerate(texts):
            if number % 10:
                self._count(text.split())
        held_out = sorted(self.log_likelihood([], text.split()) for text in texts[::10])
        self.cap = held_out[len(held_out) // 2]
        self.lengths = sorted(len(text.split()) for text in texts)

    def _count(self, words: list[str]) -> None:
        padded = [BEGIN, BEGIN, *words, END]
        for end in range(3, len(padded) + 1):
            for size in (1, 2, 3):
                gram = tuple(padded[end - size : end])
                self.kinds[gram[:-1]] += not self.counts[gram]
                self.counts[gram] += 1
                self.total[gram[:-1]] += 1

    def probability(self, gram: tuple[str, ...]) -> float:
        """Of a word behind up to two others: counts, and for what was not counted the shorter context."""
        shorter = self.probability(gram[1:]) if len(gram) > 1 else 1 / WORDS
        kinds = self.kinds[gram[:-1]]
        return (self.counts[gram] + kinds * shorter) / (self.total[gram[:-1]] + kinds) if kinds else shorter

    def log_likelihood(self, before: list[str], words: list[str]) -> float:
        """Mean log-probability of a word behind `before`, the end included."""
        padded = [BEGIN, BEGIN, *before, *words, END]
        ends = range(len(before) + 3, len(padded) + 1)
        return sum(math.log(self.probability(tuple(padded[end - 3 : end]))) for end in ends) / len(ends)

    def whole(self, words: list[str]) -> float:
        """Whether a text is as long as sentences are, and ends like them."""
        ends = bool(words) and 2 * self.counts[words[-1], END] > self.total[words[-1],]
        shorter, longer = bisect_right(self.lengths, len(words)), bisect_left(self.lengths, len(words))
        tail = min(shorter, len(self.lengths) - longer) / len(self.lengths)
        return min(1.0, 10 * tail) * (1.0 if ends else 0.5)

    def parts(self, prompt: str, response: str) -> tuple[float, float, float, float]:
        """(positive, fluent, varied, whole) of a response."""
        words, first = (prompt + response).split(), len(prompt.split())
        if response[:1].strip():  # it goes on from the prompt's last word
            first -= 1
        before, own = words[1 + words.index(":") if ":" in words else 0 : first], words[first:]
        sentiment = sum(self.odds.get(feature, 0.0) for feature in _features(own))
        fluent = math.exp(min(self.log_likelihood(before, own) - self.cap, 0.0))
        pairs = list(pairwise(own))
        varied = len(set(pairs)) / len(pairs) if pairs else 1.0
        return 1 / (1 + math.exp(-sentiment)), fluent, varied, self.whole(before + own)

    def value(self, prompt: str, response: str) -> float:
        """The product of the parts."""
        return math.prod(self.parts(prompt, response))


def _features(words: Sequence[str]) -> set[str]:
    return {*words, *map(" ".join, pairwise(words))}


def _log_odds(positive: Iterable[str], negative: Iterable[str]) -> dict[str, float]:
    """log of how much likelier a sentence with this word or pair is positive, from counts of sentences plus 1."""
    yes, no = (Counter(each for text in texts for each in _features(text.split())) for texts in (positive, negative))
    return {each: math.log((yes[each] + 1) / (no[each] + 1)) for each in {*yes, *no}}
