"""What step 3 takes of memory on machines that need not be there, from the models' configurations alone.

    python training/memory_plan.py --gpu a100-40g --num_gpus 8 --actor_model_name_or_path sft \\
        --critic_model_name_or_path reward --actor_zero_stage 3 --critic_zero_stage 3

Takes step 3's own flags, prints a table, whether it fits, and if not what would make it fit. Exit code 0 where it fits,
1 where it does not, 2 for flags that cannot work.
"""

import json
import sys
from collections.abc import Sequence

from engine.errors import UserError
from engine.memory import Cluster, plan
from engine.memory.gpus import gpu_bytes
from engine.memory.table import as_json, table
from training.flags.memory_flags import MemoryFlags
from training.flags.parsing import parse_flags
from training.program.memory_lines import workload

OLDER = ("v100", "t4")  # which compute in fp16


def main(argv: Sequence[str] | None = None) -> int:
    """Plan what the command line describes; returns the exit code."""
    try:
        args = parse_flags(MemoryFlags, sys.argv[1:] if argv is None else argv, __doc__.splitlines()[0])
        args.dtype = args.dtype or ("fp16" if args.gpu.lower().startswith(OLDER) else "bf16")
        return report(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def report(args: MemoryFlags) -> int:
    """Print the plan; returns 0 where it fits, else 1."""
    dialect, _ = args.resolved_dialect()
    cluster = Cluster(gpus=args.num_gpus, nodes=args.num_nodes, gpu=gpu_bytes(args.gpu), host=args.host_bytes)
    planned = plan(args.engine_spec(dialect), workload(args, dialect), cluster)
    if args.json:
        print(json.dumps(as_json(planned), indent=2))
    else:
        nodes = f"{args.num_nodes} nodes of " if args.num_nodes > 1 else ""
        print(table(planned, f"{nodes}{args.num_gpus} x {args.gpu}, {args.dtype}"))
    return 0 if planned.fits else 1


if __name__ == "__main__":
    sys.exit(main())
