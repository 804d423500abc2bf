"""What the output folder of a run holds: metrics, samples, and the record of how it was started."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import UserError
from engine.json_objects import parsed
from training.reporting.metrics_file import METRICS_FILE, read_metrics
from training.reporting.reward_change import scored_otherwise
from training.reporting.run_record import RUN_FILE, read_run_record
from training.reporting.views import PPO, REWARD, SFT, View, averaged

NUMBER = int | float
SHOWN = {"prompt": str, "response": str, "score": NUMBER, "kl": NUMBER, "tokens": NUMBER}  # of a sample
BEFORE, AFTER = "before", "after"
VIEWS = {"step 1": SFT, "step 2": REWARD, "step 3": averaged(PPO)}


@dataclass(frozen=True, slots=True)
class Run:
    """kind: which step wrote it, of VIEWS. rows: of metrics.jsonl. starts: of run.json, the last start last. samples:
    rows by the file's name without its ending, in the order of steps. missing: what the folder does not hold."""

    name: str
    folder: Path
    kind: str
    rows: Sequence[Mapping]
    starts: Sequence[Mapping]
    samples: Mapping[str, Sequence[Mapping]] = field(default_factory=dict)
    missing: Sequence[str] = ()

    @property
    def start(self) -> Mapping:
        """The last start, or nothing where there is no run.json."""
        return self.starts[-1] if self.starts else {}

    @property
    def flags(self) -> Mapping:
        """By name."""
        return self.start.get("flags") or {}

    @property
    def view(self) -> View:
        """Which metrics its charts show."""
        return VIEWS[self.kind]

    @property
    def steps(self) -> int:
        """The last step in metrics.jsonl."""
        return max((row["step"] for row in self.rows), default=0)


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Each folder's run, named by the folder, with as many of those above it as tell them apart.

    Raises: UserError for a folder that holds no run, and for runs of different steps.
    """
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        twice = next(str(folder) for folder, path in zip(folders, resolved) if resolved.count(path) > 1)
        raise UserError(f"{twice} is given twice. Give each run once.")
    runs = [read_run(folder, name) for folder, name in zip(folders, _told_apart(resolved), strict=True)]
    if len({run.kind for run in runs}) > 1:
        kinds = ", ".join(f"{run.name} of {run.kind}" for run in runs)
        raise UserError(f"the runs are of different steps ({kinds}). Give runs of one step.")
    return runs


def kind_of(rows: Sequence[Mapping]) -> str:
    """Which program wrote these metrics."""
    names = {name for row in rows for name in row}
    if any(name.startswith(("objective/", "critic_pretrain/")) for name in names) or "eval/kl" in names:
        return "step 3"
    return "step 2" if {"train/pair_loss", "eval/pair_loss"} & names else "step 1"


def _told_apart(paths: Sequence[Path]) -> list[str]:
    """The fewest last parts of paths that are all different."""
    count = 1
    while len({path.parts[-count:] for path in paths}) < len(paths):
        count += 1
    return ["/".join(path.parts[-count:]) for path in paths]


def read_run(folder: Path, name: str) -> Run:
    """The run in a folder; raises UserError where there is no metrics.jsonl with a step in it."""
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise UserError(f"{folder}: holds no {METRICS_FILE}. Give the --output_dir of a run.")
    rows = read_metrics(metrics)
    if not rows:
        raise UserError(f"{metrics}: holds no step yet. Wait for the first one.")
    bare = next((row["step"] for row in rows if "samples" not in row), None)
    if bare is not None:
        raise UserError(f"{metrics}: step {bare} does not say after how many samples. Remove its line.")
    missing = []
    record = folder / RUN_FILE
    starts = read_run_record(record) if record.is_file() else []
    if not starts:
        missing.append(f"{RUN_FILE}: how it was started is not known")
    samples = read_samples(folder / "samples")
    if any("eval/score" in row for row in rows):
        missing += [f"samples/{each}.jsonl" for each in (BEFORE, AFTER) if each not in samples]
    return Run(name, folder, kind_of(rows), rows, starts, samples, missing)


def read_samples(folder: Path) -> dict[str, list[dict]]:
    """Rows of each file of held-out samples: before, the steps in between, after. Raises: UserError."""
    found = {path.stem: path for path in sorted(folder.glob("*.jsonl")) if path.is_file()}
    order = [BEFORE, *(name for name in found if re.fullmatch(r"step_\d+", name, re.ASCII)), AFTER]
    return {name: _lines(found[name]) for name in order if name in found}


def _lines(path: Path) -> list[dict]:
    """Of each line what the page shows; a last line without its newline is still being written: left out."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break
        try:
            row = parsed(line)
            if not all(isinstance(row[name], kind) for name, kind in SHOWN.items()):
                raise TypeError
            rows.append({name: row[name] for name in SHOWN})
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}, line {number}: is no sample. Mend the file, or move it away.") from None
    return rows


def named(name: str) -> str:
    """What a page calls a file of samples."""
    return f"step {int(name.removeprefix('step_')):,}" if name.startswith("step_") else name


def scored_as_first(run: Run, name: str) -> bool:
    """Whether a file of samples was scored by the reward that scored the first one."""
    step = int(name.removeprefix("step_")) if name.startswith("step_") else 0 if name == BEFORE else run.steps
    rows = [row for row in run.rows if "eval/score" in row and row["step"] <= step]
    return not (rows and scored_otherwise(rows[-1]))
