"""Finds out how a run can fit into memory: the changes of settings that cost the least speed, and the largest sizes
that fit."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from engine.engine_spec import EngineSpec
from engine.memory.memory_plan import MemoryPlan
from engine.memory.planning import plan
from engine.memory.workload import Cluster, Workload
from engine.zero.config import EngineConfig

GPUS_OF_A_NODE, MOST_GPUS, MOST_ROWS = 8, 1024, 512


@dataclass(frozen=True)
class Setting:
    """The settings of a run: its engines, the sizes of its steps, and its machines."""

    spec: EngineSpec
    workload: Workload
    cluster: Cluster

    def planned(self) -> MemoryPlan:
        """The memory plan of this setting."""
        return plan(self.spec, self.workload, self.cluster)


@dataclass(frozen=True)
class Change:
    """A change of a setting, and the flags that make it.

    apply: a function that returns the changed setting, or None if there is nothing to change.
    """

    flags: str
    apply: Callable[[Setting], Setting | None]


def what_fits(setting: Setting) -> tuple[list[Change], MemoryPlan] | None:
    """(the changes from CHANGES that make the setting fit, the memory plan after these changes); None if the setting
    does not fit even with all changes.

    Changes are made one after the other, the cheapest first, until the setting fits. Then changes that turn out to be
    unnecessary are undone, the most expensive first.
    """
    made: list[Change] = []
    planned: MemoryPlan | None = None
    current = setting
    for change in CHANGES:
        changed = change.apply(current)
        if changed is None:
            continue
        current, planned = changed, changed.planned()
        made.append(change)
        if planned.fits:
            break
    if planned is None or not planned.fits:
        return None
    for change in reversed(made[:-1]):
        fewer = [other for other in made if other is not change]
        without = _after(setting, fewer)
        if without is not None and (found := without.planned()).fits:
            made, planned = fewer, found
    return made, planned


def _after(setting: Setting, changes: list[Change]) -> Setting | None:
    for change in changes:
        changed = change.apply(setting)
        if changed is None:
            return None
        setting = changed
    return setting


def _copies_freed(setting: Setting) -> Setting | None:
    load = setting.workload
    return _with_workload(setting, between_steps="free") if load.between_steps == "keep" else None


def _fewer_decoded(setting: Setting) -> Setting | None:
    """The setting with half as many responses decoded at once; the total number of responses does not change."""
    load = setting.workload
    return _with_workload(setting, generated=load.generated // 2) if load.generated > 1 else None


def _smaller_passes(factor: int, setting: Setting) -> Setting | None:
    """The setting with smaller and more passes; the number of rows in an optimizer step does not change."""
    load = setting.workload
    size = min(load.micro_batch, load.responses) // factor
    return _with_workload(setting, micro_batch=size) if size else None


def _checkpointing(setting: Setting) -> Setting | None:
    spec = setting.spec
    wanted = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": spec.with_critic}
    if all(getattr(spec, name) == value for name, value in wanted.items()):
        return None
    return _with_spec(setting, **wanted)


def _frozen_offloaded(setting: Setting) -> Setting | None:
    frozen = {config.role: config for config in setting.spec.engine_configs if config.role in ("reference", "reward")}
    moved = {
        role: dataclasses.replace(config, offload=True)
        for role, config in frozen.items()
        if config.stage == 0 and not config.offload
    }
    return _with_spec(setting, **moved) if moved else None


def _stage(stage: int, setting: Setting) -> Setting | None:
    spec = setting.spec
    if setting.cluster.world == 1:
        return None
    changed: dict[str, EngineConfig | None] = {
        role: dataclasses.replace(config, stage=stage, path=None)
        for role, config in (("actor", spec.actor), ("critic", spec.critic))
        if config.stage < stage
    }
    if stage == 3 and changed:  # as the flags --actor_zero_stage and --critic_zero_stage do
        changed |= {"reference": None, "reward": None}
    return _with_spec(setting, **changed) if changed else None


def _offloaded(setting: Setting) -> Setting | None:
    spec = setting.spec
    if spec.share_trunk:  # a shared trunk has no offload
        return None
    changed = {
        role: dataclasses.replace(config, offload=True, path=None, stage=max(config.stage, 2))
        for role, config in (("actor", spec.actor), ("critic", spec.critic))
        if not config.offload
    }
    return _with_spec(setting, **changed) if changed else None


def _weights_offloaded(setting: Setting) -> Setting | None:
    """The setting with stage 3 and the weights in host memory. On one GPU this is the only use of stage 3."""
    spec = setting.spec
    if spec.share_trunk:
        return None
    wanted: dict[str, EngineConfig | None] = {
        role: dataclasses.replace(config, offload=True, path=None, stage=3)
        for role, config in (("actor", spec.actor), ("critic", spec.critic))
    }
    own = {config.role for config in spec.engine_configs}
    wanted |= {role: EngineConfig(role, 3, offload=True) for role in ("reference", "reward") if role in own}
    return _with_spec(setting, **wanted) if any(getattr(spec, role) != new for role, new in wanted.items()) else None


def _with_workload(setting: Setting, **fields) -> Setting:
    return dataclasses.replace(setting, workload=dataclasses.replace(setting.workload, **fields))


def _with_spec(setting: Setting, **fields) -> Setting:
    return dataclasses.replace(setting, spec=dataclasses.replace(setting.spec, **fields))


CHANGES = (
    Change("--replicas_between_steps free", _copies_freed),
    Change("half of --per_device_training_batch_size, more passes a step", partial(_smaller_passes, 2)),
    Change("half of --per_device_generation_batch_size, twice --generation_batches", _fewer_decoded),
    Change("--offload_reference_model --offload_reward_model", _frozen_offloaded),
    Change("--actor_gradient_checkpointing --critic_gradient_checkpointing", _checkpointing),
    Change("--actor_zero_stage 2 --critic_zero_stage 2", partial(_stage, 2)),
    Change("--actor_zero_stage 3 --critic_zero_stage 3", partial(_stage, 3)),
    Change("a quarter of --per_device_training_batch_size more, more passes a step", partial(_smaller_passes, 4)),
    Change("--offload (--actor_zero_stage and --critic_zero_stage 2 or 3)", _offloaded),
    Change(
        "--offload --actor_zero_stage 3 --critic_zero_stage 3, and --offload_reference_model --offload_reward_model "
        "where these have engines of their own",
        _weights_offloaded,
    ),
)
"""The possible changes in the order of what they cost in speed, the cheapest first. The costs are, from first to last:
copies are gathered once more in each step; smaller passes and batches keep a GPU less busy; the weights of frozen
models are moved between host and device twice in each step; activations are computed again, which is a third of the
work; gradients and weights are sent over the network once more; all optimizer states are moved between host and device,
and the host's cores compute the optimizer step; the weights of each layer are moved to the device for each pass and
token."""


def fewest_gpus(setting_on: Callable[[int, int], Setting]) -> Setting | None:
    """The setting on the smallest number of GPUs on which it fits, with up to GPUS_OF_A_NODE GPUs in a node; None if it
    needs more than MOST_GPUS. setting_on: a function from (GPUs of a node, nodes) to the setting there.

    The number of GPUs is doubled until the setting fits. Batch sizes are per rank, so the global batch grows with the
    number of ranks. If groups of ranks hold weights together, only node sizes that are multiples of the group's size
    are tried.
    """
    for gpus in _doublings(1, MOST_GPUS):
        tried = setting_on(min(gpus, GPUS_OF_A_NODE), max(1, gpus // GPUS_OF_A_NODE))
        if tried.cluster.gpus % tried.workload.ranks_together == 0 and tried.planned().fits:
            return tried
    return None


def largest(fits: Callable[[int], bool], most: int = MOST_ROWS) -> int:
    """The largest number up to `most` for which `fits` is true, or a number that is less than a sixteenth smaller; 0 if
    not even 1 fits. If `fits` is true for a number, it must be true for all smaller numbers."""
    below = 0
    for size in _doublings(1, most):
        if not fits(size):
            break
        below = size
    if below in (0, most):
        return below
    above = min(2 * below, most + 1)
    while above - below > max(1, below // 16):
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


def _doublings(first: int, most: int) -> Iterator[int]:
    while first <= most:
        yield first
        first *= 2
