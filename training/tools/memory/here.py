"""What is planned for a run on machines like this one."""

import psutil
import torch

from engine import distributed
from engine.errors import UserError, in_words
from engine.zero.accelerator import capability, on_gpu, ranks_of_this_machine
from training.config.step3 import RLHFFlags
from training.config.supervised import SupervisedFlags
from training.tools.memory.changes import change_lines
from training.tools.memory.cluster import Cluster
from training.tools.memory.plan import plan, plan_one_model, table

PLANNED = {"generate": "generate", "make_experience": "experience", "train": "train"}
"""{phase of a step: the plan's name of it}."""


def this_cluster() -> Cluster:
    """A description of the run's machines, which assumes that all are like this one. The memory of a GPU is known only
    if this machine has GPUs."""
    gpus = ranks_of_this_machine()
    gpu = torch.cuda.mem_get_info()[1] if on_gpu() else None
    nodes = -(-distributed.world_size() // gpus)
    old = on_gpu() and (capability() or (0, 0)) < (8, 0)
    return Cluster(gpus=gpus, nodes=nodes, gpu=gpu, host=psutil.virtual_memory().total, on_gpu=on_gpu(), old=old)


def memory_lines(args: RLHFFlags | SupervisedFlags) -> list[str]:
    """The memory table on machines like this one, and for step 3 the flags that would make the run fit; or a line that
    says why there is no table."""
    step3 = isinstance(args, RLHFFlags)
    paths = [path for _, path in args.models] if step3 else [args.model_name_or_path]
    missing = [path for path in dict.fromkeys(paths) if not args.looks_at(path)]
    if missing:
        return [f"memory plan: none, as the config.json of {' and '.join(missing)} is not on this machine"]
    cluster, title = this_cluster(), f"{in_words(distributed.world_size(), 'rank')}, {args.dtype}"
    try:
        if not step3:
            return [table(plan_one_model(args, cluster), title)]
        planned = plan(args, cluster)
        changes = change_lines(args, cluster) if planned.fits is False else []
    except UserError as error:
        return [f"memory plan: none. {error}"]
    others = "on other machines: four-engine-rlhf plan --gpu a100-80g --num_gpus 8, with the same flags"
    return [table(planned, title), *changes, others]


def planned_phases(args: RLHFFlags) -> dict[str, int]:
    """{phase of a step: the bytes that are planned for it on this machine}; {} if there is no plan."""
    try:
        planned = plan(args, this_cluster())
    except Exception:  # a model family may raise anything on the meta device, and a run needs no plan
        return {}
    return {phase: planned.peak_of(name).device.total() for phase, name in PLANNED.items()}
