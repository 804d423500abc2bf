"""The features of ZeRO's and DeepSpeed's that a flag or a file can ask for, and what has to come of each.

A feature runs, and then has the numbers of the run that it is `like`; or it is refused by the name of its key.
"""

from dataclasses import dataclass, field
from typing import Any

STAGE3 = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
TRAINED = ("actor", "critic")
ALL = ("actor", "critic", "reference", "reward")
PLAIN = "plain"


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
    tolerance: float = 1e-4
    steps: int | None = None


def stages(actor: int, critic: int, **others: Any) -> dict[str, Any]:
    """Flags of these ZeRO stages."""
    return {"actor_zero_stage": actor, "critic_zero_stage": critic, **others}


def zero(stage: int = 3, roles: tuple[str, ...] = TRAINED, **settings: Any) -> dict[str, dict]:
    """The same file for these engines: small weights partitioned too, and these settings of ZeRO's."""
    section = (STAGE3 if stage == 3 else {"stage": stage}) | settings
    return {role: {"zero_optimization": section} for role in roles}


def top(**sections: Any) -> dict[str, dict]:
    """A file at stage 2 for actor and critic with these sections beside ZeRO's."""
    return {role: {"zero_optimization": {"stage": 2}, **sections} for role in TRAINED}


def hpz(ranks: int = 4, **sizes: int) -> dict[str, Any]:
    """Files at stage 3 with groups of so many ranks for each role."""
    files = {role: {"zero_optimization": STAGE3 | {"zero_hpz_partition_size": size}} for role, size in sizes.items()}
    return {"files": files, "ranks": ranks}


CPU = {"device": "cpu", "pin_memory": False}
LORA = {"actor_lora_dim": 4, "critic_lora_dim": 4, "lora_target_modules": "all-linear"}


def features(disk: str) -> list[Feature]:
    """All of them, in the table's order. disk: a folder that stands for an NVMe disk."""
    nvme = {"device": "nvme", "nvme_path": disk, "pin_memory": False, "buffer_size": 20_000}
    return [
        Feature(PLAIN, "flag", stages(0, 0)),
        *_stages(),
        *_offload(nvme),
        *_hpz(),
        *_zeropp(),
        *_zero_settings(),
        *_precision(),
        *_sections(),
        *_removed(),
    ]


def _stages() -> list[Feature]:
    ema = {"enable_ema": True, "ema_decay": 0.5}
    return [
        *(Feature(f"stage {stage}", "flag", stages(stage, stage)) for stage in (1, 2, 3)),
        Feature("stage 3, all partitioned", "file", files=zero(roles=ALL)),
        Feature("stages: actor 3, critic 1", "flag", stages(3, 1)),
        Feature("stages: actor 0, critic 3", "flag", stages(0, 3)),
        Feature("stages: actor 2, critic 0, reference 3", "file", stages(2, 0), zero(roles=("reference",))),
        Feature("stages: actor 3, critic 2", "file", files=zero(3, ("actor",)) | zero(2, ("critic",))),
        Feature("EMA, stage 0", "flag", stages(0, 0, **ema)),
        *(Feature(f"EMA, stage {stage}", "file", ema, zero(stage), like="EMA, stage 0") for stage in (1, 2, 3)),
        Feature(
            "EMA in host memory, offload",
            "flag",
            stages(3, 3, offload=True, ema_device="cpu", **ema),
            like="EMA, stage 0",
        ),
        Feature("LoRA", "flag", stages(0, 0, **LORA), like="LoRA"),
        Feature("LoRA, stage 3", "file", LORA, zero(roles=ALL), like="LoRA"),
    ]


