"""The number of bytes that a run takes on one GPU and its host, by phase, role and kind, and whether GPU and host have
enough memory. The plan can be printed as a table or as JSON."""

from dataclasses import dataclass
from functools import cached_property

from engine.memory.gpus import FRAGMENTS, reserved
from engine.memory.workload import Cluster
from engine.memory.zero_memory import KINDS, Bytes

PHASES = ("load", "generate", "experience", "train", "save")
ROLES = ("model", "actor", "critic", "reference", "reward", "ema", "copies")
WIDTH = 12


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a phase, and the bytes that are allocated at this moment.

    device: the bytes on a rank's GPU.
    host: the bytes in host memory that each rank allocates.
    host_once: the bytes in host memory that only the main rank allocates.
    """

    phase: str
    name: str
    device: Bytes
    host: Bytes
    host_once: Bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes at each moment of a step, of loading and of saving. The step is not the first one, so Adam's moments
    exist.

    copies: a text that says how responses are drawn.
    checkpoints: a text that says how checkpoints are written; empty if none are written while training goes on.
    placed: whether `--rollout_backend auto` finds room for the actor's copy; if not, it refuses the run.
    """

    moments: tuple[Moment, ...]
    cluster: Cluster
    copies: str
    checkpoints: str = ""
    placed: bool = True

    @property
    def names(self) -> list[str]:
        """The phases of this plan, in the order of PHASES."""
        return [phase for phase in PHASES if any(moment.phase == phase for moment in self.moments)]

    def peak_of(self, phase: str) -> Moment:
        """The moment of this phase at which the most bytes are on the device."""
        return max((moment for moment in self.moments if moment.phase == phase), key=lambda one: one.device.total)

    @cached_property
    def peak(self) -> Moment:
        """The moment of any phase at which the most bytes are on the device."""
        return max(self.moments, key=lambda moment: moment.device.total)

    @cached_property
    def phases(self) -> dict[str, dict[str, dict[str, int]]]:
        """{phase: {role: {kind: bytes}}} on a rank's device, at the peak of each phase."""
        return {phase: self.peak_of(phase).device.by_role for phase in self.names}

    @cached_property
    def host_phases(self) -> dict[str, dict[str, dict[str, int]]]:
        """{phase: {role: {kind: bytes}}} in a node's host memory, summed over the node's ranks, at the peak of each
        phase. On CPUs all bytes are in host memory."""
        return {
            phase: max(
                (self._on_node(one) for one in self.moments if one.phase == phase), key=lambda b: b.total
            ).by_role
            for phase in self.names
        }

    def _on_node(self, moment: Moment) -> Bytes:
        every, own = Bytes(), moment.host if self.cluster.on_gpu else moment.device + moment.host
        for role, kind, size in own:
            every.add(role, kind, size * self.cluster.gpus)
        return every + moment.host_once

    @cached_property
    def host_peak(self) -> int:
        """The largest number of bytes in a node's host memory at any moment."""
        return max(self._on_node(moment).total for moment in self.moments)

    @property
    def fragments(self) -> int:
        """The number of bytes that torch's allocator is expected to hold in addition to the peak."""
        return round(FRAGMENTS * self.peak.device.total)

    @property
    def needed(self) -> int:
        """The number of bytes that a GPU must have: those of the peak, those that the allocator loses by fragmentation,
        and the reserved bytes."""
        return self.peak.device.total + self.fragments + reserved(self.cluster.world)

    @property
    def fits(self) -> bool | None:
        """Whether GPU and host have enough memory, and `auto` finds room for the actor's copy. If only one of the two
        memory sizes is known, only this one is compared; None if neither is known."""
        known = [
            needed <= there
            for needed, there in ((self.needed, self.cluster.gpu), (self.host_peak, self.cluster.host))
            if there is not None
        ]
        return self.placed and all(known) if known else None


def table(plan: MemoryPlan, title: str) -> str:
    """A table of the GB (10^9 bytes) on one GPU, at the peak of each phase, by role and by kind; and lines that say
    whether the run fits."""
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
        lines.append(f"rollouts: {plan.copies}")
    if plan.checkpoints:
        lines.append(f"checkpoints: {plan.checkpoints}")
    if plan.cluster.on_gpu:
        lines.append(
            f"needed of a GPU: {gb(plan.peak.device.total)} planned + {gb(plan.fragments)} for fragments + "
            f"{gb(reserved(plan.cluster.world))} for CUDA and NCCL = {gb(plan.needed)} GB"
        )
    return [*lines, verdict(plan)]


def verdict(plan: MemoryPlan) -> str:
    """One line that says whether GPU and host have enough memory."""
    if plan.fits is None:
        return "fits: not said, as it is not known what the GPU has"
    parts = []
    if plan.cluster.gpu is not None:
        parts.append(f"{gb(plan.needed)} of {gb(plan.cluster.gpu)} GB")
    if plan.cluster.host is not None:
        parts.append(f"host {gb(plan.host_peak)} of {gb(plan.cluster.host)} GB")
    return f"fits: {'yes' if plan.fits else 'no'}, {'; '.join(parts)}"


def as_json(plan: MemoryPlan) -> dict:
    """The whole plan as JSON values, in bytes, for other programs."""
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
        "checkpoints": plan.checkpoints,
        "fits": plan.fits,
    }


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<18}" + "".join(f"{cell:>{WIDTH}}" for cell in cells)


def gb(size: int) -> str:
    """A number of bytes as a text in GB, with one decimal; small sizes get more decimals."""
    gb = size / 1e9
    return "-" if not size else f"{gb:.1f}" if gb >= 9.95 else f"{gb:.2f}" if gb >= 0.1 else f"{gb:.4f}"
