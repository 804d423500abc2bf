"""The features of ZeRO's and DeepSpeed's that flags and files ask for and that run: each has another run's numbers."""

from dataclasses import dataclass, field
from typing import Any

STAGE3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
"""Small weights are partitioned too."""
TRAINED = ("actor", "critic")
FROZEN = ("reference", "reward")
ALL = (*TRAINED, *FROZEN)
PLAIN, EMA, LORA, BF16, FP16 = "plain: stage 0", "EMA, stage 0", "LoRA, stage 0", "bf16, stage 0", "fp16, stage 0"
CPU = {"device": "cpu", "pin_memory": False}
WITH_EMA = {"enable_ema": True, "ema_decay": 0.5}
WITH_LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4, "lora_target_modules": "all-linear"}
CHECKPOINTED = {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True}


@dataclass(frozen=True)
class Feature:
    """One run of step 3.

    by: "flag" or "file", for the table. flags: of the command line, beside those of every run. files: by role, the
    DeepSpeed JSON of its engine. refused: the key that the message has to name; None where the run has to be done.
    like: the feature whose numbers it has to have, to `tolerance`, in the first so many `steps` (None: in all).
    """

    name: str
    by: str
    flags: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict] = field(default_factory=dict)
    ranks: int = 2
    refused: str | None = None
    like: str = PLAIN
    tolerance: float = 1e-3
    steps: int | None = None


def stages(actor: int, critic: int, **others: Any) -> dict[str, Any]:
    """Flags of these ZeRO stages."""
    return {"actor_zero_stage": actor, "critic_zero_stage": critic, **others}


def zero(stage: int = 3, roles: tuple[str, ...] = TRAINED, **settings: Any) -> dict[str, dict]:
    """The same file for these engines, with these settings of ZeRO's."""
    section = (STAGE3 if stage == 3 else {"stage": stage}) | settings
    return {role: {"zero_optimization": section} for role in roles}


def top(stage: int = 2, **sections: Any) -> dict[str, dict]:
    """A file for actor and critic with these sections beside ZeRO's."""
    return {role: content | sections for role, content in zero(stage).items()}


def hpz(ranks: int = 4, **sizes: int) -> dict[str, Any]:
    """Files at stage 3 with groups of so many ranks for each role."""
    files = {role: {"zero_optimization": STAGE3 | {"zero_hpz_partition_size": size}} for role, size in sizes.items()}
    return {"files": files, "ranks": ranks}


def running(nvme: dict[str, Any] | None) -> list[Feature]:
    """Those that run, in the table's order. nvme: the section that offloads parameters to a disk; None: no libaio."""
    swapped = zero(roles=FROZEN, offload_param=nvme)
    return [
        *_plain(),
        *_stages(),
        *_offload(),
        *([Feature("NVMe for frozen parameters", "file", stages(3, 3), swapped)] if nvme else []),
        *_hpz(),
        *_precision(),
        *_settings(),
    ]


def _plain() -> list[Feature]:
    return [
        Feature(PLAIN, "flag", stages(0, 0)),
        Feature(EMA, "flag", stages(0, 0, **WITH_EMA)),
        Feature(LORA, "flag", stages(0, 0, **WITH_LORA), like=LORA),
        Feature(BF16, "flag", stages(0, 0, dtype="bf16"), like=BF16),
        Feature(FP16, "file", {"dtype": "fp16"}, _fp16(0), like=FP16),
        Feature("4 ranks, stage 0", "flag", stages(0, 0), ranks=4),
    ]


