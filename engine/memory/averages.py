"""What weights of the actor's take that are kept beside its master weights: averages, and a reference that moves."""

from dataclasses import dataclass

from engine.engine_spec import EngineSpec
from engine.memory.bytes_by_role import Bytes
from engine.memory.zero_memory import FLOAT, ZeroMemory


@dataclass(frozen=True, slots=True)
class Averages:
    """Of a run of `spec`, whose actor's engine is `actor`."""

    spec: EngineSpec
    actor: ZeroMemory

    @property
    def bytes(self) -> Bytes:
        """Of all of them; {} without any."""
        shard = FLOAT * self.actor.trained_share
        found = Bytes().add("ema", "average", shard if self.spec.ema_decay is not None else 0)
        return found.add("reference", "weights", shard if self.spec.reference_refresh_steps is not None else 0)

    @property
    def on_host(self) -> bool:
        """Whether they are in host memory."""
        return self.spec.ema_device == "cpu" or self.actor.offloads_optimizer

    @property
    def exchanged(self) -> tuple[Bytes, Bytes]:
        """On the device and in host memory, while a reference takes the place of the actor's weights: one master more,
        which is a group of parameters, or at stage 0 one of them."""
        numbers = self.actor.model.largest if self.actor.stage == 0 else self.actor.largest_group
        needed = Bytes().add("reference", "buffers", FLOAT * numbers)
        return (Bytes(), needed) if self.actor.offloads_optimizer else (needed, Bytes())
