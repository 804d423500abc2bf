"""The seconds that a step of this run will spend in communication: its calls and bytes are those of the simulation
(`engine.speed`), what they take is measured."""

from collections.abc import Mapping, Sequence

from engine.memory.blueprint import blueprints
from engine.memory.memory_plan import MemoryPlan
from engine.speed.decoding import Decoder, Ranks
from engine.speed.exchanges import Exchanges
from engine.speed.measured import NO_ARITHMETIC, MeasuredRanks
from engine.speed.part import Part
from engine.speed.planned_step import step_of
from engine.speed.settings import ROLES
from engine.zero.accelerator import on_gpu
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.supervised_arguments import SupervisedFlags
from training.preflight.bandwidth import ALL_GATHER, ALL_REDUCE, Measured
from training.preflight.words import told_bytes
from training.program.memory_lines import one_model, setting_here


def ranks_as_measured(everywhere: Sequence[Measured], within: Sequence[Sequence[Measured]]) -> MeasuredRanks:
    """All ranks, and within a node those of the slowest one. NCCL scatters sums in the time of a gather; gloo sums all
    of a tensor on each rank (`engine.distributed.scatter_by_all_reduce`)."""
    node = ranks_as_measured([_slowest(within, kind) for kind in (ALL_GATHER, ALL_REDUCE)], []) if within else None
    calls = {one.kind: one for one in everywhere}
    gathers = calls[ALL_GATHER]
    return MeasuredRanks(
        gathers.ranks,
        gathers.curve,
        calls[ALL_REDUCE].curve,
        scatters=gathers.curve if on_gpu() else None,
        within=node,
    )


def _slowest(within: Sequence[Sequence[Measured]], kind: str) -> Measured:
    return min((one for calls in within for one in calls if one.kind == kind), key=lambda one: one.bandwidth)


def parts(args: RLHFFlags | SupervisedFlags, planned: MemoryPlan, ranks: Ranks) -> dict[str, Part]:
    """The parts of a step by name; of steps 1 and 2, the passes of an optimizer step."""
    if not isinstance(args, RLHFFlags):
        model = Exchanges(Decoder.of(one_model(args).blueprint), planned.engines["model"], ranks)
        return {"train": model.training(args.gradient_accumulation_steps, updates=1)}
    setting = setting_here(args, args.resolved_dialect()[0])
    shapes = {role: Decoder.of(model) for role, model in blueprints(setting.spec).items()}
    return step_of(planned, setting.spec, setting.workload, shapes).parts(NO_ARITHMETIC, ranks)


def lines(parts: Mapping[str, Part]) -> list[str]:
    """Seconds of a step by its parts, and in all."""
    exchanged = {name: part for name, part in parts.items() if part.exchange}
    if not exchanged:
        return ["communication of a step: none but of metrics"]
    total = sum(part.exchange for part in exchanged.values())
    return [
        f"communication of a step, by planned volumes and measured bandwidth: {total:.3g} s",
        *(f"  {part.exchange:.3g} s: {_told(name)}{_volumes(part)}" for name, part in exchanged.items()),
    ]


def _told(name: str) -> str:
    return f"experience of {name}" if name in ROLES else name  # where it computes through partitions


def _volumes(part: Part) -> str:
    sizes = (("gathered", part.gathered), ("summed", part.reduced))
    return "".join(f", {told_bytes(size)} {how}" for how, size in sizes if size)
