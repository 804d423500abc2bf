"""The small generated corpus of the quickstart: film reviews from a grammar, and a judge that parses them.

    python -m training.tools.toy.reviews make --output_dir data [--seed 0]
    python -m training.tools.toy.reviews judge before.jsonl after.jsonl

The corpus needs no download. The grammar that writes reviews (grammar.py) can decide exactly whether a sample is well
formed and whether it is positive, which no reward model can. `distinct_bigrams` shows whether a policy lost variety.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from training.data.record_forms import Form
from training.data.row_selection import load_rows
from training.reporting.variety import distinct_bigrams
from training.runtime.environment import program
from training.tools.toy.grammar import EITHER, derive, pattern

SAMPLES = Form("sample", (("prompt", "response"),), lambda record, texts: texts, may_be_blank=True)


@dataclass(frozen=True, slots=True)
class Review:
    """A text of the grammar: its words are `prompt + response`, and the response begins with a space."""

    prompt: str
    response: str
    positive: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's verdict on a text. A text with mixed opinions or without opinions is neither positive nor
    negative."""

    grammatical: bool
    positive: bool
    negative: bool


_REVIEW = re.compile(pattern("prompt", EITHER) + pattern("response", EITHER))
# One expression for both sentiments: it matches "hardly moved us" as a whole, and not the "moved us" within it.
_OPINION = re.compile(rf"(?<!\S)(?:(?P<positive>{pattern('opinion', '+')})|(?P<negative>{pattern('opinion', '-')}))")


def generate_review(rng: random.Random, positive: bool) -> Review:
    """One random review of the given sentiment."""
    sign = "+" if positive else "-"
    prompt, response = (" ".join(derive(rng, symbol, sign)) for symbol in ("prompt", "response"))
    return Review(prompt, " " + response, positive)


def generate_reviews(count: int, seed: int, positive_fraction: float = 0.5) -> list[Review]:
    """`count` random reviews in random order, of which `positive_fraction`, rounded, are positive."""
    rng = random.Random(seed)
    sentiments = [i < round(count * positive_fraction) for i in range(count)]
    rng.shuffle(sentiments)
    return [generate_review(rng, positive) for positive in sentiments]


def judge(prompt: str, response: str) -> Verdict:
    """Judge whether prompt + response is a text of the grammar, and whether all opinions in the response agree.

    The two results are independent of each other: a fluent review with mixed opinions is grammatical, and an opinion
    also counts in a text that has grammatical mistakes elsewhere.
    """
    grammatical = _REVIEW.fullmatch(prompt + response + " ") is not None
    opinions = {match.lastgroup for match in _OPINION.finditer(response + " ")}
    return Verdict(grammatical, positive=opinions == {"positive"}, negative=opinions == {"negative"})


def summarize_responses(prompts: Sequence[str], responses: Sequence[str]) -> dict[str, float]:
    """The fractions of positive, negative and grammatical responses, and their distinct bigrams."""
    if not responses or len(prompts) != len(responses):
        raise ValueError(f"need one prompt per response and at least one, got {len(prompts)} and {len(responses)}")
    verdicts = [judge(prompt, response) for prompt, response in zip(prompts, responses)]
    fractions = {
        name: sum(getattr(verdict, name) for verdict in verdicts) / len(verdicts)
        for name in ("positive", "negative", "grammatical")
    }
    return fractions | {"distinct_bigrams": distinct_bigrams(responses)}


def make_corpus(seed: int, sft: int, pairs: int, prompts: int, eval_prompts: int) -> dict[str, list[dict[str, str]]]:
    """Returns {file name: its records}. The arguments after the seed say how many records each file gets. Each file has
    its own random stream."""
    streams = {name: random.Random(f"{seed} {name}") for name in ("sft", "pairs", "prompts", "eval_prompts")}

    def reviews(name: str, count: int) -> list[Review]:
        return generate_reviews(count, streams[name].getrandbits(64))

    def pair(prompt: str) -> dict[str, str]:
        chosen = generate_review(streams["pairs"], positive=True).response
        return {"prompt": prompt, "chosen": chosen, "rejected": _not_positive(streams["pairs"], prompt)}

    return {
        "sft.jsonl": [{"prompt": review.prompt, "response": review.response} for review in reviews("sft", sft)],
        "pairs.jsonl": [pair(review.prompt) for review in reviews("pairs", pairs)],
        "prompts.jsonl": [{"prompt": review.prompt} for review in reviews("prompts", prompts)],
        "eval_prompts.jsonl": [{"prompt": review.prompt} for review in reviews("eval_prompts", eval_prompts)],
    }


