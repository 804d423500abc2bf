"""The number of bytes that a DeepSpeed engine holds on each rank at each ZeRO stage, between steps and while it trains.

A model has P parameters, of which T train; there are N ranks; a parameter has b bytes in the compute dtype:

    stage             0                1                2                3
    weights           b P              b P              b P              b P / N
    gradients         b T              b T              b T / N          b T / N
    masters (float32) 4 T, none        4 T / N          4 T / N          4 T / N
                      in fp32
    Adam's moments    8 T              8 T / N          8 T / N          8 T / N

In addition there are buffers in which gradients are reduced, and copies of gradients during the optimizer step.

While a partitioned model computes at stage 3, layers are fetched one after the other, some of them in advance. A layer
is freed after its use, unless it is needed again soon.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py,
runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module), runtime/fp16/unfused_optimizer.py,
runtime/engine.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.memory.blueprint import Blueprint
from engine.models.weight_files import PIECE
from engine.zero.gathering import GATHER_BUCKET
from engine.zero.long_batch import NOTHING_KEPT, Kept, what_to_keep

FLOAT, DOUBLE = 4, 8
REDUCED_AT_ONCE = 500_000_000  # number of gradients, at stage 0 (MEMORY_OPT_ALLREDUCE_SIZE)
SUB_GROUP = 1_000_000_000

KINDS = (
    "weights",
    "gradients",
    "optimizer",
    "buffers",
    "gathered",
    "activations",
    "logits",
    "keys and values",
    "average",
    "checkpoint",
)
"""The kinds of memory, in the order in which tables list them. optimizer: float32 master weights and Adam's moments.
buffers: further memory for communication and for the optimizer step. gathered: whole weights that ZeRO-3 gathers from
partitions for some time. average: the moving average of the weights (EMA). checkpoint: the copy of the state from which
a checkpoint is written."""


class Bytes:
    """The number of bytes of each role and kind, {role: {kind: bytes}}. Two objects can be added with +."""

    def __init__(self, by_role: Mapping[str, Mapping[str, int]] | None = None):
        self.by_role: dict[str, dict[str, int]] = {}
        for role, kinds in (by_role or {}).items():
            for kind, size in kinds.items():
                self.add(role, kind, size)

    def add(self, role: str, kind: str, size: float) -> "Bytes":
        """Add `size` bytes to a role and kind; returns this object."""
        assert kind in KINDS, kind
        if round(size):
            kinds = self.by_role.setdefault(role, {})
            kinds[kind] = kinds.get(kind, 0) + round(size)
        return self

    def __add__(self, other: "Bytes") -> "Bytes":
        both = Bytes(self.by_role)
        for role, kind, size in other:
            both.add(role, kind, size)
        return both

    def __iter__(self) -> Iterator[tuple[str, str, int]]:
        for role, kinds in self.by_role.items():
            for kind, size in kinds.items():
                yield role, kind, size

    @property
    def total(self) -> int:
        """The number of bytes of all roles and kinds together."""
        return sum(size for _, _, size in self)

    def of_role(self, role: str) -> int:
        """The number of bytes of one role, over all kinds."""
        return sum(self.by_role.get(role, {}).values())

    def of_kind(self, kind: str) -> int:
        """The number of bytes of one kind, over all roles."""
        return sum(kinds.get(kind, 0) for kinds in self.by_role.values())


@dataclass(frozen=True)
class ZeroMemory:
    """The memory of one engine on one rank.

    model: the engine's module on the meta device.
    stage: the ZeRO stage.
    zero: DeepSpeed's settings (`engine.zero.config.zero_settings`).
    world: the number of ranks.
    offload: whether a frozen model is kept in host memory while it is not used.
    on_gpu: whether the engine computes on a GPU, whose memory is separate from host memory.
    master_width: the number of bytes of each master weight, and of each number in Adam's moments.
    passes: the number of forward and backward passes in one optimizer step.
    """

    model: Blueprint
    stage: int
    zero: Any
    world: int
    optimizer: OptimizerSpec | None = None
    offload: bool = False
    on_gpu: bool = True
    master_width: int = FLOAT
    passes: int = 1

    @property
    def offloads_optimizer(self) -> bool:
        """Whether master weights and moments are in host memory."""
        section = self.zero.offload_optimizer
        return self.model.trained and section is not None and section.device != "none"

    @property
    def offloads_weights(self) -> bool:
        """Whether the partitions of weights are in host memory."""
        section = self.zero.offload_param
        return self.stage == 3 and section is not None and section.device != "none"

    def _share(self, sizes: list[int]) -> int:
        """The number of elements that a rank holds if tensors of these sizes are divided among all ranks. Each tensor
        is padded so that the number of ranks divides its size."""
        return sum(-(-size // self.world) for size in sizes)

    @property
    def trained_share(self) -> int:
        """The number of trained parameters whose master weights are on this rank."""
        if self.stage == 0:
            return self.model.trains
        if self.stage == 3:
            return self._share([size for group in self.model.groups for size in group])
        return self._share([sum(group) for group in self.model.groups])

    @property
    def weights(self) -> int:
        """The number of bytes of the module's weights on this rank."""
        sizes = [parameter.numel() for parameter in self.model.module.parameters()]
        if self.stage < 3:
            return self.model.width * sum(sizes)
        group = min(int(self.zero.zero_hpz_partition_size), self.world)
        second = sum(-(-size // group) for size in sizes) if group > 1 else 0  # the second copy of hpZ in each group
        return self.model.width * (self._share(sizes) + second)

    @property
    def masters(self) -> int:
        """The number of bytes of the master weights that are separate from the model's weights."""
        return 0 if self.stage == 0 and self.model.width == FLOAT else self.master_width * self.trained_share

    def at_rest(self, stepped: bool = True) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory) between two optimizer steps.

        stepped: whether the first optimizer step is done. Adam allocates its moments in that step.
        """
        role, width = self.model.role, self.model.width
        device, host = Bytes(), Bytes()
        (host if self.offload or self.offloads_weights else device).add(role, "weights", self.weights)
        if not self.model.trained:
            return device, host
        share, states = self.trained_share, host if self.offloads_optimizer else device
        states.add(role, "optimizer", self.masters + (2 * self.master_width * share if stepped else 0))
        if self.stage == 3:
            states.add(role, "gradients", width * share)
            device.add(role, "buffers", width * self._bucket if self.zero.contiguous_gradients else 0)
        if self.offloads_optimizer:
            host.add(role, "gradients", FLOAT * share)
            if self.stage < 3:
                host.add(role, "buffers", width * (share + self.model.largest))
                device.add(role, "buffers", width * self.model.largest)
            if self.stage == 2 and self.passes > 1 and stepped:  # sums over several passes; kept for the next step
                host.add(role, "gradients", width * self._in_partition)
        return device, host

    @property
    def written(self) -> Bytes:
        """The bytes of a rank's part of a checkpoint: master weights, Adam's moments and, if the model has no adapters,
        frozen weights."""
        model = self.model
        trained = model.trains / self.world if self.stage == 0 else self.trained_share
        frozen = model.numbers - model.trains if model.trained and model.module.adapters is None else 0
        size = 3 * self.master_width * trained + model.width * frozen / self.world
        return Bytes().add(model.role, "checkpoint", size)

    @property
    def _in_partition(self) -> int:
        """The number of elements of those parameters that lie wholly or partly in a rank's partition, each parameter
        counted as a whole. The rank with the largest number decides."""
        most = 0
        for rank in range(self.world):
            found = 0
            for group in self.model.groups:
                size, start = -(-sum(group) // self.world), 0
                for numbers in group:
                    found += numbers if start < (rank + 1) * size and start + numbers > rank * size else 0
                    start += numbers
            most = max(most, found)
        return most

    @property
    def _bucket(self) -> int:
        """The number of gradients that are reduced at a time."""
        return min(self.model.trains, self.zero.reduce_bucket_size)

    @property
    def _buckets(self) -> int:
        """The number of bytes of the buffers in which gradients are reduced at stages 1 and 2."""
        if self.stage not in (1, 2) or not (self.zero.contiguous_gradients or self.offloads_optimizer):
            return 0
        return self.model.width * self._bucket * (2 if self.zero.overlap_comm else 1)

    @property
    def _left(self) -> int:
        """The number of gradients that still have to be reduced when the first bucket is full."""
        return self.model.trains - self._bucket

    def kept(self, passes: int, needed: Bytes, free: int | None) -> Kept:
        """Whether whole weights and whole gradients are kept between the passes of an optimizer step.

        needed: the bytes that a forward and backward pass needs on the device, activations included. free: the number
        of bytes that are free before the passes; None if it is not known.
        """
        if self.stage < 3 or self.world == 1 or passes < 2:
            return NOTHING_KEPT
        if free is None:
            return Kept(weights=True, gradients=True)
        model = self.model
        return what_to_keep(
            model.width * model.numbers, model.width * model.trains, needed.total if self.on_gpu else None, free
        )

    def in_backward(self, passes: int, kept: Kept = NOTHING_KEPT) -> Bytes:
        """The bytes on the device, in addition to `at_rest`, at the moment when the last of `passes` backward passes
        still holds all its activations.

        At stages 2 and 3 a bucket is copied and reduced as soon as it is full. With more than one bucket, reduction
        therefore begins during the backward pass. At stage 2 this rank's part of the reduced gradients is then copied
        to the buffer that collects the rank's gradients.
        """
        role, width = self.model.role, self.model.width
        device = Bytes().add(role, "buffers", self._buckets)
        if self.stage < 2 and passes > 1:
            device.add(role, "gradients", width * self.model.trains)
        elif self.stage == 2:
            if passes > 1:
                device.add(role, "gradients", self._gradients_kept)
            if self._left:
                device.add(role, "gradients", self._gradients_kept).add(role, "buffers", width * self._bucket)
        elif self.stage == 3:
            device.add(role, "gradients", width * self.model.trains if kept.gradients else 0)
            device.add(role, "buffers", width * self._bucket if self._left else 0)
        return device

    def in_reduction(self, passes: int) -> Bytes:
        """The bytes on the device, in addition to `at_rest`, at the end of the last backward pass, while gradients are
        reduced. The activations and the weights gathered for the pass have been freed.

        A bucket is reduced in a copy, and this copy is freed before the gradients are copied to their final buffer.
        With one bucket the two copies never exist at the same time, so the larger one counts; with several buckets they
        may exist at the same time, so both count.
        """
        role, width, trains = self.model.role, self.model.width, self.model.trains
        copy, kept = width * self._bucket, self._gradients_kept
        if self.stage == 0:
            at_once = min(trains, REDUCED_AT_ONCE + self.model.largest)
            return Bytes().add(role, "gradients", width * trains).add(role, "buffers", width * at_once)
        if self.stage == 1:  # gradients in the buckets exist nowhere else
            device = Bytes().add(role, "buffers", self._buckets).add(role, "gradients", width * self._left)
            return device.add(role, "gradients", max(copy, kept))
        if self.stage == 3:
            return Bytes().add(role, "buffers", copy)
        device = self.in_backward(passes)
        return device if self._left else device.add(role, "gradients", max(copy, kept))

    @property
    def _gradients_kept(self) -> int:
        """The number of bytes of the gradients that this rank keeps on the device, for its partition, after a backward
        pass at stage 1 or 2."""
        return 0 if self.offloads_optimizer else self.model.width * self._in_partition

    @property
    def held(self) -> Bytes:
        """The bytes on the device, in addition to `at_rest`, from the last backward pass to the optimizer step."""
        if self.stage == 3 or (self.offloads_optimizer and self.stage):
            return Bytes()
        numbers = self.model.trains if self.stage == 0 else self._in_partition
        return Bytes().add(self.model.role, "gradients", self.model.width * numbers)

    @property
    def in_step(self) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory), in addition to `at_rest` and `held`, during the optimizer
        step."""
        role, width = self.model.role, self.model.width
        device, host = Bytes(), Bytes()
        group = self.largest_group
        if self.stage == 0:
            norm = 2 * DOUBLE * self.model.largest if width == FLOAT else DOUBLE * self.model.largest
            device.add(role, "buffers", max(norm, FLOAT * self.model.trains if width < FLOAT else 0))
        elif not self.offloads_optimizer:
            flat = width * group + (FLOAT * group if width < self.master_width else 0)
            device.add(role, "buffers", max(flat, DOUBLE * min(group, self.model.largest)))
        if self.optimizer is not None and self.optimizer.form == "tf_adam":
            (host if self.offloads_optimizer else device).add(role, "buffers", FLOAT * group)
        return device, host

    @property
    def largest_group(self) -> int:
        """The number of elements that the optimizer updates at a time."""
        groups = [
            self._share(group) if self.stage == 3 else -(-sum(group) // self.world) for group in self.model.groups
        ]
        most = max(groups, default=0)
        return min(most, SUB_GROUP) if self.stage == 3 else most if self.stage else self.model.trains

    @property
    def largest_tensor(self) -> Bytes:
        """The bytes of the largest weight when it is gathered. Saving gathers and writes one weight after the other."""
        return Bytes().add(self.model.role, "gathered", self.model.width * self.model.largest)

    def gathered(self, backward: bool = False, ahead: bool = True, kept: Kept = NOTHING_KEPT) -> Bytes:
        """The bytes on the device, in addition to `at_rest`, while the partitioned module computes.

        ahead: whether layers are fetched in advance and kept for their next use. DeepSpeed does this once it has seen
        the order of the layers. During generation, in which passes over prompts and over tokens alternate, it finds no
        fixed order.
        """
        if self.stage < 3 or (self.world == 1 and not self.offloads_weights):
            return Bytes()
        units = self.model.units
        if kept.weights:
            numbers = sum(units)
        else:
            numbers = gathered_numbers(units, self.zero, backward) if ahead else 2 * max(units)
        return Bytes().add(self.model.role, "gathered", self.model.width * numbers)

    def on_device(self) -> Bytes:
        """The bytes on the device, in addition to `at_rest`, while an offloaded frozen model computes."""
        return Bytes().add(self.model.role, "weights", self.weights if self.offload else 0)

    @property
    def reading(self) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory) while weights are read. These are the bytes of the weights. At
        stage 3 weights are partitioned one by one, so the bytes of the largest whole weight are added, and those of the
        piece of its file that is read at a time."""
        role, largest = self.model.role, self.model.width * self.model.largest
        weights = Bytes().add(role, "weights", self.weights)
        if self.stage < 3:
            return weights, Bytes()
        whole = Bytes().add(role, "weights", largest).add(role, "buffers", min(PIECE, largest))
        return (Bytes(), whole + weights) if self.offloads_weights else (weights, whole)

    @property
    def loading(self) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory), in addition to `at_rest(stepped=False)`, while the engine is
        created.

        At stages 0 to 2 a module is loaded into host memory and moved to the device. On the device its weights are
        joined into one buffer (stages 1 and 2), or a step with zero gradients is made (stage 0 in 16 bits). At stage 3
        the trained partitions are joined in host memory, and the master weights are computed from the 16-bit weights
        through a further copy.
        """
        role, width, trains = self.model.role, self.model.width, self.model.trains
        device, host = Bytes(), Bytes()
        if self.stage < 3:
            host.add(role, "weights", self.weights if self.on_gpu else 0)
        else:
            joined = self.trained_share if self.model.trained else 0
            host.add(role, "weights", width * joined)
        if self.stage in (1, 2):
            device.add(role, "buffers", width * trains)
        elif self.stage == 3 and self.model.trained and not self.offloads_optimizer:
            device.add(role, "buffers", self.master_width * min(self.trained_share, SUB_GROUP))
        elif self.stage == 0 and self.model.trained and width < FLOAT:
            device.add(role, "optimizer", 2 * FLOAT * trains).add(role, "gradients", (width + FLOAT) * trains)
        return device, host


@dataclass(frozen=True, slots=True)
class Averages:
    """The averaged weights of a run: the moving average, and a moving reference. actor: the memory of the actor's
    engine."""

    spec: EngineSpec
    actor: ZeroMemory

    @property
    def bytes(self) -> Bytes:
        """The bytes of all averaged weights; empty if the run has none."""
        shard = FLOAT * self.actor.trained_share
        found = Bytes().add("ema", "average", shard if self.spec.ema_decay is not None else 0)
        return found.add("reference", "weights", shard if self.spec.reference_refresh_steps is not None else 0)

    @property
    def written(self) -> Bytes:
        """The bytes of a rank's part of these weights in a checkpoint."""
        ranks = self.actor.world if self.actor.stage == 0 else 1
        return sum((Bytes().add(role, "checkpoint", size / ranks) for role, _, size in self.bytes), Bytes())

    @property
    def on_host(self) -> bool:
        """Whether the averaged weights are in host memory."""
        return self.spec.ema_device == "cpu" or self.actor.offloads_optimizer

    @property
    def exchanged(self) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory) that exchanging a reference's weights with the actor's needs: the
        bytes of one further master tensor. A master tensor holds a group of parameters, or at stage 0 one parameter."""
        numbers = self.actor.model.largest if self.actor.stage == 0 else self.actor.largest_group
        needed = Bytes().add("reference", "buffers", FLOAT * numbers)
        return (Bytes(), needed) if self.actor.offloads_optimizer else (needed, Bytes())


def gathered_numbers(units: Sequence[int], zero: Any, backward: bool) -> int:
    """The largest number of elements that are gathered at the same time.

    units: the number of elements of each unit, in the order of the forward pass; a unit is fetched in one piece. zero:
        DeepSpeed's settings.
    backward: whether a backward pass follows, which uses the units in the opposite order.
    """
    order = [*range(len(units)), *(reversed(range(len(units))) if backward else ())]
    held: set[int] = set()
    ahead, most = 0, 0  # the first index in `order` that is not fetched yet; the largest number so far

    def numbers() -> int:
        return sum(units[unit] for unit in held)

    for place, unit in enumerate(order):
        fetched = 0 if unit in held else units[unit]
        held.add(unit)
        ahead = max(ahead, place + 1)
        room = min(int(zero.max_live_parameters) - numbers(), int(zero.prefetch_bucket_size))
        prefetched = 0
        while ahead < len(order) and prefetched < room:
            if order[ahead] not in held:
                held.add(order[ahead])
                prefetched += units[order[ahead]]
            ahead += 1
        # Units that are fetched together are received in one buffer, and then copied out of the buffer.
        most = max(most, numbers() + max(fetched, prefetched))
        if unit not in order[place + 1 : ahead] and not _soon(unit, order[place + 1 :], units, zero):
            held.discard(unit)
    return most


def bucket_numbers(numbers: int, largest: int, world: int) -> float:
    """The number of elements that each rank holds at a time while the weights of a model are gathered: the elements
    that the rank sends and those that it receives. numbers, largest: the number of elements of the model and of its
    largest weight. world: the number of ranks."""
    return min(numbers, GATHER_BUCKET + largest) * (1 + 1 / world)


def _soon(unit: int, following: Sequence[int], units: Sequence[int], zero: Any) -> bool:
    """Whether a unit is used again before DeepSpeed has used `max_reuse_distance` further elements."""
    distance = 0
    for other in following:
        if distance >= int(zero.max_reuse_distance):
            return False
        if other == unit:
            return True
        distance += units[other]
    return False
