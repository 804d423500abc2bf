"""A check, what it is given and tells, what came of it, and the process in which it runs alone.

A check is a name, a time limit and a function of a `Trial`, to which it tells what it finds. What is told becomes a
line of JSON in the file FOUND at once, and so is kept if the session is cut off. All that is said of a check later is
read from its lines (`outcomes_of`).
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PASS = "pass"
FAIL = "FAIL"
SKIPPED = "skipped"
NOT_RUN = "not run"
RUNNING = "running"
Figure = float | int | str | bool
FOUND = "found.jsonl"


class Skipped(Exception):
    """A check that this machine cannot make, and why; no failure."""


@dataclass(frozen=True, slots=True)
class Check:
    """target: "module:function", imported by the check's own process alone. arguments: of the function, behind the
    trial. least: seconds under which it is not worth beginning. limit: seconds after which it is ended, without those
    of `Trial.first_time`, which may be as many again. ranks: as many GPUs as it needs; unseen: what nothing shows where
    there are fewer."""

    name: str
    target: str
    arguments: tuple = ()
    least: float = 15.0
    limit: float = 60.0
    ranks: int = 1
    unseen: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of a check, read from its lines.

    status: one of PASS, FAIL, SKIPPED, NOT_RUN, RUNNING. why: in words, unless it passed. seconds: of its process.
    failures, findings: what is wrong, and what is worth acting on though nothing is wrong; with each what it means and
    what to change, "" where that is not known. first: seconds of what was done for the first time, first_since: when
    what is under way began, else None. skipped: why the check cannot be made here. done: whether it came to its end.
    """

    name: str
    status: str = RUNNING
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    first: float = 0.0
    first_since: float | None = None
    skipped: str = ""
    done: bool = False

    def read(self, line: dict) -> None:
        """Add what a line tells."""
        self.figures |= line.get("figures", {})
        if "failure" in line:
            self.failures[line["failure"]] = line["then"]
        if "finding" in line:
            self.findings[line["finding"]] = line["then"]
        if line.get("left_out") not in (None, *self.left_out):
            self.left_out.append(line["left_out"])
        if "first time" in line:
            self.first += line.get("seconds", 0.0)
            self.first_since = None if "seconds" in line else line["at"]
        if "status" in line:
            self.status = line["status"]
            self.why = line["why"]
            self.seconds = line["seconds"]
        self.skipped = line.get("skipped", self.skipped)
        self.done = self.done or "done" in line


def outcomes_of(lines: Iterable[dict]) -> list[Outcome]:
    """What came of each check, in their order."""
    outcomes: dict[str, Outcome] = {}
    for line in lines:
        outcomes.setdefault(line["check"], Outcome(line["check"])).read(line)
    return list(outcomes.values())


def lines_of(folder: Path) -> list[dict]:
    """All whole lines in the FOUND of a folder."""
    path = folder / FOUND
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass
class Trial:
    """What a check is given, and to which it tells what it finds.

    dry: there is no GPU, and models are tiny: the check goes through its logic and tells what it leaves out.
    folder: its own. models: a folder of models with random weights, which all checks share.
    check: its name. output: the folder of FOUND; its own if there is no other. began: time.monotonic() at which lines
    count seconds from.
    """

    dry: bool
    folder: Path
    models: Path
    check: str = "check"
    output: Path | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def outcome(self) -> Outcome:
        """What came of the check so far."""
        found = [line for line in lines_of(self.output or self.folder) if line["check"] == self.check]
        return outcomes_of([{"check": self.check}, *found])[0]

    def line(self, **told: object) -> None:
        """Keep a line."""
        line = {"at": round(time.monotonic() - self.began, 2), "check": self.check, **told}
        with ((self.output or self.folder) / FOUND).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def tell(self, figures: dict[str, Figure]) -> None:
        """Note what was measured, by name."""
        self.line(figures=figures)

    def expect(self, condition: bool, otherwise: str, then: str = "") -> None:
        """Note a failure unless the condition holds; the check goes on. then: what it means, and what to change."""
        if not condition:
            self.line(failure=otherwise, then=then)

    def find(self, condition: bool, what: str, then: str) -> None:
        """Note a finding, which is no failure, if the condition holds. then: what it means, and what to change."""
        if condition:
            self.line(finding=what, then=then)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is raised within is a failure of this part alone; the check goes on behind it."""
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            then = "logs/ has the traceback. If a module is missing, carry its wheel, or look at PYTHONPATH"
            self.expect(False, f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", then)

    @contextlib.contextmanager
    def first_time(self, what: str) -> Iterator[None]:
        """Within is done for the first time what is done often later: a kernel meets a shape for which it makes a plan,
        a graph is captured, weights are made. The check's limit does not count it."""
        self.line(**{"first time": what})
        started = time.monotonic()
        try:
            yield
        finally:
            self.line(**{"first time": what, "seconds": round(time.monotonic() - started, 2)})

    def needs_gpu(self, what: str) -> bool:
        """Whether there is a GPU to do `what` with; where there is none, that is told."""
        if self.dry:
            self.line(left_out=what)
        return not self.dry


