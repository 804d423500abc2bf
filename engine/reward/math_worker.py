"""The worker process that compares answers with math-verify; `engine.reward.built_in.MathVerify` starts it.

    python -P engine/reward/math_worker.py

The worker reads lines of JSON, [answer, response]. For each line it writes a line {"equal": true or false} or
{"problem": a text}. The first line that it writes says that it is ready, or why it is not. It imports neither torch nor
other code of this project. math-verify limits its time by a signal. Python handles signals only in the main thread, and
only after a long single operation has ended. This is why math-verify runs in a process of its own, which the trainer's
process can kill.
"""

import json
import os
import re
import resource
import sys
from functools import lru_cache

MEMORY = 4 * 2**30  # the largest number of bytes of this process
SECONDS = 3  # the limit for one parsing and for one comparison; most take milliseconds
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
MARK = "####"  # stands before the answer in GSM8K's solutions


def answers_in(response: str) -> list[str]:
    """The texts in which a response's answer is searched: the text inside the last <answer> tags, as it is and as
    LaTeX. If the response has no such tags, the result is the whole response."""
    tagged = TAGGED.findall(response)
    return [response] if not tagged else [tagged[-1], f"${tagged[-1].strip()}$"]


@lru_cache(4096)
def parsed_answer(text: str) -> list:
    """The right answer, a text from the data, as math-verify parses it as LaTeX. If the text has GSM8K's mark, only the
    part after the mark is parsed. Empty if math-verify finds no answer."""
    from math_verify import parse

    return parse(f"${text.rpartition(MARK)[2].strip()}$", parsing_timeout=SECONDS)


def compared(answer: str, response: str) -> dict:
    """Returns {"equal": whether the last answer of the response equals the right answer}. An answer whose parsing takes
    too long counts as missing. Returns {"problem": a text} if the right answer cannot be parsed."""
    from math_verify import parse, verify

    expected = parsed_answer(answer)
    if not expected:
        return {"problem": f"math-verify finds no answer in {answer[:100]!r}, which is in the data"}
    found = [part for text in answers_in(response) for part in parse(text, parsing_timeout=SECONDS)]
    return {"equal": bool(verify(expected, found, timeout_seconds=SECONDS))}


def main() -> None:
    """Read lines from the input and reply to each, until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, not into the replies
    try:
        import math_verify  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        print(json.dumps({"problem": f"importing math_verify raised {type(error).__name__}: {error}"}), file=answers)
        return
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            said = compared(*json.loads(line))
        except Exception as error:  # sympy raises many kinds
            said = {"equal": False, "raised": repr(error)[:200]}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
