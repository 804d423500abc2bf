"""A check, what it is given and fills, what came of it, and the process in which it runs alone.

A check is a name, a time limit and a function of a `Trial`, to which it says what it found.
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, SKIPPED, NOT_RUN = "pass", "FAIL", "skipped", "not run"
Figure = float | int | str | bool
SO_FAR = "so_far.json"


class Skipped(Exception):
    """A check that this machine cannot make, and why; no failure."""


@dataclass
class Trial:
    """What a check is given, and what it fills.

    dry: there is no GPU, and models are tiny: the check goes through its logic and tells what it leaves out.
    folder: its own. models: a folder of models with random weights, which all checks share.
    figures: what it measured, by name. left_out: what needs CUDA and was not done. failures: what is wrong, in words.
    """

    dry: bool
    folder: Path
    models: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expect(self, condition: bool, otherwise: str) -> None:
        """Note a failure unless the condition holds; the check goes on."""
        if not condition:
            self.failures.append(otherwise)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is raised within is a failure of this part alone; the check goes on behind it.

        What was found so far is written to the folder's SO_FAR, for a check that does not live to tell.
        """
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            so_far = {"figures": self.figures, "left_out": self.left_out, "failures": self.failures}
            (self.folder / SO_FAR).write_text(json.dumps(so_far))

    def needs_gpu(self, what: str) -> bool:
        """Whether there is a GPU to do `what` with; where there is none, that is told."""
        if self.dry:
            self.left_out.append(what)
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
        trial.figures["most GB, allocated / reserved"] = f"{allocated / 1e9:.2f} / {reserved / 1e9:.2f}"


@dataclass(frozen=True, slots=True)
class Check:
    """target: "module:function", imported by the check's own process alone. arguments: of the function, behind the
    trial. least: seconds under which it is not worth beginning. limit: seconds after which it is ended. ranks: as many
    GPUs as it needs; unseen: what nothing shows where there are fewer."""

    name: str
    target: str
    arguments: tuple = ()
    least: float = 15.0
    limit: float = 60.0
    ranks: int = 1
    unseen: str = ""


@dataclass(slots=True)
class Outcome:
    """What came of a check. status: one of PASS, FAIL, SKIPPED, NOT_RUN. why: in words, unless it passed."""

    name: str
    status: str
    why: str = ""
    seconds: float = 0.0
    figures: dict[str, Figure] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def outcome_of(check: Check, trial: Trial) -> Outcome:
    """Make the check in this process."""
    started = time.monotonic()
    status, why = PASS, ""
    try:
        module, name = check.target.split(":")
        with peaks(trial), trial.part("raised"):
            getattr(importlib.import_module(module), name)(trial, *check.arguments)
    except Skipped as reason:
        status, why = SKIPPED, str(reason)
    if trial.failures:
        status, why = FAIL, "; ".join(trial.failures)
    return Outcome(check.name, status, why, time.monotonic() - started, trial.figures, trial.left_out)


def isolated(check: Check, *, dry: bool, output: Path, models: Path, limit: float) -> Outcome:
    """Make the check in a process of its own, which is ended with all it has started after `limit` seconds.

    Its output goes to OUTPUT/logs/NAME.txt; what it found to OUTPUT/checks/NAME.json, which survives whatever happens
    to later ones.
    """
    stem = check.name.replace(" ", "_")
    log, result = output / "logs" / f"{stem}.txt", output / "checks" / f"{stem}.json"
    folder = output / "work" / stem
    for path in (log.parent, result.parent, folder, models):
        path.mkdir(parents=True, exist_ok=True)
    job = {"check": asdict(check), "dry": dry, "folder": str(folder), "models": str(models), "result": str(result)}
    started = time.monotonic()
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.gpu_checks.check", json.dumps(job)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with_all_it_started_ended(process)
    seconds = time.monotonic() - started
    if code == 0 and result.exists():
        found = Outcome(**json.loads(result.read_text()))
        found.seconds = seconds
    else:
        ending = f"not done after {limit:.0f} s" if code is None else f"its process ended with {ended_by(code)}"
        found = Outcome(check.name, FAIL, f"{ending}; {last_line(log)}", seconds)
        if (folder / SO_FAR).exists():
            so_far = json.loads((folder / SO_FAR).read_text())
            found.figures, found.left_out = so_far["figures"], so_far["left_out"]
            found.why = "; ".join([found.why, *so_far["failures"]])
    result.write_text(json.dumps(asdict(found), indent=1))
    return found


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
    """Make one check here and write down what came of it."""
    words = job["check"]
    check = Check(**{**words, "arguments": tuple(words["arguments"])})
    trial = Trial(dry=job["dry"], folder=Path(job["folder"]), models=Path(job["models"]))
    found = outcome_of(check, trial)
    Path(job["result"]).write_text(json.dumps(asdict(found), indent=1))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an orderly exit of NCCL and gloo may abort though all is done


if __name__ == "__main__":
    from scripts.gpu_checks import check  # the module that checks import, too, so that their exceptions are known here

    check.main(json.loads(sys.argv[1]))
