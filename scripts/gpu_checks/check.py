"""A check, what came of it, and the process in which it runs alone."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from scripts.gpu_checks.peaks import peaks
from scripts.gpu_checks.trial import SO_FAR, Figure, Skipped, Trial

ROOT = Path(__file__).resolve().parents[2]
PASS, FAIL, SKIPPED, NOT_RUN = "pass", "FAIL", "skipped", "not run"


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
    main(json.loads(sys.argv[1]))
