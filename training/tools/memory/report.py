"""What `four-engine-rlhf plan` prints."""

from pathlib import Path

from engine.errors import UserError
from engine.models.config_and_tokenizer import read_config
from engine.models.model_paths import base_of
from training.runtime.models import adapted_roles, check_positions, prompt_and_answer
from training.tools.memory.changes import BATCHES, GPUS_OF_A_NODE, change_lines, fewest_gpus, largest_batch
from training.tools.memory.flags import MemoryFlags
from training.tools.memory.plan import check_split_models, plan, table


def report(args: MemoryFlags) -> int:
    """Print the plan, or the result of --search; returns 0 if the run fits in memory, else 1."""
    args.dtype = args.dtype or ("fp16" if args.cluster.old else "bf16")
    _refuse_what_cannot_run(args)
    said = []
    if args.search == "batch":
        found = largest_batch(args)
        args = found or args
        words = " ".join(f"--{name} {getattr(args, name)}" for name in BATCHES)
        said = [f"largest batch: {words if found else 'not even one row fits'}"]
    elif args.search == "gpus":
        found = fewest_gpus(args)
        args = found or args
        said = [f"fewest GPUs: {_machines(args) if found else 'it does not fit on a thousand, either'}"]
    planned = plan(args, args.cluster)
    print(table(planned, f"{_machines(args)}, {args.dtype}"), *said, sep="\n")
    if not planned.fits:
        print(*change_lines(args, args.cluster), sep="\n")
    return 0 if planned.fits else 1


def _refuse_what_cannot_run(args: MemoryFlags) -> None:
    """Raise UserError for flags that step 3 would refuse on a machine of any size."""
    _ = args.ds_configs  # raises for configurations that DeepSpeed does not support
    args.check_groups(GPUS_OF_A_NODE if args.search == "gpus" else args.num_gpus)
    check_split_models(args)
    if args.cluster.old and args.dtype == "bf16":
        raise UserError(f"--dtype bf16 with --gpu {args.gpu}: it does not compute in bf16. Give --dtype fp16.")
    for name, path in args.models:
        if path not in args.text_reward_paths and (Path(base_of(path, f"--{name}")) / "config.json").is_file():
            config = read_config(path, f"--{name}", args.trust_remote_code)
            check_positions(config, f"--{name} {path}", **prompt_and_answer(args))
    adapted_roles(args, args.resolved.dialect)


def _machines(args: MemoryFlags) -> str:
    nodes = f"{args.num_nodes} nodes of " if args.num_nodes > 1 else ""
    return f"{nodes}{args.num_gpus} x {args.gpu}"
