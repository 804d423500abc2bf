"""The seconds that a step of this run will spend in communication, from planned volumes and measured bandwidth."""

from collections.abc import Sequence

from engine.errors import UserError
from engine.memory import plan
from engine.memory.memory_plan import MemoryPlan
from engine.speed.traffic import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Exchange, traffic_of_ppo, traffic_of_training
from engine.zero.accelerator import on_gpu
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import SupervisedFlags
from training.preflight.bandwidth import Measured
from training.preflight.comparison import told_bytes
from training.program.memory_lines import planned_model, setting_here


def planned(args: RLHFFlags | SupervisedFlags) -> MemoryPlan:
    """The run's memory plan on machines like this; raises UserError where a model's configuration cannot be read."""
    if isinstance(args, RLHFFlags):
        setting = setting_here(args, args.resolved_dialect()[0])
        return plan(setting.spec, setting.workload, setting.cluster)
    return planned_model(args)


def traffic(args: RLHFFlags | SupervisedFlags, planned: MemoryPlan) -> list[Exchange]:
    """What a step exchanges."""
    if isinstance(args, RLHFFlags):
        return traffic_of_ppo(planned.engines, setting_here(args, args.resolved_dialect()[0]).workload)
    return traffic_of_training(planned.engines["model"], args.gradient_accumulation_steps)


def written(planned: MemoryPlan) -> int:
    """Bytes of the trained models, and of one restart point: float32 weights and Adam's two moments."""
    trained = [engine for engine in planned.engines.values() if engine.trains]
    return sum(engine.numbers * engine.width + 12 * engine.trains for engine in trained)


def lines(exchanges: Sequence[Exchange], measured: Sequence[Measured]) -> list[str]:
    """Seconds of a step by what is exchanged, and in all."""
    seconds: dict[tuple[str, str], tuple[float, float]] = {}
    for one in exchanges:
        spent, size = seconds.get((one.what, one.role), (0.0, 0.0))
        seconds[one.what, one.role] = spent + one.calls * _time(one, measured), size + one.total
    if not seconds:
        return ["communication of a step: none but of metrics"]
    total = sum(spent for spent, _ in seconds.values())
    return [
        f"communication of a step, by planned volumes and measured bandwidth: {total:.3g} s",
        *(f"  {spent:.3g} s: {what} ({role}), {told_bytes(size)}" for (what, role), (spent, size) in seconds.items()),
    ]


def _time(one: Exchange, measured: Sequence[Measured]) -> float:
    """Of one call. NCCL scatters sums in the time of a gather; gloo reduces all of a tensor
    (`engine.distributed.scatter_by_all_reduce`)."""
    kind = (ALL_GATHER if on_gpu() else ALL_REDUCE) if one.kind == REDUCE_SCATTER else one.kind
    return next(found for found in measured if found.kind == kind).time(one.size)


def planned_or_why(args: RLHFFlags | SupervisedFlags) -> MemoryPlan | str:
    """The plan, or why there is none."""
    try:
        return planned(args)
    except UserError as error:
        return str(error)
