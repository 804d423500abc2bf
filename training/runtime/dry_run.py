"""Shows what a command would do, without GPUs and downloads. Usage: put `python -m training.runtime.dry_run` before it.

    python -m training.runtime.dry_run deepspeed --hostfile hosts --num_gpus 8 training/step3_rlhf.py --data_path ...

A program's flag --dry_run does the same. With the flag, the ranks are the processes that were started; with this
module, their number is read from the command. A dry run makes all checks that are possible. Then it prints the command,
some rows as the model sees them, and each engine's DeepSpeed configuration.
"""

import dataclasses
import importlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from engine.algorithms import Dialect
from engine.errors import UserError, shown_command, without_query
from engine.zero.communication import slots_by_host
from training.checkpoints.conditions import fingerprints
from training.checkpoints.resuming import ResumePoint
from training.config.step3 import RLHFFlags
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path, name_and_split, open_source
from training.reporting.records import command_line
from training.runtime.callbacks import Callback
from training.runtime.environment import program
from training.runtime.first_lines import changes_since, dialect_lines, plan_lines, score_lines
from training.runtime.plan import check_server, make_plan
from training.runtime.startup import leave, run

PROGRAMS = {"step1_sft": "SFTFlags", "step2_reward": "RewardFlags", "step3_rlhf": "RLHFFlags"}


def report(
    checked: Sequence[str], unseen: Sequence[str], engines: Mapping[str, dict], last: Callable[[], None]
) -> None:
    """Print what was found.

    checked: lines about what was checked. unseen: models and data that were not checked, because they are not on this
    machine. engines: {engine: its DeepSpeed configuration}. last: called before the last line; callbacks print there.
    """
    print("command\n  " + _command())
    for line in checked:
        print(line)
    for what in unseen:
        print(f"not looked at: {what} (not here: misspelt, or still to be made by an earlier step or downloaded)")
    print("engines, with gradient_accumulation_steps 1: the program itself adds up gradients, as its flag says")
    for role, ds_config in engines.items():
        print(f"engine {role}: " + json.dumps(ds_config, indent=2))
    last()
    print("dry run: nothing was loaded or written", flush=True)


def report_supervised(args, first_lines: Callable[[], list[str]], callbacks: Callback) -> None:
    """Print the report of step 1 or 2. first_lines: function that reads the data, and returns the lines that a run
    would print first."""
    models, data = (
        [
            path
            for spec in dataclasses.fields(args)
            if spec.name.endswith(ending)
            for path in _listed(getattr(args, spec.name))
        ]
        for ending in ("model_name_or_path", "data_path")
    )
    unseen = unseen_models(args, *models) + unseen_data(data)
    checked = opened(data, unseen)
    if not unseen:
        checked += first_lines()
    report(checked, unseen, {"model": args.ds_settings()}, lambda: callbacks.planned(args, None))


def report_rlhf(
    args: RLHFFlags, dialect: Dialect, changed: dict, point: ResumePoint | None, callbacks: Callback
) -> None:
    """Print the report of step 3.

    changed: {field of the dialect that a flag changed: (the dialect's value, the flag's value)}. point: the checkpoint
    from which the run resumes, or None.
    """
    unseen = unseen_models(
        args, args.actor_model_name_or_path, args.critic_model_name_or_path, args.reward_model_name_or_path
    )
    data = [*args.data_path, *args.eval_data_path, *filter(None, [args.unsupervised_dataset_name])]
    unseen += unseen_data(data)
    checked = [dialect_lines(dialect, changed), *score_lines(args, dialect), *opened(data, unseen)]
    plan = None
    if not unseen:
        plan = make_plan(args, dialect, point, fingerprints(args))
        checked += [*plan_lines(args, plan), *changes_since(plan)]
        checked += [
            f"{without_query(url)} gives one text the score {score:g}"
            for url, score in check_server(args, plan).items()
        ]
    report(checked, unseen, args.ds_configs, lambda: callbacks.planned(args, plan))


def _listed(value: str | list[str] | None) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def opened(data: Sequence[str], unseen: Sequence[str]) -> list[str]:
    """Open each data set that is on this machine; returns a line for each. unseen: the data sets that are not on it.
    Raises UserError if a data set cannot be used."""
    sources = [open_source(path) for path in dict.fromkeys(data) if path not in unseen]
    return [f"data {source.name}: {sum(map(len, source.training or source.held_out))} records" for source in sources]


def unseen_models(args, *paths: str | None) -> list[str]:
    """The paths of those models that are not on this machine, without repetition."""
    return [path for path in dict.fromkeys(paths) if path is not None and not args.looks_at(path)]