def _fp16(stage: int) -> dict[str, dict]:
    return top(stage, fp16={"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1})


def _stages() -> list[Feature]:
    return [
        *(Feature(f"stage {stage}", "flag", stages(stage, stage)) for stage in (1, 2, 3)),
        Feature("stage 3, all four engines", "file", files=zero(roles=ALL)),
        Feature("actor 3, critic 1", "flag", stages(3, 1)),
        Feature("actor 0, critic 3", "flag", stages(0, 3)),
        Feature("actor 2, critic 0, reference 3", "file", stages(2, 0), zero(roles=("reference",))),
        Feature("actor 3, critic 2", "file", files=zero(3, ("actor",)) | zero(2, ("critic",))),
        *(Feature(f"EMA, stage {stage}", "file", WITH_EMA, zero(stage), like=EMA) for stage in (1, 2, 3)),
        Feature("LoRA, stage 3", "file", WITH_LORA, zero(roles=ALL), like=LORA),
    ]


def _offload() -> list[Feature]:
    ema = stages(3, 3, offload=True, ema_device="cpu", **WITH_EMA)
    return [
        *(Feature(f"offload, stage {stage}", "flag", stages(stage, stage, offload=True)) for stage in (1, 2, 3)),
        Feature("offload, EMA in host memory", "flag", ema, like=EMA),
        Feature("offload of frozen models", "flag", {f"offload_{role}_model": True for role in FROZEN}),
        Feature("offload_optimizer", "file", files=zero(2, offload_optimizer=CPU)),
        Feature("offload_optimizer and offload_param", "file", files=zero(offload_optimizer=CPU, offload_param=CPU)),
        Feature("offload_param of all engines", "file", files=zero(roles=ALL, offload_param=CPU)),
    ]


def _hpz() -> list[Feature]:
    offloaded = zero(zero_hpz_partition_size=2, offload_optimizer=CPU, offload_param=CPU)
    return [
        Feature("hpZ: actor", "file", **hpz(actor=2)),
        Feature("hpZ: all four engines", "file", **hpz(actor=2, critic=2, reference=2, reward=2)),
        Feature("hpZ: groups of 2 and of 4", "file", **hpz(actor=2, critic=4, reward=2)),
        Feature("hpZ, generation through partitions", "file", {"rollout_backend": "zero3"}, **hpz(actor=2, critic=2)),
        Feature("hpZ, EMA", "file", WITH_EMA, **hpz(actor=2, critic=2), like=EMA),
        Feature("hpZ, LoRA", "file", WITH_LORA, **hpz(actor=2, critic=2), like=LORA),
        Feature("hpZ, offload", "file", files=offloaded, ranks=4),
        Feature("hpZ: one group of all ranks", "file", **hpz(2, actor=8)),
    ]


def _precision() -> list[Feature]:
    masters = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    bf16, sums = {"dtype": "bf16"}, {"grad_accum_dtype": "fp32"}
    sent = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.05}  # gradients are rounded to 11 and to 8 bits
    return [
        *(Feature(f"bf16, stage {stage}", "file", bf16, zero(stage), like=BF16) for stage in (2, 3)),
        Feature("bf16 masters (first step)", "file", bf16, top(3, bf16=masters), like=BF16, steps=1, tolerance=0.1),
        Feature("gradients summed in fp32", "file", bf16, top(data_types=sums), like=BF16),
        *(Feature(f"fp16, stage {n}", "file", {"dtype": "fp16"}, _fp16(n), like=FP16, tolerance=5e-3) for n in (2, 3)),
        *(
            Feature(f"communication_data_type {name}", "file", files=top(communication_data_type=name), tolerance=far)
            for name, far in sent.items()
        ),
        Feature("torch_autocast, off", "file", files=top(torch_autocast={"enabled": False})),
    ]


def _settings() -> list[Feature]:
    own = {"contiguous_gradients": False, "reduce_scatter": False}
    moved = {"overlap_comm": True, "round_robin_gradients": True, "parameter_alignment": True}
    fetched = {"stage3_use_all_reduce_for_fetch_params": True, "memory_efficient_linear": False}
    one_by_one = {"stage3_allgather_sequential": True, "overlap_comm": True, "sub_group_size": 500}
    prescaled = {"prescale_gradients": True, "gradient_predivide_factor": 2.0}
    profiled = {"flops_profiler": {"enabled": True, "profile_step": 2}}
    told = {"wall_clock_breakdown": True, "memory_breakdown": True, "steps_per_print": 1}
    return [
        Feature("gradient checkpointing, stage 0", "flag", CHECKPOINTED),
        Feature("gradient checkpointing, stage 3", "file", CHECKPOINTED, zero()),
        Feature("gradients not contiguous, all-reduced, stage 2", "file", files=zero(2, **own)),
        Feature("overlap_comm, round_robin_gradients, stage 2", "file", files=zero(2, reduce_bucket_size=999, **moved)),
        Feature("allgather_partitions false, stage 1", "file", files=zero(1, allgather_partitions=False)),
        Feature("weights fetched by all-reduce, stage 3", "file", files=zero(**fetched, **own)),
        Feature("weights fetched one by one, stage 3", "file", files=zero(**one_by_one)),
        Feature("prescale_gradients, stage 0", "file", files=top(0, **prescaled)),
        Feature("flops_profiler", "file", files=top(**profiled)),
        Feature("wall_clock_breakdown, memory_breakdown", "file", files=top(**told)),
        Feature("aio", "file", files=top(aio={"block_size": 1048576})),
        Feature("activation_checkpointing, all off", "file", files=top(activation_checkpointing={"profile": False})),
    ]