def _offload(nvme: dict) -> list[Feature]:
    nvme_disk = {name: nvme[name] for name in ("device", "nvme_path")}
    return [
        *(Feature(f"offload, stage {stage}", "flag", stages(stage, stage, offload=True)) for stage in (1, 2, 3)),
        Feature("offload, stage 0", "flag", stages(0, 0, offload=True), refused="--offload"),
        Feature("offload of frozen models", "flag", {"offload_reference_model": True, "offload_reward_model": True}),
        Feature("offload_optimizer", "file", files=zero(2, offload_optimizer=CPU)),
        Feature("offload_optimizer, offload_param", "file", files=zero(offload_optimizer=CPU, offload_param=CPU)),
        Feature("offload_param alone", "file", files=zero(roles=ALL, offload_param=CPU)),
        Feature("offload_param, stage 2", "file", files=zero(2, offload_param=CPU), refused="offload_param"),
        Feature("offload and a file", "flag", {"offload": True}, zero(), refused="--offload"),
        Feature("offload_optimizer.ratio", "file", files=zero(offload_optimizer=CPU | {"ratio": 0.5}), refused="ratio"),
        Feature(
            "NVMe for frozen parameters", "file", stages(3, 3), zero(roles=ALL[2:], offload_param=nvme)
        ),
        Feature("NVMe for trained parameters", "file", files=zero(offload_param=nvme), refused="offload_param.device"),
        Feature(
            "NVMe for the optimizer", "file", files=zero(offload_optimizer=nvme_disk), refused="offload_optimizer.device"
        ),
        Feature(
            "SuperOffload", "file", files=zero(offload_optimizer=CPU | {"super_offload": True}), refused="super_offload"
        ),
        Feature("cpu_offload (old name)", "file", files=zero(2, cpu_offload=True), refused="cpu_offload"),
        Feature(
            "zenflow", "file", files=zero(2, zenflow={"topk_ratio": 0.1}, offload_optimizer=CPU), refused="zenflow"
        ),
    ]


def _hpz() -> list[Feature]:
    ema = {"enable_ema": True, "ema_decay": 0.5}
    return [
        Feature("plain on 4 ranks", "flag", stages(0, 0), ranks=4),
        Feature("hpZ: actor", "file", **hpz(actor=2)),
        Feature("hpZ: actor and critic", "file", **hpz(actor=2, critic=2)),
        Feature("hpZ: all engines", "file", **hpz(actor=2, critic=2, reference=2, reward=2)),
        Feature("hpZ: groups of 2 and of 4", "file", **hpz(actor=2, critic=4, reward=2)),
        Feature("hpZ through partitions", "file", {"rollout_backend": "zero3"}, **hpz(actor=2, critic=2)),
        Feature("hpZ, EMA", "file", ema, **hpz(actor=2, critic=2), like="EMA, stage 0"),
        Feature("hpZ, LoRA", "file", LORA, **hpz(actor=2, critic=2), like="LoRA"),
        Feature(
            "hpZ, offload",
            "file",
            files=zero(zero_hpz_partition_size=2, offload_optimizer=CPU, offload_param=CPU),
            ranks=4,
        ),
        Feature("hpZ: groups of 3 of 4 ranks", "file", **hpz(actor=3), refused="zero_hpz_partition_size"),
        Feature("hpZ: groups of 8 of 2 ranks", "file", **hpz(2, actor=8), refused="zero_hpz_partition_size"),
        Feature("hpZ, stage 2", "file", files=zero(2, zero_hpz_partition_size=2), refused="zero_hpz_partition_size"),
    ]


def _zeropp() -> list[Feature]:
    names = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    return [
        *(Feature(name, "file", files=zero(**{name: True}), refused=name) for name in names),
        Feature(
            "zero_quantized_weights of frozen engines",
            "file",
            stages(3, 3),
            zero(roles=ALL[2:], zero_quantized_weights=True),
            refused="zero_quantized_weights",
        ),
        Feature("MiCS", "file", files=zero(mics_shard_size=2), refused="mics_shard_size"),
    ]


