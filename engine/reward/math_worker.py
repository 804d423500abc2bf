"""The process that compares answers by math-verify, one a line; `engine.reward.built_in.MathVerify` starts it.

    python -P engine/reward/math_worker.py

It reads [answer, response] as JSON, a line each, and writes {"equal": true or false}, or {"problem": in words}. The
first line that it writes says that it is ready, or why it is not. It imports nothing of ours, and torch not at all.
math-verify limits its time by a signal, which reaches the main thread alone, and not what one long operation of
Python's is busy with: so it has a process of its own, which the one that asks may kill.
"""

import json
import os
import re
import resource
import sys
from functools import lru_cache

MEMORY = 4 * 2**30  # bytes that this process may take
SECONDS = 3  # for one parsing, and for one comparison; most take milliseconds
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MARK = "####"  # before the answer in GSM8K's solutions


def answers_in(response: str) -> list[str]:
    """The texts in which a response's answer is looked for: the inside of its last <answer> tags, as it is and as
    LaTeX; without such tags the whole response."""
    tagged = TAGGED.findall(response)
    return [response] if not tagged else [tagged[-1], f"${tagged[-1].strip()}$"]


@lru_cache(4096)
def parsed_answer(text: str) -> list:
    """What the data say, as math-verify parses it: LaTeX, where it stands as a formula or as it is; behind GSM8K's
    mark where there is one. Empty where nothing is found."""
    from math_verify import parse

    return parse(f"${text.rpartition(MARK)[2].strip()}$", parsing_timeout=SECONDS)


def compared(answer: str, response: str) -> dict:
    """Whether the last answer of a response equals the data's; no answer in time is none."""
    from math_verify import parse, verify

    expected = parsed_answer(answer)
    if not expected:
        return {"problem": f"math-verify finds no answer in {answer[:100]!r}, which stands in the data"}
    found = [part for text in answers_in(response) for part in parse(text, parsing_timeout=SECONDS)]
    return {"equal": bool(verify(expected, found, timeout_seconds=SECONDS))}


def main() -> None:
    """Answer lines until there are no more."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    try:
        import math_verify  # noqa: F401
    except Exception as error:  # whatever is wrong with its installation
        print(json.dumps({"problem": f"importing math_verify raised {type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            said = compared(*json.loads(line))
        except Exception as error:  # sympy has many
            said = {"equal": False, "raised": repr(error)[:200]}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
