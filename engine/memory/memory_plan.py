"""What a run of PPO takes, by phase, role and kind, on one GPU and on its host; and whether that fits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from engine.memory.bytes_by_role import Bytes
from engine.memory.copies import Copies
from engine.memory.engine_plan import EnginePlan
from engine.memory.gpus import FRAGMENTS, reserved
from engine.memory.workload import Cluster

PHASES = ("load", "generate", "experience", "train", "save")


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a phase, and what is alive then.

    device: on a rank's GPU. host: in host memory, of each rank. host_once: the same, of the main rank alone.
    """

    phase: str
    name: str
    device: Bytes
    host: Bytes
    host_once: Bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes at the moments of a step, from the second one on, when Adam has its moments; and of loading and saving.

    copies: which models compute through whole copies, in words. between: bytes that stay between two steps, of a rank's
    GPU and host. adam: bytes on the device of Adam's moments, which a run that begins does not have before it trains.
    engines: by role, how each comes by its weights. placed: the copies themselves, by the engines' places. training:
    bytes on the device that training takes at its peak, beyond the engines as they are loaded and beside copies, keys
    and values.
    """

    moments: tuple[Moment, ...]
    cluster: Cluster
    copies: str
    between: int = 0
    adam: int = 0
    engines: Mapping[str, EnginePlan] = field(default_factory=dict)
    placed: Copies = field(default_factory=lambda: Copies((), ""))
    training: int = 0

    @property
    def names(self) -> list[str]:
        """The phases that there are, in the order of PHASES."""
        return [phase for phase in PHASES if any(moment.phase == phase for moment in self.moments)]

    def peak_of(self, phase: str) -> Moment:
        """The moment of a phase at which most is alive on the device."""
        return max((moment for moment in self.moments if moment.phase == phase), key=lambda one: one.device.total)

    @cached_property
    def peak(self) -> Moment:
        """The moment of all phases at which most is alive on the device."""
        return max(self.moments, key=lambda moment: moment.device.total)

    @cached_property
    def phases(self) -> dict[str, dict[str, dict[str, int]]]:
        """{phase: {role: {kind: bytes}}} on a rank's device, each phase at its peak."""
        return {phase: self.peak_of(phase).device.by_role for phase in self.names}

    @cached_property
    def host_phases(self) -> dict[str, dict[str, dict[str, int]]]:
        """{phase: {role: {kind: bytes}}} in the memory of a node, of all its ranks, each phase at its peak; on CPUs
        everything is there."""
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
        """The most bytes on a node's host."""
        return max(self._on_node(moment).total for moment in self.moments)

    def of_main_rank(self, phase: str) -> int:
        """The most bytes of all tensors of the main rank in a phase, wherever they are: what a CPU's memory holds."""
        return max(
            one.device.total + one.host.total + one.host_once.total for one in self.moments if one.phase == phase
        )

    @property
    def fragments(self) -> int:
        """Bytes that the allocator is expected to hold beyond the peak."""
        return round(FRAGMENTS * self.peak.device.total)

    @property
    def needed(self) -> int:
        """Bytes that a GPU needs to have: the peak's, what the allocator loses, what is reserved."""
        return self.peak.device.total + self.fragments + reserved(self.cluster.world)

    @property
    def fits(self) -> bool | None:
        """Whether GPU and host have what is needed, as far as it is known what they have; None where neither is."""
        known = [
            needed <= there
            for needed, there in ((self.needed, self.cluster.gpu), (self.host_peak, self.cluster.host))
            if there is not None
        ]
        return all(known) if known else None
