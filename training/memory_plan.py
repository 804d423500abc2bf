"""Estimates the memory that step 3 needs on given machines, from the models' configurations; needs no GPU itself.

    python training/memory_plan.py --gpu a100-40g --num_gpus 8 --actor_model_name_or_path sft \\
        --critic_model_name_or_path reward --actor_zero_stage 3 --critic_zero_stage 3

Takes step 3's flags. Prints a table, whether the run fits in memory, and if not, what would make it fit. The exit code
is 0 if the run fits, 1 if it does not, and 2 for flags that cannot work.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.config.step3:MemoryFlags", __doc__)

from engine.algorithms import Dialect
from engine.errors import UserError
from engine.memory.changes import GPUS_OF_A_NODE, Setting, fewest_gpus, largest
from engine.memory.gpus import gpu_bytes
from engine.memory.memory_plan import as_json, table
from engine.memory.workload import Cluster
from engine.models.places import base_of
from engine.models.reading import read_config
from training.config.parsing import parse_flags
from training.config.step3 import MemoryFlags
from training.runtime.environment import program
from training.runtime.memory_lines import change_lines, workload
from training.runtime.models import adapted_roles, check_positions

OLDER = ("v100", "t4")  # GPUs without bf16, which compute in fp16
BATCHES = ("per_device_generation_batch_size", "per_device_training_batch_size")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Plan the run that the command line describes; returns the exit code."""
    args = parse_flags(MemoryFlags, sys.argv[1:] if argv is None else argv, __doc__.splitlines()[0])
    args.dtype = args.dtype or ("fp16" if args.gpu.lower().startswith(OLDER) else "bf16")
    return report(args)


def report(args: MemoryFlags) -> int:
    """Print the plan, or the result of --search; returns 0 if the run fits in memory, else 1."""
    dialect = args.resolved.dialect
    _refuse_what_cannot_run(args, dialect)
    load = workload(args, dialect)

    def setting_on(gpus: int, nodes: int) -> Setting:
        there = dataclasses.replace(args, num_gpus=gpus, num_nodes=nodes)  # one GPU has another usual ZeRO stage
        return Setting(there.spec, load, Cluster(gpus=gpus, nodes=nodes, gpu=gpu_bytes(args.gpu), host=args.host_bytes))

    setting = setting_on(args.num_gpus, args.num_nodes)
    said: list[str] = []
    found: dict[str, dict[str, int] | None] = {}
    if args.search == "batch":
        setting, rows = _largest_batch(args, dialect, setting)
        sizes = dict.fromkeys(BATCHES, rows)
        words = " ".join(f"--{name} {rows}" for name in BATCHES)
        said = ["largest batch: " + (words if rows else "not even one row fits")]
        found = {"largest_batch": sizes if rows else None}
    elif args.search == "gpus":
        wanted = fewest_gpus(setting_on)
        setting = wanted or setting
        said = ["fewest GPUs: " + (_machines(setting, args) if wanted else "it does not fit on a thousand, either")]
        machines = {"num_gpus": setting.cluster.gpus, "num_nodes": setting.cluster.nodes}
        found = {"fewest_gpus": machines if wanted else None}
    planned = setting.planned()
    if args.json:
        print(json.dumps(as_json(planned) | found, indent=2))
    else:
        print("\n".join([table(planned, f"{_machines(setting, args)}, {args.dtype}"), *said]))
        if not planned.fits:
            print("\n".join(change_lines(setting)))
    return 0 if planned.fits else 1


def _refuse_what_cannot_run(args: MemoryFlags, dialect: Dialect) -> None:
    """Raise UserError for flags that step 3 would refuse on a machine of any size."""
    _ = args.ds_configs  # raises for configurations that DeepSpeed does not support
    args.check_groups(GPUS_OF_A_NODE if args.search == "gpus" else args.num_gpus)
    if args.gpu.lower().startswith(OLDER) and args.dtype == "bf16":
        raise UserError(f"--dtype bf16 with --gpu {args.gpu}: it does not compute in bf16. Give --dtype fp16.")
    for name in ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path"):
        path = getattr(args, name)
        if path is not None and (Path(base_of(path, f"--{name}")) / "config.json").is_file():
            lengths = {flag: getattr(args, flag) for flag in ("max_prompt_seq_len", "max_answer_seq_len")}
            check_positions(read_config(path, f"--{name}", args.trust_remote_code), f"--{name} {path}", **lengths)
    adapted_roles(args, dialect)


def _machines(setting: Setting, args: MemoryFlags) -> str:
    nodes = f"{setting.cluster.nodes} nodes of " if setting.cluster.nodes > 1 else ""
    return f"{nodes}{setting.cluster.gpus} x {args.gpu}"


def _largest_batch(args: MemoryFlags, dialect: Dialect, setting: Setting) -> tuple[Setting, int]:
    """(the setting with the largest batch size that fits, that batch size). Generation and training use the same size.

    If not even one row fits: (the setting with one row, 0).
    """

    def of_size(rows: int) -> Setting:
        sized = dataclasses.replace(args, **dict.fromkeys(BATCHES, rows))
        return dataclasses.replace(setting, workload=workload(sized, dialect))

    rows = largest(lambda size: bool(of_size(size).planned().fits))
    return of_size(rows or 1), rows


if __name__ == "__main__":
    sys.exit(main())
