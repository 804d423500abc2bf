"""The features that are refused by name, before anything is loaded."""

from typing import Any

from scripts.zero_features.features import CPU, FROZEN, Feature, hpz, stages, top, zero


def refused(nvme: dict[str, Any], has_libaio: bool) -> list[Feature]:
    """All of them, in the table's order. nvme: the section that offloads parameters to a disk."""
    return [*_offload(nvme, has_libaio), *_zero(), *_sections(), *_precision()]


def _file(name: str, content: dict, flags: dict | None = None, key: str | None = None, ranks: int = 2) -> Feature:
    return Feature(name, "file", flags or {}, content, ranks, key or name)


def _offload(nvme: dict[str, Any], has_libaio: bool) -> list[Feature]:
    disk = {name: nvme[name] for name in ("device", "nvme_path")}
    of_frozen = _file("NVMe for frozen parameters", zero(roles=FROZEN, offload_param=nvme), stages(3, 3), "libaio")
    return [
        Feature("offload, stage 0", "flag", stages(0, 0, offload=True), refused="--offload"),
        Feature("offload beside a file", "flag", {"offload": True}, zero(), refused="--offload"),
        _file("offload_optimizer, stage 0", zero(0, offload_optimizer=CPU), key="offload_optimizer"),
        _file("offload_param, stage 2", zero(2, offload_param=CPU), key="offload_param"),
        _file("offload_optimizer.ratio", zero(offload_optimizer=CPU | {"ratio": 0.5})),
        _file("NVMe for trained parameters", zero(offload_param=nvme), key="offload_param.device"),
        _file("NVMe for the optimizer", zero(offload_optimizer=disk), key="offload_optimizer.device"),
        *([] if has_libaio else [of_frozen]),
        _file("cpu_offload", zero(2, cpu_offload=True)),
        _file("SuperOffload", zero(offload_optimizer=CPU | {"super_offload": True}), key="super_offload"),
        _file("zenflow", zero(2, zenflow={"topk_ratio": 0.1}, offload_optimizer=CPU)),
    ]


def _zero() -> list[Feature]:
    quantized = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
    gone = {"mics_shard_size": 2, "mics_hierarchical_params_gather": True, "zeropp_loco_param": {"err_beta": 0.8}}
    points = ("legacy_stage1", "elastic_checkpoint", "pipeline_loading_checkpoint")
    uneven = hpz(actor=3)["files"]
    return [
        _file("hpZ: groups of 3 of 4 ranks", uneven, key="zero_hpz_partition_size", ranks=4),
        _file("hpZ, stage 2", zero(2, zero_hpz_partition_size=2), key="zero_hpz_partition_size"),
        *(_file(name, zero(**{name: True})) for name in quantized),
        *(
            _file(f"{name} of frozen engines", zero(roles=FROZEN, **{name: True}), stages(3, 3), name)
            for name in (quantized[0], quantized[2])
        ),
        *(_file(name, zero(**{name: value})) for name, value in gone.items()),
        *(_file(name, zero(1, **{name: True})) for name in points),
        _file("stage3_module_granularity_threshold", zero(stage3_module_granularity_threshold=100)),
    ]


def _sections() -> list[Feature]:
    one = {"critic": top(tensor_parallel={"autotp_size": 2})["critic"]}
    unequal = one | {"actor": top(tensor_parallel={"autotp_size": 4})["actor"]}
    sections: dict[str, Any] = {
        "activation_checkpointing": {"partition_activations": True},
        "sequence_parallel_size": 2,
        "pipeline": {"stages": 2},
        "expert_parallel": {"enabled": True},
        "hybrid_engine": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR"},
        "zero_force_ds_cpu_optimizer": True,
        "data_efficiency": {"enabled": True},
        "autotuning": {"enabled": True},
        "tensorboard": {"enabled": True},
        "comms_logger": {"enabled": True},
        "dump_state": True,
        "gradient_allreduce_op": "sum",
        "managed_gradient_accumulation": False,
        "prescale_gradients": True,
        "elasticity": {"enabled": True},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "curriculum_learning": {"enabled": True},
        "amp": {"enabled": True},
        "sparse_gradients": True,
    }
    return [
        _file("AutoTP", top(tensor_parallel={"autotp_size": 2}), key="autotp_size"),
        _file("AutoTP of the critic alone", one, stages(0, 2), "autotp_size"),
        _file("AutoTP, unequal", unequal, key="autotp_size"),
        _file("DeepCompile", top(3, compile={"deepcompile": True}), key="compile"),
        _file("universal checkpoints", top(checkpoint={"load_universal": True}), key="checkpoint"),
        *(_file(name, top(**{name: value})) for name, value in sections.items()),
    ]


def _precision() -> list[Feature]:
    autocast = top(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    return [
        _file("torch_autocast", autocast),
        _file("torch_autocast of the critic alone", {"critic": autocast["critic"]}, stages(0, 2), "torch_autocast"),
        _file("one engine in bf16", {"critic": {"bf16": {"enabled": True}}}, {"dtype": "fp32"}, "bf16.enabled"),
        _file("one engine in fp16", {"actor": {"fp16": {"enabled": True}}}, {"dtype": "fp32"}, "fp16.enabled"),
        _file("data_types.param_dtype", top(data_types={"param_dtype": "bf16"})),
        _file("data_types.buffer_dtype", top(data_types={"buffer_dtype": "bf16"})),
        _file("fp16 masters", {"actor": {"fp16": {"fp16_master_weights_and_grads": True}}}, key="fp16_master_weights"),
    ]
