"""Shows what a command would do, without GPUs and downloads. Usage: put `python -m training.tools.dry_run` before it.

    python -m training.tools.dry_run deepspeed --hostfile hosts --num_gpus 8 training/step3_rlhf.py --data_path ...

A program's flag --dry_run does the same. With the flag, the ranks are the processes that were started; with this
module, their number is read from the command.
"""

import importlib
import itertools
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from engine.errors import UserError, shown_command
from engine.zero.communication import slots_by_host
from training import tools
from training.runtime.environment import program
from training.runtime.launch import leave, run

PROGRAMS = {"step1_sft": "SFTFlags", "step2_reward": "RewardFlags", "step3_rlhf": "RLHFFlags"}


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
def main(words: Sequence[str]) -> int:
    """Make a dry run of the command; returns the exit code of its program."""
    place = next((place for place, word in enumerate(words) if _program(word) in PROGRAMS), None)
    if place is None:
        raise UserError(
            f"no program in {shown_command(words)!r}. Put `python -m training.tools.dry_run` before a whole "
            f"command with one of {', '.join(f'{name}.py' for name in PROGRAMS)}."
        )
    world, local = _processes(words[:place])
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(local)}
    name = _program(words[place])
    module = importlib.import_module(f"training.{name}")
    flags = [word for word in words[place + 1 :] if word != "--dry_run"]
    main = partial(module.main, callbacks=tools.callbacks())
    code = run(main, getattr(module, PROGRAMS[name]), module.__doc__, [*flags, "--dry_run"])
    if code == 0 and (missing := _missing(words[:place], several=world > local)):
        print(f"missing: {missing}", flush=True)
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
