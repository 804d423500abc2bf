"""Two-digit sums, and a calculator that the model may call: step 3 with a tool.

A model whose tokens are characters sees `17+25=`. It may answer at once, or write the call `[17+25]`; then `42=` is put
behind the call, and the model goes on. Only the right answer is rewarded. At first it calls in one of three cases
and can hardly add by itself; PPO finds out that a call pays. scripts/environments.sh runs all of this:

    python examples/calculator.py out/data                      # writes sft.jsonl, prompts.jsonl, eval_prompts.jsonl
    ... training/step3_rlhf.py --environment examples/calculator.py:Calculator --stop "]" ...
"""

import json
import re
import sys
from pathlib import Path

from engine.rollout import Reply
from training.tools.toy.sums import make_sums


class Calculator:
    """One conversation about one sum."""

    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, turn):
        call = re.fullmatch(r"\[(\d+)\+(\d+)\]", turn.text)
        if call:
            return f"{int(call[1]) + int(call[2])}="
        return Reply(reward=float(turn.text == str(self.answer)), done=True)


class CalculatorTools:
    """The same in the shape of TRL's `environment_factory`, for models with a chat template: methods are tools."""

    def reset(self, answer, **row):
        self.answer, self.reward = answer, 0.0

    def add(self, a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    def submit(self, number: int) -> str:
        """Hands in the answer.

        Args:
            number: The sum.
        """
        self.reward = float(number == self.answer)
        return "thank you"

    def get_reward(self):
        return self.reward


def make_data(folder: Path) -> None:
    """Write 1,000 sums with answers and 500 others with calls for step 1, 3,600 sums for step 3, and 500 held out."""
    files = make_sums(seed=0, sft=4000, eval_prompts=500)
    sums = files["sft.jsonl"]
    files["sft.jsonl"] = sums[:1000] + [turn for each in sums[-500:] for turn in turns_of(each)]
    folder.mkdir(parents=True)
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in records))


def turns_of(record: dict) -> list[dict]:
    """A call and the answer after it, as two records: step 1 does not learn to write what the calculator says."""
    call = f"[{record['prompt'].rstrip('=')}]"
    asked_again = f"{record['prompt']}{call}{record['response']}="
    return [{"prompt": record["prompt"], "response": call}, {"prompt": asked_again, "response": record["response"]}]


if __name__ == "__main__":
    make_data(Path(sys.argv[1]))