def _zero_settings() -> list[Feature]:
    at2: dict[str, Any] = {
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "allgather_partitions": False,
        "use_multi_rank_bucket_allreduce": False,
        "overlap_comm": True,
        "round_robin_gradients": True,
        "parameter_alignment": True,
        "ignore_unused_parameters": False,
        "reduce_bucket_size": 1000,
    }
    at3: dict[str, Any] = {
        "stage3_use_all_reduce_for_fetch_params": True,
        "stage3_allgather_sequential": True,
        "stage3_module_granularity_threshold": 100,
        "memory_efficient_linear": False,
        "override_module_apply": False,
        "enable_sanity_checks": True,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "overlap_comm": True,
        "sub_group_size": 500,
        "leaf_module": {"classes": [], "names": [], "name_suffixes": []},
        "log_trace_cache_warnings": True,
    }
    unused = ("legacy_stage1", "elastic_checkpoint", "pipeline_loading_checkpoint")
    return [
        *(Feature(f"{name}, stage 2", "file", files=zero(2, **{name: value})) for name, value in at2.items()),
        *(Feature(f"{name}, stage 3", "file", files=zero(**{name: value})) for name, value in at3.items()),
        *(Feature(name, "file", files=zero(1, **{name: True}), refused=name) for name in unused),
        Feature(
            "stage3_gather_16bit_weights_on_model_save",
            "file",
            files=zero(stage3_gather_16bit_weights_on_model_save=True),
            refused="stage3_gather_16bit_weights_on_model_save",
        ),
    ]


def _precision() -> list[Feature]:
    low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    sums = {"data_types": {"grad_accum_dtype": "fp32"}}
    return [
        Feature("bf16, stage 0", "flag", stages(0, 0, dtype="bf16"), like="bf16, stage 0"),
        *(
            Feature(f"bf16, stage {stage}", "file", {"dtype": "bf16"}, zero(stage), like="bf16, stage 0", tolerance=0.1)
            for stage in (2, 3)
        ),
        Feature("fp16, stage 0", "flag", stages(0, 0, dtype="fp16"), like="fp16, stage 0"),
        Feature("fp16, stage 3", "file", {"dtype": "fp16"}, zero(), like="fp16, stage 0", tolerance=0.1),
        Feature(
            "bf16 masters",
            "file",
            {"dtype": "bf16"},
            {r: f | {"bf16": low} for r, f in zero().items()},
            like="bf16, stage 0",
            tolerance=0.1,
        ),
        Feature(
            "gradients summed in fp32", "file", {"dtype": "bf16"}, top(**sums), like="bf16, stage 0", tolerance=0.1
        ),
        Feature(
            "one engine in bf16",
            "file",
            {"dtype": "fp32"},
            {"critic": {"bf16": {"enabled": True}}},
            refused="bf16.enabled",
        ),
        Feature(
            "one engine in fp16",
            "file",
            {"dtype": "fp32"},
            {"actor": {"fp16": {"enabled": True}}},
            refused="fp16.enabled",
        ),
        Feature(
            "torch_autocast",
            "file",
            files=top(torch_autocast={"enabled": True, "dtype": "bfloat16"}),
            refused="torch_autocast",
        ),
        Feature(
            "torch_autocast of one engine",
            "file",
            stages(0, 2),
            {"critic": top(torch_autocast={"enabled": True})["critic"]},
            refused="torch_autocast",
        ),
        Feature("torch_autocast off", "file", files=top(torch_autocast={"enabled": False})),
        *(
            Feature(f"communication_data_type {name}", "file", files=top(communication_data_type=name), tolerance=tol)
            for name, tol in (("fp32", 1e-4), ("bf16", 0.1), ("fp16", 0.02))
        ),
        Feature("data_types.param_dtype", "file", files=top(data_types={"param_dtype": "bf16"}), refused="param_dtype"),
        Feature(
            "data_types.buffer_dtype", "file", files=top(data_types={"buffer_dtype": "bf16"}), refused="buffer_dtype"
        ),
    ]