def unseen_data(paths: Sequence[str]) -> list[str]:
    """The data sets that are not on this machine: they can only be names on the Hub."""
    return [
        path
        for path in dict.fromkeys(paths)
        if (name := name_and_split(path)[0]) != DEEPSPEED_CHAT_FILES and not is_path(name) and not Path(name).exists()
    ]


def _command() -> str:
    """The command of the dry run: the words after this module's name, or the command that started the program."""
    if Path(sys.argv[0]).name == "dry_run.py":
        return shown_command(sys.argv[1:])
    return command_line([word for word in sys.argv if word != "--dry_run"], os.environ)


def _processes(launcher: Sequence[str]) -> tuple[int, int]:
    """(number of processes that `deepspeed` would start with these words, largest number of them on one node)."""
    if any(
        word.split("=")[0] in ("--include", "--exclude", "-i", "-e") or Path(word).name in ("torchrun", "accelerate")
        for word in launcher
    ):
        raise UserError(
            f"{shown_command(launcher)}: a dry run counts the processes of `deepspeed` with --hostfile, "
            "--num_nodes and --num_gpus. Give those."
        )
    options = _options(launcher)
    nodes, local = (_count(name, options.get(name)) for name in ("--num_nodes", "--num_gpus"))
    hostfile = options.get("--hostfile")
    counts = _slots(hostfile)[:nodes] if hostfile is not None else [max(1, torch.cuda.device_count())] * (nodes or 1)
    if local is not None:
        counts = [local] * len(counts)
    return sum(counts), max(counts)


def _options(launcher: Sequence[str]) -> dict[str, str]:
    """{word: the word after it} for all words; the word after a flag is its value."""
    words = [part for word in launcher for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return dict(itertools.pairwise("--hostfile" if word == "-H" else word for word in words))


def _missing(launcher: Sequence[str], several: bool) -> str:
    """Text that says what `deepspeed` needs but would not find; "" if nothing is missing. several: whether the run has
    several nodes."""
    options = _options(launcher)
    if "--hostfile" not in options:
        return "several nodes need a --hostfile with lines like `node1 slots=8`" if several else ""
    named, asked = len(_slots(options["--hostfile"])), options.get("--num_nodes", "0")
    if int(asked) <= named:
        return ""
    return f"{options['--hostfile']} names {named} of the {asked} nodes asked for, and deepspeed starts on these alone"


def _count(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise UserError(f"{name} {value}: give a whole number of at least 1.")
    return int(value)


def _slots(hostfile: str) -> list[int]:
    """The number of slots of each node in the hostfile. Raises UserError if the file does not exist or cannot be
    read."""
    if not Path(hostfile).is_file():
        raise UserError(
            f"--hostfile {hostfile}: there is no such file, and deepspeed would start on this machine "
            "alone. Check the path."
        )
    logging.disable()  # DeepSpeed logs the same error in its own words
    try:
        return list(slots_by_host(hostfile).values())
    except (OSError, ValueError) as error:
        raise UserError(f"--hostfile {hostfile}: {error}. Write lines like `node1 slots=8`.") from None
    finally:
        logging.disable(logging.NOTSET)


def _program(word: str) -> str:
    """The program that a word names: "step3_rlhf" for training/step3_rlhf.py, and for training.step3_rlhf, the form
    that `deepspeed --module` takes."""
    path = Path(word)
    return path.stem if path.suffix == ".py" else word.removeprefix("training.")


@program
def main(words: Sequence[str], callbacks: Sequence[Callback] = ()) -> int:
    """Make a dry run of the command, with these callbacks; returns the exit code of its program."""
    place = next((place for place, word in enumerate(words) if _program(word) in PROGRAMS), None)
    if place is None:
        raise UserError(
            f"no program in {shown_command(words)!r}. Put `python -m training.runtime.dry_run` before a whole "
            f"command with one of {', '.join(f'{name}.py' for name in PROGRAMS)}."
        )
    world, local = _processes(words[:place])
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(local)}
    name = _program(words[place])
    module = importlib.import_module(f"training.{name}")
    flags = [word for word in words[place + 1 :] if word != "--dry_run"]
    planned = partial(module.main, callbacks=callbacks)
    code = run(planned, getattr(module, PROGRAMS[name]), module.__doc__.splitlines()[0], [*flags, "--dry_run"])
    if code == 0 and (missing := _missing(words[:place], several=world > local)):
        print(f"missing: {missing}", flush=True)
    return code


if __name__ == "__main__":
    from training.tools import memory

    leave(main(sys.argv[1:], callbacks=(memory.Compared(),)))
