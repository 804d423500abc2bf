"""Writes and reads run.json, the record of a run, and reads metrics.jsonl.

    write_run_record(output_dir, flags=vars(args), dialect=dataclasses.asdict(dialect),
                     ds_configs={"actor": {...}, "critic": {...}}, resumed=False)
    rows = read_metrics(output_dir / METRICS_FILE)

run.json describes everything that is needed to repeat the run, and the machine on which it ran: {"starts": [...]}, with
an entry for each time the run was started. A resumed run appends an entry. Flags and dialect are recorded with all
defaults filled in, the DeepSpeed configurations as the engines get them. metrics.jsonl has a JSON object in each line:
`step`, `samples` and the metrics of the step. `JsonlSink` (sinks.py) writes metrics.jsonl.
"""

import importlib.metadata
import json
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import torch

from engine import distributed
from engine.atomic_files import write_whole
from engine.errors import UserError, shortened, shown_command
from engine.files import misfit, parsed_json
from engine.zero.accelerator import on_gpu
from training.runtime.environment import is_slurm_task

RUN_FILE = "run.json"
_starts: dict[Path, list[dict]] = {}  # what this process has written: the folder may be moved during the run
OBJECTS = ("flags", "dialect", "git", "versions", "machine", "models")
FIELDS = {"command": str | None} | dict.fromkeys(OBJECTS, dict | None)
"""The kind of an entry's fields that are read again; see `misfit`."""
PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "four-engine-rlhf")


def write_run_record(
    output_dir: str | Path,
    *,
    flags: Mapping,
    dialect: Mapping | None = None,
    ds_configs: Mapping[str, Mapping],
    resumed: bool = False,
) -> None:
    """Write run.json (the main rank writes; the other ranks return at once).

    Values that JSON cannot hold are written as text. The file is written under another name and then renamed: if the
    process is killed, either the whole old file or the whole new file is there. resumed: whether this start continues
    the run in `output_dir`. If not, an earlier record there belongs to another run, and is replaced.

    Raises: UserError if an earlier record of the same run cannot be read.
    """
    if not distributed.is_main():
        return
    path = Path(output_dir) / RUN_FILE
    starts = read_run_record(path) if resumed and path.exists() else []
    starts.append(
        {
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command_line(sys.argv, os.environ),
            "working_directory": str(Path.cwd()),
            "versions": versions(),
            "git": git_state(Path(__file__).parent),
            "machine": machine(),
            "flags": dict(flags),
            "dialect": dialect,
            "deepspeed": dict(ds_configs),
            "models": None,
        }
    )
    _write(path, starts)


def record_models(output_dir: str | Path, saved: Mapping[str, Path], step: int) -> None:
    """Record in the last entry of run.json which models this start has saved, and after which step (one process calls
    this).

    Until the entry names models, any models in the folder come from an earlier run. Raises: OSError; UserError as
    `read_run_record` does.
    """
    path = Path(output_dir) / RUN_FILE
    starts = _starts.get(path) or read_run_record(path)
    starts[-1]["models"] = {"step": step, **{name: str(place) for name, place in saved.items()}}
    _write(path, starts)


def recorded_models(output_dir: str | Path) -> set[str]:
    """The names of the models that the starts of a run have saved, by its run.json. Raises: UserError as
    `read_run_record` does."""
    path = Path(output_dir) / RUN_FILE
    starts = read_run_record(path) if path.is_file() else _starts.get(path, [])
    return {name for start in starts for name in start.get("models") or {}} - {"step"}


def _write(path: Path, starts: list[dict]) -> None:
    _starts[path] = starts
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"starts": starts}, indent=2, default=str) + "\n")


def read_run_record(path: str | Path) -> list[dict]:
    """The entries of run.json, one for each start of the run, oldest first. Raises: UserError if the file is not a run
    record."""
    try:
        starts = parsed_json(Path(path).read_text(encoding="utf-8"))["starts"]
        if fault := misfit(starts, [FIELDS], "starts"):
            raise TypeError(fault)
    except (ValueError, KeyError, TypeError) as error:  # ValueError: no JSON, or no text
        raise UserError(f"{path}: no record of a run ({error}); move it away to go on") from error
    return starts


def command_line(argv: list[str], environment: Mapping[str, str]) -> str:
    """The command that started the program, with the launcher and its numbers of nodes and ranks. The query part of
    URLs is removed.

    The launcher does not pass its other options (a hostfile, a port) to the program, so they are missing in the text.
    """
    words = [word for word in argv if not word.startswith("--local_rank=")]
    world = int(environment.get("WORLD_SIZE", 1))
    if "TORCHELASTIC_RUN_ID" in environment:
        local = int(environment["LOCAL_WORLD_SIZE"])
        launcher = ["torchrun", "--nnodes", str(world // local), "--nproc_per_node", str(local)]
    elif (
        is_slurm_task(environment) and world > 1 and "CROSS_RANK" not in environment
    ):  # which DeepSpeed's launcher sets
        launcher = ["srun", "--ntasks", str(world), "--ntasks-per-node", environment["LOCAL_SIZE"], "python"]
    elif "LOCAL_SIZE" in environment:  # the deepspeed launcher's
        local = int(environment["LOCAL_SIZE"])
        launcher = ["deepspeed", "--num_nodes", str(world // local), "--num_gpus", str(local)]
    else:
        launcher = ["python"]
    return shown_command([*launcher, *words])


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that affect a run's numbers; None for a package that is not
    installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_state(folder: Path) -> dict | None:
    """{"commit": hash, "dirty": bool} of the git checkout in which the code lies; None without git or outside a
    checkout.

    dirty: whether a file that git tracks has changed since the commit. A checkout that tracks none of the code's files
    does not count: the code may be installed in a virtual environment within another project's checkout.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=folder, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ).stdout.strip()

    try:
        if not git("ls-files"):
            return None
        return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain", "--untracked-files=no") != ""}
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def machine() -> dict[str, str | int]:
    """The main rank's host name, the number of ranks, and the accelerator on which the ranks compute."""
    accelerator = torch.cuda.get_device_name() if on_gpu() else distributed.device().type
    return {"host": socket.gethostname(), "world_size": distributed.world_size(), "accelerator": accelerator}


METRICS_FILE = "metrics.jsonl"


def read_lines(path: str | Path) -> list[tuple[str, dict]]:
    """The lines of a metrics file, each with its parsed object.

    A last line without a newline is left out: the run was killed while writing the line, or is writing it now.

    Raises:
        UserError: a line is not a JSON object with a step, or one of its values is not a number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no text ({error}); move it away, or remove the lines that are broken") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            record = parsed_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: no JSON ({error}); remove the line") from error
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise UserError(f"{path}, line {number}: expected an object with a whole number as step; remove the line")
        other = next((name for name, value in record.items() if not isinstance(value, int | float | None)), None)
        if other is not None:
            raise UserError(f"{path}, line {number}: {other} is {shortened(record[other])}, no number; remove the line")
        found.append((line, record))
    return found


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics.jsonl in the order in which they were written. null, which stands for a number that is
    not finite, becomes NaN.

    Raises:
        UserError: the file does not exist, or one of its lines is no record of metrics.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file; give the metrics.jsonl of a run")
    return [
        {name: math.nan if value is None else value for name, value in record.items()} for _, record in read_lines(path)
    ]
