"""One training run after the other, or several side by side, each in one process; what is done is not done again.

A run's folder is named by its command, so that another command is another run, and holds trained.json when training has
ended, result.json when its policies have been judged, and in between the policies themselves.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.atomic_files import write_whole
from engine.errors import UserError
from scripts.comparison.entries import TRL, Entry, program, step3_words
from scripts.comparison.frontier import Point
from scripts.comparison.tasks import HELD_OUT, Task
from scripts.harness import ROOT
from training.checkpoints.files import CHECKPOINTS
from training.reporting.run_record import METRICS_FILE, read_metrics
from training.runtime.watch import STOPPED
from training.tools.export.model_folder import export

OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that each process does without: two with one port could not run side by side."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Its exit code, the CPU seconds of it and of what it started, and the seconds of the clock."""

    code: int
    cpu_seconds: float
    seconds: float


_running: set[subprocess.Popen] = set()


@contextlib.contextmanager
def ended_with_us() -> Iterator[None]:
    """At TERM, programs that run are killed: a later comparison would meet them in its folders."""

    def end(number: int, _: object) -> None:
        for process in list(_running):
            process.kill()
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_program(command: Sequence[str], log: Path) -> Ended:
    """Run a command in the repository, where it finds the project's packages; what it prints goes into `log`."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    began = time.perf_counter()
    with log.open("w") as printed:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        _running.add(process)
        try:
            _, status, used = os.wait4(process.pid, 0)
        finally:
            _running.discard(process)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, used.ru_utime + used.ru_stime, time.perf_counter() - began)


def reason(log: Path) -> str:
    """Why a program broke off: the line that says so, or else the last one."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("stopped: ")), lines[-1] if lines else "")


POLICIES = "policies"
LINE_SCALES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)
"""Of the change from the SFT model to a run's last policy: WARP's last stage (arXiv:2406.16768, section 3)."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run to be made, or made already. home: the folder of the comparison."""

    task: Task
    entry: Entry
    models: Path
    home: Path
    rate: float
    seed: int

    @property
    def words(self) -> list[str]:
        """Its command without the output folder, relative to that of the models, which may stand anywhere."""
        return step3_words(self.entry, self.task, self.models, rate=self.rate, seed=self.seed, steps=self.task.steps)

    @property
    def folder(self) -> Path:
        """Where it is; another command has another folder."""
        words = json.dumps([word.replace(str(self.models), "{models}") for word in self.words])
        digest = hashlib.sha256(words.encode()).hexdigest()[:8]
        name = f"rate{self.rate:g}_seed{self.seed}_steps{self.task.steps}_{digest}"
        return self.home / "runs" / self.task.name / self.entry.folder / name

    def read(self, name: str) -> dict[str, Any] | None:
        """One of its files; None if it is not there."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def result(self) -> "Result":
        """What came of it; it must have been judged."""
        found = self.read("result")
        assert found is not None, f"{self.folder} has no result yet"
        return Result(**found)


@dataclass(frozen=True, slots=True)
class Result:
    """ended: whether it came to its end, `why` not; responses drawn; CPU seconds of its process, start included, and
    seconds of its clock; evaluations: measures of each, the SFT model's first; line: of models from the SFT model to
    the last policy."""

    ended: bool
    why: str
    responses: int
    cpu_seconds: float
    seconds: float
    evaluations: list[dict[str, float]]
    line: list[dict[str, float]]

    def rows(self, line: bool) -> list[dict[str, float]]:
        """The measures on the line, or of the evaluations; the SFT model is the reference, so that its KL is 0, and
        what a judge says is in standard deviations of the SFT model's responses above their mean."""
        first, *later = self.line if line else self.evaluations
        rows = [first | {"kl": 0.0}, *later]
        if "judge" not in first:
            return rows
        std = first["judge_std"] or 1.0
        return [row | {"judge": (row["judge"] - first["judge"]) / std} for row in rows]

    def course(self, line: bool, measure: str = "score") -> list[Point]:
        """A measure against KL."""
        return [Point(row["kl"], row[measure]) for row in self.rows(line)]


def write_json(path: Path, content: object) -> None:
    """The whole file or none of it."""
    write_whole(path, json.dumps(content, indent=1) + "\n")


def complete(runs: Sequence[Run], jobs: int) -> None:
    """Train what has not been trained, `jobs` at a time, and judge what has not been judged.

    Raises: UserError for a command that cannot run, and where the judge fails.
    """
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(train, [run for run in runs if run.read("result") is None and run.read("trained") is None]))
    waiting = [run for run in runs if run.read("result") is None]
    for run in waiting:
        with contextlib.redirect_stdout(io.StringIO()):  # which points are read
            keep_policies(run)
    if waiting:
        judge(waiting)


