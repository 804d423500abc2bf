"""A guessing game of several turns: find a digit in four guesses.

The model writes `5?` and is told `<` (the digit is lower) or `>` (it is higher). A wrong guess costs 0.1, the right one
brings 1. At first the model guesses at random; PPO teaches it to halve what is left, which finds any digit in four
guesses. scripts/environments.sh runs all of this:

    python examples/guessing_game.py out/data                   # writes sft.jsonl, prompts.jsonl, eval_prompts.jsonl
    ... training/step3_rlhf.py --environment examples/guessing_game.py:Game --max_turns 4 --stop "?" ...
"""

import json
import random
import sys
from pathlib import Path

from engine.rollout import Reply


class Game:
    """One game."""

    def __init__(self, row):
        self.digit = row["digit"]

    def step(self, turn):
        guess = turn.text.removesuffix("?")
        if not guess.isdecimal():
            return Reply(reward=-1.0, done=True)
        if int(guess) == self.digit:
            return Reply(reward=1.0, done=True)
        return Reply("<" if self.digit < int(guess) else ">", reward=-0.1)


def make_data(folder: Path, seed: int = 0) -> None:
    """Write 1,000 random games for step 1, prompts of 1,000 games for step 3, and of 500 to evaluate with."""
    rng = random.Random(seed)
    games = [{"prompt": "find it: ", "response": random_game(rng)} for _ in range(1000)]
    prompts = [{"prompt": "find it: ", "digit": rng.randrange(10)} for _ in range(1500)]
    folder.mkdir(parents=True)
    for name, records in {"sft": games, "prompts": prompts[:1000], "eval_prompts": prompts[1000:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))


def random_game(rng: random.Random) -> str:
    """Four guesses with what they are told, or fewer if one is right."""
    digit, text = rng.randrange(10), ""
    for _ in range(4):
        guess = rng.randrange(10)
        text += f"{guess}?"
        if guess == digit:
            break
        text += "<" if digit < guess else ">"
    return text


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
