"""Additions written step by step: data whose every line has a label, and a checker of the end as a reward function.

    python examples/chains.py --output_dir data           # docs/step_rewards.md goes on from there

To 7+5+9= the response is two lines, 7+5=12 and 12+9=21. A line is good if it and all lines before it are right. The
lines of steps.jsonl have mistakes: a wrong sum, a wrong number taken over, a line too many.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path


def right(prompts: list[str], responses: list[str], answer: list[str]) -> list[float]:
    """1 if the last line ends with the answer, and there are no more and no fewer lines than needed; else 0."""
    return [
        float(response.strip().count("\n") == text.count("\n") and response.strip().endswith("=" + text.split("=")[-1]))
        for response, text in zip(responses, answer, strict=True)
    ]


def lines_of(terms: Sequence[int]) -> list[str]:
    """The right lines for these terms."""
    total, lines = terms[0], []
    for term in terms[1:]:
        lines.append(f"{total}+{term}={total + term}")
        total += term
    return lines


def with_mistakes(terms: Sequence[int], random_numbers: random.Random) -> tuple[list[str], list[bool]]:
    """(lines in which about every fifth has a mistake, whether each line and all before it are right)."""
    total, lines = terms[0], []
    for term in terms[1:]:
        first, second = total, term
        kind = random_numbers.random()
        if kind < 0.05:
            first = max(first + random_numbers.choice((-10, -1, 1, 10)), 1)
        elif kind < 0.1:
            second = random_numbers.randint(1, 9)
        total = first + second
        if 0.1 <= kind < 0.25:
            total = max(total + random_numbers.choice((-10, -2, -1, 1, 2, 10)), 1)
        lines.append(f"{first}+{second}={total}")
    if random_numbers.random() < 0.15:
        term = random_numbers.randint(1, 9)
        lines.append(f"{total}+{term}={total + term}")
    wanted = [*lines_of(terms), ""]
    return lines, [lines[: place + 1] == wanted[: place + 1] for place in range(len(lines))]


def make_chains(seed: int, terms: int, sft: int, steps: int, prompts: int, eval_prompts: int) -> dict[str, list[dict]]:
    """{file name: its records}. terms: numbers that are added in each chain. The others: numbers of records."""
    random_numbers = random.Random(seed)
    seen: set[tuple[int, ...]] = set()

    def drawn() -> tuple[int, ...]:
        while (chain := tuple(random_numbers.randint(1, 9) for _ in range(terms))) in seen:
            pass
        seen.add(chain)
        return chain

    def prompt(chain: Sequence[int]) -> str:
        return "+".join(map(str, chain)) + "=\n"

    def asked(count: int) -> list[dict]:
        return [
            {"prompt": prompt(chain), "answer": "\n".join(lines_of(chain))} for chain in (drawn() for _ in range(count))
        ]

    files = {"sft.jsonl": [{"prompt": one["prompt"], "response": one["answer"]} for one in asked(sft)]}
    files["steps.jsonl"] = []
    for chain in (drawn() for _ in range(steps)):
        lines, labels = with_mistakes(chain, random_numbers)
        files["steps.jsonl"].append({"prompt": prompt(chain), "completions": lines, "labels": labels})
    return files | {"prompts.jsonl": asked(prompts), "eval_prompts.jsonl": asked(eval_prompts)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--terms", type=int, default=5, help="numbers in each chain (default %(default)s)")
    for name, count in (("sft", 2000), ("steps", 20000), ("prompts", 8000), ("eval_prompts", 256)):
        parser.add_argument(f"--{name}", type=int, default=count, help=f"records of {name}.jsonl (default {count})")
    args = vars(parser.parse_args(arguments))
    folder = args.pop("output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in make_chains(**args).items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / name).write_text(lines, encoding="utf-8")
        print(f"{folder / name}: {len(records)} records")


if __name__ == "__main__":
    main()
