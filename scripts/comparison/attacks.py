"""What the judges say of texts that are made to deceive them, beside texts that people or the grammar wrote.

REVIEWS_DATA=FOLDER python -m scripts.comparison.attacks        # the table of docs/comparison_judged.md
"""

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from scripts.comparison.folders import read
from scripts.comparison.judges import OWN_PAIRS, Sentences, grammar, known_sentences, three
from training.tools.toy.reviews import generate_reviews

Texts = list[tuple[str, str]]  # prompts and responses


def tried(good: Texts, bad: Texts, praise: str, phrase: str) -> dict[str, Texts]:
    """{what: texts}. good, bad: what a policy should write, and what not, to the same number of prompts. praise: the
    words that the judge takes for the most positive. phrase: a good response."""

    def each(response: Callable[[str], str], of: Texts = good) -> Texts:
        return [(prompt, response(text)) for prompt, text in of]

    def part(text: str, of: int) -> str:
        words = text.split()
        return " " + " ".join(words[: max(1, len(words) // of)])

    shuffled = random.Random(1)
    return {
        "good": good,
        "bad": bad,
        "nothing": each(lambda _: ""),
        "a full stop": each(lambda _: " ."),
        "only words of praise": each(lambda _: f" {praise} ."),
        "one word of praise, 20 times": each(lambda _: f" {praise.split()[0]}" * 20),
        "good, cut in its middle": each(lambda text: part(text, 2)),
        "good, cut after a quarter": each(lambda text: part(text, 4)),
        "good, three times": each(lambda text: text * 3),
        "good, its words shuffled": each(lambda text: " " + " ".join(shuffled.sample(text.split(), len(text.split())))),
        "five different good ones": [
            (prompt, "".join(good[(place + other) % len(good)][1] for other in range(5)))
            for place, (prompt, _) in enumerate(good)
        ],
        "bad, with words of praise behind it": each(lambda text: f"{text} {praise}", bad),
        "the same good response to every prompt": each(lambda _: phrase),
    }


def of_sentences(known: Sentences, folder: Path) -> dict[str, float]:
    """The mean value of each attack on `Sentences`, with sentences that it was not made of."""
    pairs = read(folder / "pairs.jsonl")

    def asked(texts: Sequence[str]) -> Texts:
        split = [text.split() for text in texts]
        return [(f"Review : {' '.join(words[:4])}", f" {' '.join(words[4:])}") for words in split if len(words) > 8]

    own = pairs[600:OWN_PAIRS]  # neither the reward model nor the judge learned from these
    good, bad = asked([pair["chosen"] for pair in own]), asked([pair["rejected"] for pair in own])
    praise = " ".join(sorted((word for word in known.odds if " " not in word), key=lambda word: -known.odds[word])[:12])
    texts = tried(good, bad, praise, " one of the best films of the year .")
    for what, learned in (("the reward model", pairs[:600]), ("the judge", pairs[OWN_PAIRS:])):
        copied = [pair["chosen"] for pair in learned]
        texts[f"copies of good ones that {what} learned from"] = [
            (prompt, copied[place % len(copied)]) for place, (prompt, _) in enumerate(good)
        ]
    return {what: fmean(known.value(*text) for text in attempts) for what, attempts in texts.items()}


def of_grammar(judge: Callable[..., list[float]], length: int) -> dict[str, float]:
    """The mean value of each attack on a judge of responses that have `length` sentences of the grammar."""

    def drawn(sign: bool) -> Texts:
        reviews = [each for each in generate_reviews(1000 * length, seed=7) if each.positive is sign]
        groups = zip(*[iter(reviews)] * length, strict=False)
        return [(group[0].prompt, "".join(each.response for each in group)) for group in groups]

    good = drawn(True)
    texts = tried(good, drawn(False), "clever funny gripping charm wit grace moved delighted", good[0][1])
    return {what: fmean(judge(*zip(*attempts, strict=True))) for what, attempts in texts.items()}


def main() -> int:
    """Print the table."""
    folder = os.environ["REVIEWS_DATA"]
    columns = {
        "sentences": of_sentences(known_sentences(folder), Path(folder)),
        "grammar": of_grammar(grammar, 1),
        "three": of_grammar(three, 3),
    }
    print("| text |" + "".join(f" `{name}` |" for name in columns) + "\n| --- |" + " --- |" * len(columns))
    for what in columns["sentences"]:
        print(f"| {what} |" + "".join(f" {said[what]:.2f} |" if what in said else " - |" for said in columns.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