def train(run: Run) -> None:
    """Start a run and wait for it.

    A run that breaks off in its middle is a result too: a rate that is too high does that. Raises: UserError where it
    could not begin.
    """
    folder, command = run.folder, [*program(run.entry), *run.words]
    if folder.exists():
        shutil.rmtree(folder)  # of a run of this very command that was cut off
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    print(f"{run.task.name}, {run.entry.label}, rate {run.rate:g}, seed {run.seed}: {run.task.steps} steps", flush=True)
    ended = run_program([*command, "--output_dir", str(folder / "out")], log)
    if ended.code not in (0, STOPPED) or not (folder / "out").is_dir():
        raise UserError(f"{shlex.join(command)} ended with exit code {ended.code}; {log} has what it printed.")
    whole = ended.code == 0
    kept = {"command": shlex.join(command), "ended": whole, "why": "" if whole else reason(log)}
    write_json(folder / "trained.json", kept | {"cpu_seconds": ended.cpu_seconds, "seconds": ended.seconds})


def keep_policies(run: Run) -> None:
    """The policy of each evaluation as a folder of transformers' under POLICIES, and nothing else of the models."""
    policies, out = run.folder / POLICIES, run.folder / "out"
    policies.mkdir(exist_ok=True)
    for cut_off in policies.glob("*.partial"):  # by what ended an earlier comparison
        shutil.rmtree(cut_off)
    for point in sorted((out / CHECKPOINTS).glob("step_*[0-9]")):
        if not (policies / point.name).is_dir():
            export(str(point), str(policies / point.name))
    for name in (CHECKPOINTS, "actor", "critic"):
        shutil.rmtree(out / name, ignore_errors=True)


def judge(runs: Sequence[Run]) -> None:
    """Have all policies of runs of one task judged in one process; raises UserError if that fails."""
    task, models = runs[0].task, runs[0].models
    policies = {key: policy for run in runs for key, policy in judged(run).items()}
    with tempfile.TemporaryDirectory() as temporary:
        job, written = Path(temporary) / "job.json", Path(temporary) / "measures.json"
        texts = [str(models / name) for name in task.texts]
        write_json(job, {"policies": policies, "texts": texts, "judge": task.judge_name, "written": str(written)})
        words = ["-m", "scripts.comparison.judge", str(job), *task.words(models), "--output_dir", temporary]
        if task.judge:
            words += ["--reward_function", task.judge, "--reward_weights", "0"]
        words += ["--num_eval_prompts", str(HELD_OUT), "--dtype", "fp32"]
        log = runs[0].folder / "judge.log"
        ended = run_program([sys.executable, *words], log)
        if ended.code:
            raise UserError(f"the judge ended with exit code {ended.code}; {log} has what it printed.")
        measures = json.loads(written.read_text(encoding="utf-8"))
    for run in runs:
        finish(run, measures)


def judged(run: Run) -> dict[str, tuple[str, float]]:
    """What of a run is judged: folders, and how much of their change from the SFT model is taken."""
    paths = sorted((run.folder / POLICIES).iterdir())
    policies = {str(path): (str(path), 1.0) for path in paths}
    return policies | {_on_line(paths[-1], scale): (str(paths[-1]), scale) for scale in LINE_SCALES[:-1] if paths}


def _on_line(last: Path, scale: float) -> str:
    return str(last) if scale == 1.0 else f"{last} x {scale}"


def finish(run: Run, measures: dict[str, dict[str, float]]) -> None:
    """Write a run's result, and remove its policies. measures: by policy, and "" for the SFT model."""
    trained = run.read("trained")
    assert trained is not None, "only what was trained is judged"
    samples = responses_by_step(run)
    evaluations = [{"step": 0, "responses": 0} | measures[""]]
    paths = sorted((run.folder / POLICIES).iterdir())
    for path in paths:
        step = int(path.name.removeprefix("step_"))
        evaluations.append({"step": step, "responses": samples[step]} | measures[str(path)])
    line = [{"scale": 0.0} | measures[""]]
    line += [{"scale": scale} | measures[_on_line(paths[-1], scale)] for scale in LINE_SCALES if paths]
    kept = {name: value for name, value in trained.items() if name != "command"}
    result = kept | {"responses": max(samples.values(), default=0), "evaluations": evaluations, "line": line}
    write_json(run.folder / "result.json", result)
    shutil.rmtree(run.folder / POLICIES)


def responses_by_step(run: Run) -> dict[int, int]:
    """How many responses a run had drawn after each step."""
    if run.entry.dialect == TRL:
        return {step: step * run.task.responses for step in range(run.task.steps + 1)}
    return {row["step"]: row["samples"] for row in read_metrics(run.folder / "out" / METRICS_FILE)}
