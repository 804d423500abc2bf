"""Reward functions that --reward_function names without a file or a module: format and math_verify.

    Format()(prompts, ["<think>12 and 30</think><answer>42</answer>", "42"])      # [1.0, 0.0]; --response_format
    MathVerify("answer")(prompts, responses, answer=["1/2", "42"])                # [1.0, 0.0]

math_verify's package is an extra: pip install .[math].
"""

import contextlib
import importlib.util
import json
import os
import re
import selectors
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError, shortened

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # anything but another of the tags: nested and repeated ones are refused
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""Reasoning and an answer, each in its tags, once and in this order, and nothing beside them but white space.

Source: the format reward of DeepSeek-R1 (Guo et al. 2025, section 2.2.2 and table 1)."""


class Format:
    """1 where the whole response matches a regular expression, whose dot matches line breaks too, else 0.

    Raises: re.error for what is no regular expression.
    """

    def __init__(self, pattern: str = THINK_ANSWER):
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """One number a response."""
        return [float(self.pattern.fullmatch(response) is not None) for response in responses]


WORKER = Path(__file__).with_name("math_worker.py")
PACKAGE = "math_verify"
START_SECONDS = 300.0  # in which the process has to be there, on however busy a machine
SECONDS = 10.0  # for one response, after which the process is ended and the response has no right answer


class MathVerify:
    """1 where a response's last answer equals the row's, else 0; for no answer, and for one that takes too long.

    Both are parsed as LaTeX or plain expressions and compared by sympy: 1/2, 0.5 and \\frac{2}{4} are equal. An answer
    stands in \\boxed{}, between dollars or <answer> tags, or is the last expression of the text. It need not be worked
    out: 12 + 30 equals 42. One process of this rank does the work, so that what never ends can be ended.

    column: the data's column with the right answers, texts or numbers. seconds: for one response.
    Raises: UserError where the package is not installed.
    """

    def __init__(self, column: str, seconds: float = SECONDS):
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(
                f"--reward_function math_verify: the package math-verify is not installed in {sys.prefix}. "
                "Install it: pip install math-verify (or this project with its extra: pip install .[math])."
            )
        self.column, self.columns, self.seconds = column, (column,), seconds
        self._worker: _Worker | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """One number a response; columns: the answers, by the column's name.

        Raises: ValueError for an answer of the data's in which there is nothing to compare with.
        """
        with self._one_at_a_time:
            return [self._score(*pair) for pair in zip(columns[self.column], responses, strict=True)]

    def _score(self, answer: object, response: str) -> float:
        if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
            raise ValueError(f"column {self.column}: found {shortened(answer)}; needed a text or a number")
        if self._worker is None:
            self._worker = _Worker()
        said = self._worker.ask([str(answer), response], self.seconds)
        if said is None:
            self._worker.end()
            self._worker = None
            return 0.0
        if "problem" in said:
            raise ValueError(f"column {self.column}: {said['problem']}")
        return float(said["equal"])


class _Worker:
    """The process, in a session of its own, so that Ctrl-C on the run does not reach it. It ends with this one, whose
    end closes its input."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:surrogatepass"},
        )
        self.end = weakref.finalize(self, _end, self._process)  # called at the latest when this object goes
        self._read = b""
        ready = self._line(START_SECONDS)
        if ready is None or "ready" not in ready:
            self.end()
            raise RuntimeError((ready or {}).get("problem", f"{WORKER} was not there after {START_SECONDS:g} seconds"))

    def ask(self, pair: list[str], seconds: float) -> dict | None:
        """The process's result for [answer, response]; None if it gives none in that time, or has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(pair).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._line(seconds)

    def _line(self, seconds: float) -> dict | None:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None


def _end(process: subprocess.Popen) -> None:
    """Kill it, whatever it is doing."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not written any more
            pipe.close()  # type: ignore[union-attr]
    process.wait()


@dataclass(frozen=True, slots=True)
class BuiltInSettings:
    """The values of the flags of the same names, for built-in functions."""

    answer_column: str = "answer"
    response_format: str = THINK_ANSWER


BUILT_IN: dict[str, Callable[[BuiltInSettings], Callable]] = {
    "format": lambda settings: Format(settings.response_format),
    "math_verify": lambda settings: MathVerify(settings.answer_column),
}
