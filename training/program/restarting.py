"""Runs a command again after it died, from its newest restart point: put this before it.

    python -m training.program.restarting --max_restarts 3 deepspeed training/step3_rlhf.py --save_steps 50 ...

`--resume auto` is added to the program's flags. The command is run again when it ends with any exit code but 0 (done),
2 (a mistake: the next try would end the same way) and 75 (asked to end), unless this process was asked to end itself.
It is run again at most --max_restarts times in a row without a new whole restart point: a run that goes on step by step
is not given up. TERM, INT, HUP and USR1 are passed on to the ranks on this machine, and the exit code is the command's.
"""

import contextlib
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from engine.errors import UserError, shown_command
from training.flags.yaml_file import read_yaml
from training.program.launchers import PROGRAMS, program_of
from training.restarts.layout import MANIFEST, points_in

FINAL = (0, 2, 75)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ENDING = 60.0  # seconds that a dead run's other processes have to go before they are killed
BETWEEN = 2.0  # seconds before the next start: ports are given back by then
SET_PARENT_DEATH_SIGNAL = 1  # linux/prctl.h, PR_SET_PDEATHSIG


def main(words: Sequence[str]) -> int:
    """Run the command as often as it takes; returns the exit code."""
    try:
        restarts, command = _parsed(words)
        output_dir = _output_dir(command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    used, run = 0, Run(command)
    for number in PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, run.pass_on)
    while True:
        before = newest_point(output_dir)
        code = run.once()
        if code in FINAL or run.asked:
            return code
        point = newest_point(output_dir)
        used = 0 if point != before else used
        if used == restarts:
            _say(f"the command ended with {_described(code)}, after {used} restarts without a new restart point.")
            return code
        used += 1
        where = f"from {point}" if point else "from the beginning: there is no restart point yet"
        _say(f"the command ended with {_described(code)}; restart {used} of {restarts}, {where}.")
        time.sleep(BETWEEN)


class Run:
    """One command and its processes. asked: whether this process was asked to end."""

    def __init__(self, command: Sequence[str]):
        self.command, self.asked = list(command), False
        self._process: psutil.Popen | None = None
        self._below: set[psutil.Process] = set()

    def once(self) -> int:
        """Run it and wait until all of its processes are gone; returns its exit code."""
        if self.asked:
            return 75
        self._process = psutil.Popen(self.command, preexec_fn=_end_with_parent, stdin=subprocess.DEVNULL)
        while self._process.poll() is None:
            self._look()
            time.sleep(0.5)
        _, alive = psutil.wait_procs(self._below, timeout=ENDING)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def pass_on(self, number: int, _) -> None:
        """Send a signal to the ranks; to the launcher where there are none yet."""
        self.asked = True
        if self._process is None:
            return
        self._look()
        for process in [rank for rank in self._below if _is_rank(rank)] or [self._process]:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _look(self) -> None:
        with contextlib.suppress(psutil.Error):
            self._below |= set(self._process.children(recursive=True))


def newest_point(output_dir: Path) -> Path | None:
    """The newest restart point that was written to its end."""
    return next((point for point in reversed(points_in(output_dir)) if (point / MANIFEST).is_file()), None)


def _parsed(words: Sequence[str]) -> tuple[int, list[str]]:
    """How many restarts, and the command with --resume auto among its program's flags."""
    usage = "Put `python -m training.program.restarting --max_restarts N` before a whole command."
    words = [part for word in words[:1] for part in word.split("=", 1)] + list(words[1:])
    if len(words) < 3 or words[0] != "--max_restarts":
        raise UserError(f"no --max_restarts and a command in {shown_command(words)!r}. {usage}")
    if not words[1].isdecimal():
        raise UserError(f"--max_restarts {words[1]}: give a whole number. {usage}")
    command = words[2:]
    place = next((place for place, word in enumerate(command) if _program(word) in PROGRAMS), None)
    if place is None:
        raise UserError(
            f"no program in {shown_command(command)!r}; it has to name one of {', '.join(PROGRAMS)}. {usage}"
        )
    if any(word.split("=")[0] == "--resume" for word in command[place + 1 :]):
        raise UserError(
            "--resume: the command is given --resume auto, which goes on from the newest point. Leave it out."
        )
    return int(words[1]), [*command[: place + 1], "--resume", "auto", *command[place + 1 :]]


def _program(word: str) -> str:
    path = Path(word)
    return path.stem if path.suffix == ".py" else word.removeprefix("training.")


def _output_dir(command: Sequence[str]) -> Path:
    """Where the command's program writes: its last --output_dir, or that of its --config."""
    given = dict(_flags(command))
    path = given.get("--output_dir")
    if path is None and "--config" in given:
        path = read_yaml(given["--config"]).get("output_dir")
    if not isinstance(path, str):
        raise UserError(f"no --output_dir in {shown_command(command)!r}. Give one, in the command or its --config.")
    return Path(path)


def _flags(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for place, word in enumerate(command):
        name, sign, value = word.partition("=")
        if name.startswith("--") and (sign or place + 1 < len(command)):
            yield name, value if sign else command[place + 1]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return _program(program_of(process.cmdline())) in PROGRAMS
    except psutil.Error:
        return False


def _end_with_parent() -> None:
    """In the launcher: end by TERM when this process is gone, however it went."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _described(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"exit code {code} ({signal.Signals(code - 128).name})"
    return f"exit code {code}"


def _say(message: str) -> None:
    print(f"restarting: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
