"""The number of bytes that a DeepSpeed engine holds on each rank, between steps and while it trains.

A model has P parameters, of which T train; there are N ranks; a parameter has b bytes in the compute dtype:

    stage             0                1                2                3
    weights           b P              b P              b P              b P / N
    gradients         b T              b T              b T / N          b T / N
    masters (float32) 4 T, none        4 T / N          4 T / N          4 T / N
                      in fp32
    Adam's moments    8 T              8 T / N          8 T / N          8 T / N

In addition there are buckets in which gradients are reduced, and copies of gradients during the optimizer step. While a
model computes at stage 3, layers are gathered one after the other, some of them in advance.

Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py, runtime/fp16/unfused_optimizer.py.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from engine.engine_spec import OptimizerSpec
from engine.zero.config import EngineConfig, build_ds_config, with_fitting_sizes, zero_settings
from engine.zero.gather_once import NOTHING_KEPT, Kept
from engine.zero.gathering import GATHER_BUCKET
from training.tools.memory.cluster import Cluster
from training.tools.memory.meta_model import MetaModel

FLOAT = 4
SUB_GROUP = 1_000_000_000  # parameters that DeepSpeed updates at a time at stage 3

Bytes = Counter[tuple[str, str]]
"""{(role, kind): number of bytes}."""


@dataclass(frozen=True)
class Engine:
    """The memory of one engine on one rank.

    zero: DeepSpeed's settings (`engine.zero.config.zero_settings`).
    world: the number of ranks.
    passes: the number of forward and backward passes in one optimizer step.
    offload: whether a frozen model is kept in host memory while it is not used.
    master_width: the number of bytes of each master weight, and of each number in Adam's moments.
    tf_adam: whether the optimizer is TensorFlowAdam, which has a buffer of its own.
    """

    model: MetaModel
    stage: int
    zero: Any
    world: int
    passes: int = 1
    offload: bool = False
    master_width: int = FLOAT
    tf_adam: bool = False

    @classmethod
    def of(
        cls, model: MetaModel, config: EngineConfig, dtype: str, cluster: Cluster, passes: int, optimizer: OptimizerSpec
    ) -> "Engine":
        """The engine that this configuration makes of the model. Raises: UserError for a wrong DeepSpeed file."""
        ds_config = build_ds_config(config, dtype=dtype, micro_batch_size=1, trained=model.trained)
        return cls(
            model,
            config.stage,
            zero_settings(with_fitting_sizes(model.module, ds_config)),
            cluster.world,
            passes,
            offload=config.offload and config.stage == 0 and not model.trained,
            master_width=FLOAT // 2 if ds_config["bf16"].get("bf16_master_weights_and_grads") else FLOAT,
            tf_adam=optimizer.form == "tf_adam",
        )

    def bytes(self, kind: str, numbers: float, width: int | None = None) -> Bytes:
        """The bytes of `numbers` elements. width: the bytes of each, by default those of a weight."""
        return Bytes({(self.model.role, kind): round(numbers * (self.model.width if width is None else width))})

    @property
    def offloads_optimizer(self) -> bool:
        """Whether master weights and moments are in host memory."""
        section = self.zero.offload_optimizer
        return self.model.trained and section is not None and section.device != "none"

    @property
    def _offloads_weights(self) -> bool:
        """Whether weights are in host memory, at stage 3 their partitions."""
        section = self.zero.offload_param
        return self.offload or (self.stage == 3 and section is not None and section.device != "none")

    @property
    def share(self) -> float:
        """The number of trained parameters whose master weights are on this rank."""
        return self.model.trains / (self.world if self.stage else 1)

    @property
    def weights(self) -> Bytes:
        """The weights on this rank. The second copy of hpZ is divided in each group."""
        numbers, group = self.model.numbers, min(int(self.zero.zero_hpz_partition_size), self.world)
        held = numbers if self.stage < 3 else numbers / self.world + (numbers / group if group > 1 else 0)
        return self.bytes("weights", held)

    @property
    def _bucket(self) -> int:
        """The number of gradients that are reduced at a time."""
        return min(self.model.trains, self.zero.reduce_bucket_size)

    def at_rest(self) -> tuple[Bytes, Bytes]:
        """(bytes on the device, bytes in host memory) between two optimizer steps, after the first one, in which Adam
        allocates its moments."""
        weights = self.weights
        device, host = (Bytes(), weights) if self._offloads_weights else (weights, Bytes())
        if not self.model.trained:
            return device, host
        masters = 0 if self.stage == 0 and self.model.width == FLOAT else 1
        states = self.bytes("optimizer", (masters + 2) * self.share, self.master_width)
        if self.stage == 3:
            states += self.bytes("gradients", self.share)
            device = device + self.bytes("buffers", self._bucket)
        if not self.offloads_optimizer:
            return device + states, host
        if self.stage < 3:
            states += self.bytes("buffers", 2 * self.share)  # weights on their way, and sums over passes
        return device, host + states + self.bytes("gradients", self.share, FLOAT)

    @property
    def loading(self) -> int:
        """The number of bytes of host memory in which a rank builds the model: all weights below stage 3."""
        return self.weights.total() if self.stage < 3 else 0

    @property
    def average(self) -> int:
        """The number of bytes on this rank of a float32 average of the weights that train."""
        return round(FLOAT * self.share)

    @property
    def written(self) -> Bytes:
        """A rank's part of a checkpoint: master weights, Adam's moments and, if the model has no adapters, frozen
        weights."""
        model = self.model
        frozen = model.numbers - model.trains if model.trained and model.module.adapters is None else 0
        states = self.bytes("checkpoint", 3 * model.trains / self.world, self.master_width)
        return states + self.bytes("checkpoint", frozen / self.world)

    def gathered(self, kept: Kept = NOTHING_KEPT) -> Bytes:
        """Whole weights, in addition to `at_rest`, while the partitioned module computes: all of them if they are
        kept; otherwise the layers that DeepSpeed keeps gathered and those that it is fetching."""
        if self.stage < 3 or (self.world == 1 and not self._offloads_weights):
            return Bytes()
        fetched = int(self.zero.max_live_parameters) + 2 * self.model.largest_unit
        fetched = min(
            2 * self.model.numbers, fetched
        )  # a small model's weights are there twice, as received and copied
        return self.bytes("gathered", self.model.numbers if kept.weights else fetched)

    @property
    def gathered_in_buckets(self) -> Bytes:
        """What a rank sends and receives while whole weights are written into a copy, bucket by bucket."""
        numbers = min(self.model.numbers, GATHER_BUCKET + self.model.largest) * (1 + 1 / self.world)
        return self.bytes("gathered", numbers if self.stage == 3 else 0)

    @property
    def computing(self) -> Bytes:
        """The weights of an offloaded frozen model while it computes."""
        return self.weights if self.offload else Bytes()

    def in_backward(self, kept: Kept = NOTHING_KEPT) -> Bytes:
        """Gradients and buckets, in addition to `at_rest`, in the last backward pass of an optimizer step."""
        copied = self._bucket if self.model.trains > self._bucket else 0  # a full bucket, while it is reduced
        buckets = self.bytes("buffers", 2 * self._bucket if self.stage in (1, 2) else copied if self.stage else 0)
        if self.stage < 2 or kept.gradients:
            return buckets + self.bytes("gradients", self.model.trains)
        return buckets + self.held

    @property
    def held(self) -> Bytes:
        """Gradients, in addition to `at_rest`, from the last backward pass to the optimizer step."""
        own = self.stage < 3 and not (self.offloads_optimizer and self.stage)
        return self.bytes("gradients", self.share if own else 0)

    @property
    def in_step(self) -> Bytes:
        """Joined gradients, and gradients in float32, in addition to `at_rest` and `held`, in the optimizer step."""
        if self.offloads_optimizer:
            return Bytes()
        group = min(self.share, SUB_GROUP) if self.stage == 3 else self.share
        width = self.model.width
        floats = (width < self.master_width) + self.tf_adam
        return self.bytes("buffers", group, (width if self.stage else 0) + FLOAT * floats)
