"""A memory plan as a table that fits a terminal, and as JSON."""

from engine.memory.bytes_by_role import KINDS, Bytes
from engine.memory.gpus import reserved
from engine.memory.memory_plan import MemoryPlan

ROLES = ("model", "actor", "critic", "reference", "reward", "ema", "copies")
WIDTH = 12


def table(plan: MemoryPlan, title: str) -> str:
    """GB (10^9 bytes) of one GPU by phase, each at its peak: of each role, of each kind; and whether it fits."""
    names, device = plan.names, "GPU" if plan.cluster.on_gpu else "rank"
    tops = {phase: Bytes(plan.phases[phase]) for phase in names}
    heads = [f"{phase}{'*' if phase == plan.peak.phase else ''}" for phase in names]
    lines = [f"memory plan: {title}; GB of one {device}, each phase at its peak, the highest marked *", _row("", heads)]
    lines += [
        _row(role, [gb(tops[phase].of_role(role)) for phase in names])
        for role in ROLES
        if any(tops[phase].of_role(role) for phase in names)
    ]
    lines.append(_row("in all", [gb(tops[phase].total) for phase in names]))
    lines += [
        _row(f"  {kind}", [gb(tops[phase].of_kind(kind)) for phase in names])
        for kind in KINDS
        if any(tops[phase].of_kind(kind) for phase in names)
    ]
    lines.append(_row("host, a node", [gb(Bytes(plan.host_phases[phase]).total) for phase in names]))
    return "\n".join([*lines, *_last_lines(plan)])


def _last_lines(plan: MemoryPlan) -> list[str]:
    lines = [f"peak: {plan.peak.name}"]
    if plan.copies:
        lines.append(f"copies of weights: {plan.copies}")
    if plan.cluster.on_gpu:
        lines.append(
            f"needed of a GPU: {gb(plan.peak.device.total)} planned + {gb(plan.fragments)} for fragments + "
            f"{gb(reserved(plan.cluster.world))} for CUDA and NCCL = {gb(plan.needed)} GB"
        )
    return [*lines, verdict(plan)]


def verdict(plan: MemoryPlan) -> str:
    """One line: whether GPU and host have room."""
    if plan.fits is None:
        return "fits: not said, as it is not known what the GPU has"
    parts = []
    if plan.cluster.gpu is not None:
        parts.append(f"{gb(plan.needed)} of {gb(plan.cluster.gpu)} GB")
    if plan.cluster.host is not None:
        parts.append(f"host {gb(plan.host_peak)} of {gb(plan.cluster.host)} GB")
    return f"fits: {'yes' if plan.fits else 'no'}, {'; '.join(parts)}"


def as_json(plan: MemoryPlan) -> dict:
    """All of a plan in bytes, for other programs."""
    return {
        "gpus": plan.cluster.gpus,
        "nodes": plan.cluster.nodes,
        "gpu_bytes": plan.cluster.gpu,
        "host_bytes": plan.cluster.host,
        "phases": plan.phases,
        "host_phases": plan.host_phases,
        "moments": [
            {"phase": moment.phase, "name": moment.name, "gpu_bytes": moment.device.total} for moment in plan.moments
        ],
        "peak": {"phase": plan.peak.phase, "name": plan.peak.name, "gpu_bytes": plan.peak.device.total},
        "fragments": plan.fragments,
        "reserved": reserved(plan.cluster.world),
        "needed_gpu_bytes": plan.needed,
        "needed_host_bytes": plan.host_peak,
        "copies": plan.copies,
        "fits": plan.fits,
    }


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<18}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)


def gb(size: int) -> str:
    """With one digit behind the point; more of what is small."""
    gb = size / 1e9
    return "-" if not size else f"{gb:.1f}" if gb >= 9.95 else f"{gb:.2f}" if gb >= 0.1 else f"{gb:.4f}"