def _not_positive(rng: random.Random, prompt: str) -> str:
    """A response whose opinions are negative or mixed. If there were no mixed opinions in the pairs, a reward model
    would not learn to score them lower."""
    while True:
        response = " " + " ".join(derive(rng, "response", EITHER))
        if not judge(prompt, response).positive:
            return response


def refuse_non_empty(directory: Path, overwrite: bool) -> None:
    """Raise UserError if `directory` is not empty and may not be overwritten."""
    if not overwrite and directory.is_dir() and any(directory.iterdir()):
        raise UserError(f"--output_dir {directory} is not empty. Name another folder or add --overwrite.")


def write_files(directory: Path, files: Mapping[str, Sequence[dict]], overwrite: bool) -> None:
    """Write files of JSON lines. files: {name: its records}. Raises: UserError as `refuse_non_empty`."""
    refuse_non_empty(directory, overwrite)
    directory.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (directory / name).write_text(lines, encoding="utf-8")
        print(f"{directory / name}: {len(records)} records")


def run_make(args: argparse.Namespace) -> None:
    """Write the four files of the corpus."""
    corpus = make_corpus(args.seed, args.sft, args.pairs, args.prompts, args.eval_prompts)
    write_files(args.output_dir, corpus, args.overwrite)


def read_samples(path: Path) -> list[dict]:
    """The rows of a file of prompts and responses; unlike in training data, a response may be empty."""
    samples, _ = load_rows(str(path), SAMPLES, None, phase=3, seed=0)
    return list(samples)


def run_judge(args: argparse.Namespace) -> None:
    """Print one column of numbers per file, and for two files the ratio of their distinct bigrams."""
    files = [read_samples(path) for path in args.files]
    summaries = [
        {"responses": len(rows)} | summarize_responses(*zip(*((r["prompt"], r["response"]) for r in rows)))
        for rows in files
    ]
    width = max(12, *(len(path.name) + 2 for path in args.files))
    print(" " * 16 + "".join(f"{path.name:>{width}}" for path in args.files))
    for name in summaries[0]:
        cells = [summary[name] for summary in summaries]
        print(f"{name:16}" + "".join(f"{c:{width}.3f}" if isinstance(c, float) else f"{c:{width}}" for c in cells))
    if len(files) == 2:
        count = min(map(len, files))
        before, after = (distinct_bigrams(row["response"] for row in rows[:count]) for rows in files)
        ratio = f"{after / before:.3f}" if before else "undefined"
        print(f"distinct bigrams of the first {count} responses, second file to first: {ratio}")


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.tools.toy.reviews", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    make = commands.add_parser("make", help="write sft.jsonl, pairs.jsonl, prompts.jsonl and eval_prompts.jsonl")
    make.add_argument("--output_dir", type=Path, required=True)
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--overwrite", action="store_true", help="write even into a folder that is not empty")
    for name, count in (("sft", 8000), ("pairs", 3000), ("prompts", 4000), ("eval_prompts", 512)):
        make.add_argument(f"--{name}", type=int, default=count, help=f"records of {name}.jsonl (default %(default)s)")
    make.set_defaults(run=run_make)
    judge_parser = commands.add_parser("judge", help="count positive, negative and grammatical responses")
    judge_parser.add_argument("files", type=Path, nargs="+", help="JSON lines with prompt and response")
    judge_parser.set_defaults(run=run_judge)
    args = parser.parse_args(arguments)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
