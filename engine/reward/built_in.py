"""The built-in reward functions, format and math_verify. --reward_function takes them by name, without a file or a
module.

    Format()(prompts, ["<think>12 and 30</think><answer>42</answer>", "42"])      # [1.0, 0.0]; --response_format
    MathVerify("answer")(prompts, responses, answer=["1/2", "42"])                # [1.0, 0.0]

The package that math_verify needs is an extra: pip install .[math].
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

_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"  # text without one of these tags: nested and repeated tags are refused
THINK_ANSWER = rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*"
"""Matches reasoning in <think> tags followed by an answer in <answer> tags, each once, with nothing else in the
response but white space.

Source: the format reward of DeepSeek-R1 (Guo et al. 2025, section 2.2.2 and table 1)."""


class Format:
    """1 for a response that matches a regular expression as a whole, else 0. The dot of the expression matches line
    breaks too.

    Raises: re.error if `pattern` is not a regular expression.
    """

    def __init__(self, pattern: str = THINK_ANSWER):
        self.pattern = re.compile(pattern, re.DOTALL)

    def __call__(self, prompts: list[str], responses: list[str]) -> list[float]:
        """One number a response."""
        return [float(self.pattern.fullmatch(response) is not None) for response in responses]


WORKER = Path(__file__).with_name("math_worker.py")
PACKAGE = "math_verify"
START_SECONDS = 300.0  # within which the worker process has to be ready, even on a busy machine
SECONDS = 10.0  # for one response; after this time the worker process is killed and the response counts as wrong


class MathVerify:
    """1 for a response whose last answer equals the answer in the data, else 0. A response without an answer, or whose
    comparison takes too long, gets 0 too.

    Both answers are parsed as LaTeX or as plain expressions and compared by sympy: 1/2, 0.5 and \\frac{2}{4} are equal.
    The answer of a response is in \\boxed{}, between dollar signs or in <answer> tags, or is the last expression of the
    text. It need not be evaluated: 12 + 30 equals 42. Each rank has a worker process for the comparisons, so that a
    comparison that never ends can be killed.

    column: the column of the data with the right answers, which are texts or numbers. seconds: the time limit for one
    response.
    Raises: UserError if the package math-verify is not installed.
    """

    def __init__(self, column: str, seconds: float = SECONDS):
        if importlib.util.find_spec(PACKAGE) is None:
            raise UserError(
                f"--reward_function math_verify: the package math-verify is not installed in {sys.prefix}. "
                "Install it: pip install math-verify (or this project with its extra: pip install .[math])."
            )
        self.column = column
        self.columns = (column,)
        self.seconds = seconds
        self._worker: _Worker | None = None
        self._one_at_a_time = threading.Lock()

    def __call__(self, prompts: list[str], responses: list[str], **columns: list) -> list[float]:
        """One number for each response. columns: {the column's name: the right answers}.

        Raises: ValueError if math-verify finds no answer in a value of the data's column.
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
    """The worker process that compares answers. It has a session of its own, so that Ctrl-C on the run does not reach
    it. It ends when the trainer's process ends, because its input is closed then."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8:surrogatepass"},
        )
        self.end = weakref.finalize(self, _end, self._process)  # called at the latest when this object is deleted
        self._read = b""
        ready = self._line(START_SECONDS)
        if ready is None or "ready" not in ready:
            self.end()
            raise RuntimeError((ready or {}).get("problem", f"{WORKER} was not there after {START_SECONDS:g} seconds"))

    def ask(self, pair: list[str], seconds: float) -> dict | None:
        """The worker's result for `pair`, [answer, response]; None if the worker does not reply within `seconds`, or
        has ended."""
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
    """Kill the worker process, whatever it is doing."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # closing flushes bytes that can no longer be written
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
