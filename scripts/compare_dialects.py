"""Dialects side by side on the same tasks: score against KL at equal budgets, tuned by the same search, several seeds.

    python scripts/compare_dialects.py                                   # all dialects, three seeds, all tasks
    python scripts/compare_dialects.py default default:lam=1.0 --tasks reviews --seeds 1
    TRL_PYTHON=/path/to/python python scripts/compare_dialects.py default trl --docs

An entry is a dialect, a variant of one (NAME:FIELD=VALUE,...,--FLAG=VALUE) or `trl`, TRL's own PPO, run by the Python
that TRL_PYTHON names; by default all dialects, and trl where there is such a Python. Each is tuned on each task: runs
of one seed at a few learning rates, of which the one with the best score under a KL is chosen; one rate needs none.
Then it learns with each seed, and the policies of all evaluations are judged alike (scripts/comparison/judge.py).

OUTPUT has runs/ (a folder a run, named by its command: what is done is not done again), results.jsonl with everything,
comparison.md with tables, and a picture a task. A task that needs models or data says what it misses and is left out.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import torch

from engine.algorithms import DIALECTS
from engine.errors import UserError
from scripts.comparison import page
from scripts.comparison.entries import TRL, Entry, program
from scripts.comparison.results import FILE, SEED, Compared, Results, Search, searched
from scripts.comparison.runs import Run, complete, ended_with_us
from scripts.comparison.tasks import TASKS, Task
from scripts.harness import ROOT


def compare(options: argparse.Namespace, tasks: list[Task], entries: list[Entry], results: Results) -> list[str]:
    """Run what is not there yet, task by task and entry by entry; results are written after each. Returns what went
    wrong: an entry that cannot be run leaves the others theirs."""
    wrong = []
    for task in tasks:
        models = options.models.get(task.name, options.output / "models" / task.name).resolve()
        task.prepare(models)
        for entry in entries:
            if entry.dialect == TRL and not task.has_reward_model:
                print(f"{task.name}, trl: left out, because TRL's PPO takes scores from a model alone.", flush=True)
                continue
            try:
                compare_entry(options, task, entry, models, results)
            except UserError as error:
                wrong.append(f"{task.name}, {error}")
                print(f"error: {wrong[-1]}", file=sys.stderr, flush=True)
    return wrong


def compare_entry(options: argparse.Namespace, task: Task, entry: Entry, models: Path, results: Results) -> None:
    """An entry's search, and its runs at the chosen rate."""

    def run(rate: float, seed: int) -> Run:
        return Run(task, entry, models, options.output.resolve(), rate, seed)

    if len(task.rates) == 1:
        search = Search({}, 0.0, *task.rates)
    else:
        tried = [run(rate, SEED) for rate in task.rates]
        complete(tried, options.jobs)
        search = searched(entry, tried)
    runs = [run(search.chosen, seed) for seed in options.seeds]
    complete(runs, options.jobs)
    results.add(task, entry.label, search, runs)


def unmoved(task: Task, entries: list[Compared]) -> list[str]:
    """The entries of which a seed's best score is not by the task's least_rise above the SFT model's."""
    found = []
    for compared in entries:
        courses = compared.courses_of("score")
        rises = [max(point.score for point in course) - course[0].score for course in courses]
        if min(rises) < task.least_rise:
            found.append(f"{compared.label} on {task.name} ({min(rises):+.2f})")
    return found


def chosen_entries(labels: list[str]) -> list[Entry]:
    """Those that were named, or all; raises UserError for one that cannot be run."""
    if not labels:
        labels = [*DIALECTS, *([TRL] if os.environ.get("TRL_PYTHON") else [])]
        if TRL not in labels:
            print("trl is left out: TRL_PYTHON is not set.", flush=True)
    entries = [Entry.parsed(label) for label in labels]
    for entry in entries:
        program(entry)
    return entries


def chosen_tasks(options: argparse.Namespace) -> list[Task]:
    """Those that can be run here, at the budget that was asked for; says why others are left out."""
    tasks = []
    for name in options.tasks:
        reason = TASKS[name].why_not()
        if reason:
            print(reason, flush=True)
        else:
            tasks.append(TASKS[name].sized(options.steps, options.responses, options.rates))
    return tasks


def named_folder(word: str) -> tuple[str, Path]:
    """NAME=FOLDER, of a task."""
    name, sign, folder = word.partition("=")
    if not sign or name not in TASKS:
        raise argparse.ArgumentTypeError(f"{word!r}: give TASK=FOLDER; tasks are {', '.join(TASKS)}")
    return name, Path(folder)


def positive(word: str) -> int:
    """A whole number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: give a whole number of at least 1")
    return int(word)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entries", nargs="*", metavar="ENTRY", help="by default all dialects")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS, help="(all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(1 2 3)")
    parser.add_argument("--output", type=Path, default=ROOT / "comparison", help="folder (comparison/)")
    parser.add_argument(
        "--models",
        nargs="+",
        type=named_folder,
        default=[],
        metavar="TASK=FOLDER",
        help="where a task's models stand already, or are to be made (OUTPUT/models/TASK)",
    )
    parser.add_argument("--jobs", type=positive, default=1, help="runs side by side, each in one process (1)")
    parser.add_argument("--steps", type=positive, help="of a run, for a smaller or larger budget")
    parser.add_argument("--responses", type=positive, help="of a step")
    parser.add_argument("--rates", nargs="+", type=float, help="what the search chooses from")
    parser.add_argument("--docs", action="store_true", help="add tables, pictures and numbers to those of docs/")
    options = parser.parse_args(arguments)
    options.models = dict(options.models)
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code: 1 where an entry does not learn a task, 2 for a mistake."""
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        entries = chosen_entries(options.entries)
        tasks = chosen_tasks(options)
        results = Results(options.output / FILE)
        options.output.mkdir(parents=True, exist_ok=True)
        with ended_with_us():
            wrong = compare(options, tasks, entries, results)
        shown = list((TASKS | {task.name: task for task in tasks}).values())  # also what an earlier command compared
        made = page.make(results, shown, options.output)
        (options.output / "comparison.md").write_text(made + "\n", encoding="utf-8")
        print(f"\n{made}")
        if options.docs:
            page.write(results, shown)
    except (UserError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    by_score = [task for task in tasks if not task.judge]  # a judge may choose a policy whose score hardly rises
    short = [words for task in by_score for words in unmoved(task, results.of(task))]
    if short:
        print(f"scores that hardly rise: {', '.join(short)}", file=sys.stderr)
    return 2 if wrong else 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
