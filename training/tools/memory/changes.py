"""Finds out how a run can fit into memory: the changes of flags that cost the least speed, the largest batch, and the
fewest GPUs."""

import dataclasses
from collections.abc import Callable

from engine.errors import UserError
from training.config.step3 import RLHFFlags
from training.tools.memory.cluster import Cluster
from training.tools.memory.flags import MemoryFlags
from training.tools.memory.plan import MemoryPlan, check_split_models, plan, verdict

GPUS_OF_A_NODE = 8
MOST_GPUS = 1024
MOST_ROWS = 512
BATCHES = ("per_device_generation_batch_size", "per_device_training_batch_size")

Flags = dict[str, object]  # {flag: new value}
Change = Callable[[RLHFFlags], Flags]


def _smaller_passes(args: RLHFFlags) -> Flags:
    found: Flags = {"per_device_training_batch_size": args.per_device_training_batch_size // 2}
    if args.gradient_accumulation_steps is not None:
        found["gradient_accumulation_steps"] = 2 * args.gradient_accumulation_steps
    return found


def _fewer_decoded(args: RLHFFlags) -> Flags:
    return {
        "per_device_generation_batch_size": args.per_device_generation_batch_size // 2,
        "generation_batches": 2 * args.generation_batches,
    }


def _frozen_offloaded(args: RLHFFlags) -> Flags:
    return {f"offload_{kind}_model": True for kind in ("reference", "reward") if args.spec.has_engine(kind)}


def _checkpointing(args: RLHFFlags) -> Flags:
    return {f"{role}_gradient_checkpointing": True for role in _trained(args)}


def _stage(args: RLHFFlags, least: int) -> Flags:
    return {f"{role}_zero_stage": max(least, getattr(args.spec, role).stage) for role in _trained(args)}


def _trained(args: RLHFFlags) -> list[str]:
    return [config.role for config in args.spec.engine_configs if config.role in ("actor", "critic")]


def _longer_groups(args: RLHFFlags) -> Flags:
    return {"sequence_parallel_size": 2 * args.sequence_parallel_size}


CHANGES: tuple[Change, ...] = (
    lambda args: {"replicas_between_steps": "free"},
    _smaller_passes,
    _fewer_decoded,
    _frozen_offloaded,
    _checkpointing,
    lambda args: _stage(args, 2),
    lambda args: _stage(args, 3),
    _smaller_passes,
    _longer_groups,
    _longer_groups,
    _longer_groups,
    lambda args: {"offload": True, **_stage(args, 2)},
    lambda args: {"offload": True, **_stage(args, 3), **_frozen_offloaded(args)},
)
"""The possible changes in the order of what they cost in speed, the cheapest first. The costs are, from first to last:
copies are gathered once more in each step; smaller passes and batches keep a GPU less busy; the weights of frozen
models are moved between host and device twice in each step; activations are computed again, which is a third of the
work; gradients and weights are sent over the network once more; the ranks of a node exchange heads and tokens in each
layer; all optimizer states are moved between host and device, and the host's cores compute the optimizer step; the
weights of each layer are moved to the device for each pass and token."""


def what_fits(args: RLHFFlags, cluster: Cluster) -> tuple[Flags, MemoryPlan] | None:
    """(flags that make the run fit, the memory plan with these flags); None if it does not fit even with all changes.

    Changes are made one after the other, the cheapest first, until the run fits. Then changes that turn out to be
    unnecessary are undone, the most expensive first.
    """
    made: list[Change] = []
    current, planned = args, None
    for change in CHANGES:
        changed = _with(current, change(current), cluster)
        if changed is None:
            continue
        current, planned = changed, plan(changed, cluster)
        made.append(change)
        if planned.fits:
            break
    if planned is None or not planned.fits:
        return None
    for place in reversed(range(len(made) - 1)):
        without = _after(args, fewer := made[:place] + made[place + 1 :], cluster)
        if without is not None and (found := plan(without[0], cluster)).fits:
            made, planned = fewer, found
    after = _after(args, made, cluster)
    assert after is not None
    return after[1], planned


def _after(args: RLHFFlags, changes: list[Change], cluster: Cluster) -> tuple[RLHFFlags, Flags] | None:
    """(the flags after these changes, those that have changed); None if one of the changes cannot be made."""
    flags: Flags = {}
    for change in changes:
        new = change(args)
        changed = _with(args, new, cluster)
        if changed is None:
            return None
        args, flags = changed, flags | new
    return args, flags


def _with(args: RLHFFlags, flags: Flags, cluster: Cluster) -> RLHFFlags | None:
    """The flags after a change; None if nothing changes, or step 3 would refuse them on these machines."""
    if all(getattr(args, name) == value for name, value in flags.items()):
        return None
    changed = dataclasses.replace(args, **flags)
    try:
        changed.validate()
        changed.check_groups(cluster.gpus)
        _ = changed.ds_configs
        check_split_models(changed)
    except UserError:
        return None
    return changed


def change_lines(args: RLHFFlags, cluster: Cluster) -> list[str]:
    """Lines that describe changes that make a run fit."""
    found = what_fits(args, cluster)
    if found is None:
        others = "LoRA with --only_optimize_lora and --share_trunk, which changes what is learned"
        return [f"no change of batches, stages and offload makes it fit: more GPUs would (--search gpus), or {others}"]
    flags, planned = found
    words = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())
    return [f"it fits with {words}", f"  then {verdict(planned)}"]


def fewest_gpus(args: MemoryFlags) -> MemoryFlags | None:
    """The flags with the smallest number of GPUs on which the run fits, in nodes of up to GPUS_OF_A_NODE; None if it
    needs more than MOST_GPUS.

    The number of GPUs is doubled until the run fits. Batch sizes are per rank, so the global batch grows with it.
    """
    gpus = 1
    while gpus <= MOST_GPUS:
        nodes = max(1, gpus // GPUS_OF_A_NODE)  # one GPU has another usual ZeRO stage
        there = dataclasses.replace(args, num_gpus=min(gpus, GPUS_OF_A_NODE), num_nodes=nodes)
        try:
            there.check_groups(there.num_gpus)
            if plan(there, there.cluster).fits:
                return there
        except UserError:  # too few GPUs in a node for groups that hold weights together
            pass
        gpus *= 2
    return None


def largest_batch(args: MemoryFlags) -> MemoryFlags | None:
    """The flags with the largest batch size that fits, a power of two, for generation and training alike; None if not
    even one row fits."""
    found, rows = None, 1
    while rows <= MOST_ROWS:
        sized = dataclasses.replace(args, **dict.fromkeys(BATCHES, rows))
        if not plan(sized, sized.cluster).fits:
            break
        found, rows = sized, 2 * rows
    return found