@contextlib.contextmanager
def peaks(trial: Trial) -> Iterator[None]:
    """Note the most bytes that tensors held, and that torch reserved for them, whoever begins torch's counts anew."""
    if trial.dry:
        yield
        return
    import torch  # takes seconds

    allocated = reserved = 0

    def look() -> None:
        nonlocal allocated, reserved
        allocated = max(allocated, torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())

    begin_anew = torch.cuda.reset_peak_memory_stats

    def looked_at_first(*args) -> None:
        look()
        begin_anew(*args)

    with mock.patch("torch.cuda.reset_peak_memory_stats", looked_at_first):
        yield
    look()
    if reserved:
        trial.tell({"most GB, allocated / reserved": f"{allocated / 1e9:.2f} / {reserved / 1e9:.2f}"})


def make(check: Check, trial: Trial) -> None:
    """Make the check in this process."""
    try:
        module, name = check.target.split(":")
        with peaks(trial), trial.part("raised"):
            getattr(importlib.import_module(module), name)(trial, *check.arguments)
    except Skipped as reason:
        trial.line(skipped=str(reason))
    trial.line(done=True)


def isolated(
    check: Check, trial: Trial, *, logs: Path, limit: float, left: float, heard: Callable[[], None]
) -> tuple[str, str]:
    """Make the check in a process of its own, which is ended with all it has started after `limit` seconds, to which
    the first times do not count (they may take as many again), and after `left` seconds in any case.

    Its output goes to LOGS/NAME.txt. heard: called often meanwhile, to follow its lines.
    Returns: (status, why).
    """
    for path in (logs, trial.folder, trial.models):
        path.mkdir(parents=True, exist_ok=True)
    log = logs / f"{trial.folder.name}.txt"
    job = {"check": asdict(check), "trial": asdict(trial)}
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.gpu_checks.check", json.dumps(job, default=str)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (code := process.poll()) is None:
                heard()
                first, now = first_times(trial), time.monotonic()
                if max(first, now - started - first) > limit or now - started > left:
                    break
                time.sleep(0.1)
        finally:
            with_all_it_started_ended(process)
    found = trial.outcome
    wrong = "; ".join(found.failures)
    if code == 0 and found.done:
        return (FAIL, wrong) if wrong else (SKIPPED, found.skipped) if found.skipped else (PASS, "")
    ending = f"not done after {min(limit, left):.0f} s, and {first:.0f} s of what it did for the first time"
    if code is not None:
        ending = f"its process ended with {ended_by(code)}"
    return FAIL, "; ".join(filter(None, [ending, last_line(log), wrong]))


def first_times(trial: Trial) -> float:
    """Seconds that the check has spent so far on what it does for the first time."""
    found = trial.outcome
    open_for = 0.0 if found.first_since is None else time.monotonic() - trial.began - found.first_since
    return found.first + open_for


def with_all_it_started_ended(process: subprocess.Popen) -> None:
    """Kill the process and its group, as far as they are still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended_by(code: int) -> str:
    """An exit code in words: negative ones are signals."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line of a log that says something, and where the rest is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else 'it said nothing'} ({log})"


def main(job: dict) -> None:
    """Make one check here."""
    words, given = job["check"], job["trial"]
    paths = {name: Path(given[name]) for name in ("folder", "models", "output")}
    make(Check(**{**words, "arguments": tuple(words["arguments"])}), Trial(**{**given, **paths}))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly exit of NCCL and gloo may abort though all is done


if __name__ == "__main__":
    from scripts.gpu_checks import check  # the module that checks import, too, so that their exceptions are known here

    check.main(json.loads(sys.argv[1]))