def _sections() -> list[Feature]:
    return [
        Feature(
            "gradient checkpointing, stage 0",
            "flag",
            {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True},
        ),
        Feature(
            "gradient checkpointing, stage 3",
            "file",
            {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True},
            zero(),
        ),
        Feature(
            "activation_checkpointing",
            "file",
            files=top(activation_checkpointing={"partition_activations": True}),
            refused="activation_checkpointing",
        ),
        Feature(
            "activation_checkpointing, all off",
            "file",
            files=top(activation_checkpointing={"partition_activations": False, "cpu_checkpointing": False}),
        ),
        Feature("AutoTP", "file", files=top(tensor_parallel={"autotp_size": 2}), refused="tensor_parallel.autotp_size"),
        Feature(
            "AutoTP of one engine",
            "file",
            stages(0, 2),
            {"critic": top(tensor_parallel={"autotp_size": 2})["critic"]},
            refused="tensor_parallel.autotp_size",
        ),
        Feature(
            "sequence_parallel_size", "file", files=top(sequence_parallel_size=2), refused="sequence_parallel_size"
        ),
        Feature("pipeline", "file", files=top(pipeline={"stages": 2}), refused="pipeline"),
        Feature("expert_parallel", "file", files=top(expert_parallel={"enabled": True}), refused="expert_parallel"),
        Feature(
            "DeepCompile",
            "file",
            files={r: f | {"compile": {"deepcompile": True}} for r, f in zero().items()},
            refused="compile",
        ),
        Feature("hybrid_engine", "file", files=top(hybrid_engine={"enabled": True}), refused="hybrid_engine"),
        Feature(
            "optimizer", "file", files=top(optimizer={"type": "Adam", "params": {"lr": 1e-3}}), refused="optimizer"
        ),
        Feature("scheduler", "file", files=top(scheduler={"type": "WarmupLR"}), refused="scheduler"),
        Feature("data_efficiency", "file", files=top(data_efficiency={"enabled": True}), refused="data_efficiency"),
        Feature(
            "flops_profiler",
            "file",
            files=top(flops_profiler={"enabled": True, "profile_step": 1}),
            refused="flops_profiler",
        ),
        Feature("autotuning", "file", files=top(autotuning={"enabled": True}), refused="autotuning"),
        Feature("tensorboard", "file", files=top(tensorboard={"enabled": True}), refused="tensorboard"),
        Feature("wandb", "file", files=top(wandb={"enabled": True}), refused="wandb"),
        Feature("csv_monitor", "file", files=top(csv_monitor={"enabled": True}), refused="csv_monitor"),
        Feature("comet", "file", files=top(comet={"enabled": True}), refused="comet"),
        Feature("universal checkpoints", "file", files=top(checkpoint={"load_universal": True}), refused="checkpoint"),
        Feature("weight_quantization", "file", files=top(weight_quantization={}), refused="weight_quantization"),
        Feature("comms_logger", "file", files=top(comms_logger={"enabled": True})),
        Feature("wall_clock_breakdown", "file", files=top(wall_clock_breakdown=True)),
        Feature("memory_breakdown", "file", files=top(memory_breakdown=True)),
        Feature("dump_state", "file", files=top(dump_state=True)),
        Feature("steps_per_print", "file", files=top(steps_per_print=1)),
        Feature("prescale_gradients", "file", files=top(prescale_gradients=True)),
        Feature("gradient_predivide_factor", "file", files=top(gradient_predivide_factor=2.0)),
        Feature(
            "gradient_predivide_factor, prescaled, stage 0",
            "file",
            files={r: {"prescale_gradients": True, "gradient_predivide_factor": 2.0} for r in TRAINED},
        ),
        Feature(
            "gradient_allreduce_op", "file", files=top(gradient_allreduce_op="sum"), refused="gradient_allreduce_op"
        ),
        Feature(
            "managed_gradient_accumulation",
            "file",
            files=top(managed_gradient_accumulation=False),
            refused="managed_gradient_accumulation",
        ),
        Feature("zero_allow_untested_optimizer", "file", files=top(zero_allow_untested_optimizer=False)),
        Feature(
            "zero_force_ds_cpu_optimizer",
            "file",
            files={r: f | {"zero_force_ds_cpu_optimizer": True} for r, f in zero(2, offload_optimizer=CPU).items()},
        ),
        Feature("aio", "file", files=top(aio={"block_size": 1048576})),
        Feature(
            "seq_parallel_communication_data_type",
            "file",
            files=top(seq_parallel_communication_data_type="bf16"),
            refused="seq_parallel_communication_data_type",
        ),
    ]


def _removed() -> list[Feature]:
    """What DeepSpeed had, and has no longer."""
    names = (
        "elasticity",
        "compression_training",
        "curriculum_learning",
        "progressive_layer_drop",
        "amp",
        "quantize_training",
        "eigenvalue",
        "sparse_attention",
        "nebula",
        "graph_harvesting",
    )
    return [
        *(Feature(name, "file", files=top(**{name: {"enabled": True}}), refused=name) for name in names),
        Feature("sparse_gradients", "file", files=top(sparse_gradients=True), refused="sparse_gradients"),
    ]
