"""What steps 1 and 2 take: one model that trains, with no rollouts."""

from dataclasses import dataclass

from engine.engine_spec import OptimizerSpec
from engine.memory.blueprint import Blueprint, built
from engine.memory.bytes_by_role import Bytes
from engine.memory.engine_plan import EnginePlan
from engine.memory.memory_plan import MemoryPlan, Moment
from engine.memory.passes import Rows, training_pass
from engine.memory.workload import Cluster
from engine.memory.zero_memory import ZeroMemory
from engine.models.attention import USUAL, Attention
from engine.models.classes import CLASSIFIER, LANGUAGE_MODEL
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig, build_ds_config, with_fitting_sizes, zero_settings

NONE = Bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class OneModel:
    """A model of step 1, or (scorer) of step 2, and how it trains.

    rows: of one forward and backward pass; length: tokens of each; passes: of one optimizer step.
    """

    path: str
    scorer: bool
    engine: EngineConfig
    optimizer: OptimizerSpec
    dtype: str
    rows: int
    length: int
    passes: int = 1
    checkpointing: bool = False
    lora: LoraSpec | None = None
    trust_remote_code: bool = False
    attention: Attention = USUAL

    @property
    def blueprint(self) -> Blueprint:
        """Of its engine; raises UserError as `engine.memory.blueprint.built` does."""
        return built(
            "model",
            self.path,
            CLASSIFIER if self.scorer else LANGUAGE_MODEL,
            True,
            dtype=self.dtype,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            checkpointing=self.checkpointing,
            lora=self.lora,
        )


def plan_one_model(one: OneModel, cluster: Cluster) -> MemoryPlan:
    """Its plan, of loading, training and saving; raises UserError as `engine.memory.plan` does."""
    model = one.blueprint
    ds_config = build_ds_config(one.engine, dtype=one.dtype, micro_batch_size=one.rows)
    zero = zero_settings(with_fitting_sizes(model.module, ds_config))
    engine = ZeroMemory(
        model, one.engine.stage, zero, cluster.world, one.optimizer, on_gpu=cluster.on_gpu, passes=one.passes
    )
    unstepped, unstepped_host = engine.at_rest(stepped=False)
    rest, host = engine.at_rest()
    (read, reading), (making, loading) = engine.reading, engine.loading
    needed = Bytes({"model": training_pass(model, Rows(one.rows, 1, one.length - 1), gpu=cluster.gpu_bytes)})
    first = needed + engine.in_backward(1) + engine.gathered(backward=True)
    room = cluster.room
    free = None if room is None else room - (rest if cluster.on_gpu else unstepped).total  # as of step 3's models
    kept = engine.kept(one.passes, needed + engine.in_backward(one.passes) + engine.gathered(backward=True), free)
    whole = engine.gathered(backward=True, kept=kept)
    backward, reduced = engine.in_backward(one.passes, kept), engine.in_reduction(one.passes)
    step, step_host = engine.in_step
    tensor = engine.largest_tensor
    saved = tensor if engine.stage == 3 else NONE
    moments = (
        Moment("load", "the model is read", read, reading, NONE),
        Moment("load", "the model is loaded", unstepped + making, unstepped_host + loading, NONE),
        *([Moment("train", "the first pass", rest + first, host, NONE)] if kept.weights else []),
        Moment("train", "the backward pass", rest + needed + backward + whole, host, NONE),
        Moment("train", "gradients are reduced", rest + reduced + (whole if kept.weights else NONE), host, NONE),
        Moment("train", "the optimizer's step", rest + engine.held + step, host + step_host, NONE),
        Moment("save", "the model is written", rest + saved, host, tensor),
    )
    return MemoryPlan(moments, cluster, "", engines={"model": EnginePlan.of(engine, kept=kept)})
