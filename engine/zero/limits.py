"""What DeepSpeed's configurations may not ask for here, of one engine or of several in one process, and why."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine import distributed
from engine.errors import UserError

# Settings of ZeRO's under which numbers of the training state are on a disk, in another optimizer or another process,
# or not what is computed with.
_OUT_OF_REACH: dict[str, Callable[[Any], bool]] = {
    "offload_optimizer.device": lambda device: device == "nvme",
    "offload_optimizer.ratio": lambda ratio: ratio < 1,
    "offload_optimizer.super_offload": bool,
    "offload_param.device": lambda device: device == "nvme",
    "zenflow": bool,
    "zero_quantized_nontrainable_weights": bool,
}


def refuse_out_of_reach(zero: Mapping, path: str | None) -> None:
    """Raise UserError for a file that keeps numbers of the training state where no restart point finds them, or that
    offloads what stage 0 does not."""
    if zero["stage"] == 0 and zero.get("offload_optimizer"):
        raise UserError(
            f"{path}: zero_optimization.offload_optimizer is {zero['offload_optimizer']!r}, but the stage is 0, which "
            "offloads nothing. Use stage 1, 2 or 3, or leave it out of the file."
        )
    for name, elsewhere in _OUT_OF_REACH.items():
        section, _, key = name.partition(".")
        value = (zero.get(section) or {}).get(key) if key else zero.get(section)
        if value is not None and elsewhere(value):
            raise UserError(
                f"{path}: zero_optimization.{name} is {value!r}, under which no restart point can be written, and a "
                "run that is asked to end writes one. Leave it out of the file."
            )


def refuse_what_cannot_be(config: dict, path: str | None) -> None:
    """Raise UserError for tensor parallelism and torch's autocast; what turns them off is taken out of `config`."""
    size = _setting(config, "tensor_parallel", "autotp_size", path)
    if size not in (None, 0, 1):
        raise UserError(
            f"{path}: tensor_parallel.autotp_size is {size!r}, but all ranks are given rows of their own here, and "
            "DeepSpeed has one size of it for all engines of a process. Divide the model by --actor_zero_stage 3 and "
            "its like, and leave tensor_parallel out of the file."
        )
    if _setting(config, "torch_autocast", "enabled", path):
        raise UserError(
            f"{path}: torch_autocast.enabled is true, which DeepSpeed has for all engines of a process or for none, "
            "with one dtype. Give --dtype bf16 or fp16 instead, and leave torch_autocast out of the file."
        )
    for name in ("tensor_parallel", "torch_autocast"):
        config.pop(name, None)


def _setting(config: Mapping, section: str, key: str, path: str | None) -> Any:
    content = config.get(section, {})
    if not isinstance(content, dict):
        raise UserError(f"{path}: {section} is {content!r}, but should be a JSON object.")
    return content.get(key)


def refuse_low_precision(config: Mapping, dtype: str, path: str | None) -> None:
    """Raise UserError for 16-bit master weights that DeepSpeed would not take, or that would learn nothing."""
    low, zero = config["bf16"], config["zero_optimization"]
    if config["fp16"].get("fp16_master_weights_and_grads"):
        raise UserError(
            f"{path}: fp16.fp16_master_weights_and_grads is true, but in fp16 updates below 6e-8 are none. Leave it "
            "out of the file; bf16.bf16_master_weights_and_grads takes as little memory."
        )
    given = {name: bool(low.get(name)) for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states")}
    if not any(given.values()):
        return
    lacking = [
        *(f"{name} is not true" for name, is_given in given.items() if not is_given),
        *([f"--dtype is {dtype}"] if dtype != "bf16" else []),
        *(["the stage is 0"] if zero["stage"] == 0 else []),
        *(
            ["the optimizer is offloaded"]
            if (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
            else []
        ),
    ]
    if lacking:
        raise UserError(
            f"{path}: bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states go together, with --dtype bf16 "
            f"at stages 1 to 3 and without offload, but {' and '.join(lacking)}. Change that, or leave both out of the "
            "file."
        )


def use_own_swap_folder(zero: dict, role: str) -> None:
    """Have an engine that swaps its parameters to a disk do so in a folder of its own below the one that is given:
    DeepSpeed removes what it finds there when it begins, another engine's parameters too."""
    section = zero.get("offload_param") or {}
    if section.get("device") == "nvme" and section.get("nvme_path") is not None:
        zero["offload_param"] = {**section, "nvme_path": str(Path(section["nvme_path"]) / role)}


_ROUNDED = (
    "its numbers are rounded to {bits} bits, so that a step learns another thing than old log-probs and rewards were "
    "computed of, and DeepSpeed's kernels for it are for GPUs alone: zero_hpz_partition_size sends less and changes no "
    "number"
)
_OTHER_POINTS = "it is about checkpoints of DeepSpeed's, and restart points are the program's own (--save_steps)"
_MICS = "DeepSpeed itself has it no longer: zero_hpz_partition_size keeps gathers within a node, too"
_LAYERS = (
    "decoder layers are fetched as one here already, and a leaf within a leaf is freed twice: leaf_module names others"
)

REFUSED_OF_ZERO = {
    "zero_quantized_weights": _ROUNDED.format(bits=8),
    "zero_quantized_gradients": _ROUNDED.format(bits="8 and 4"),
    "zeropp_loco_param": "DeepSpeed itself has it no longer",
    "mics_shard_size": _MICS,
    "mics_hierarchical_params_gather": _MICS,
    "legacy_stage1": "DeepSpeed itself has it no longer",
    "stage3_module_granularity_threshold": _LAYERS,
    "module_granularity_threshold": _LAYERS,
    "elastic_checkpoint": _OTHER_POINTS,
    "pipeline_loading_checkpoint": _OTHER_POINTS,
    "save_muon_momentum_buffer_in_memory": "the optimizer is Adam",
    "cpu_offload": 'it is an old name: write "offload_optimizer": {"device": "cpu"}',
    "cpu_offload_param": 'it is an old name: write "offload_param": {"device": "cpu"}',
    "cpu_offload_use_pin_memory": 'it is an old name: write "pin_memory" in offload_optimizer and offload_param',
}
"""Of engines that train and of frozen ones, at every stage: why there is no such thing here, and what does its work."""


def refuse_of_zero(zero: dict, path: str | None) -> None:
    """Raise UserError for a setting of ZeRO's that is REFUSED_OF_ZERO; those that are off are taken out, and sections
    that offload nothing."""
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name, {})
        if section in (None, {}) or (isinstance(section, dict) and section.get("device") == "none"):
            zero.pop(name, None)
    for name in [name for name in zero if name in REFUSED_OF_ZERO]:
        if value := zero.pop(name):
            raise UserError(
                f"{path}: zero_optimization.{name} is {value!r}, but {REFUSED_OF_ZERO[name]}. Leave it out of the file."
            )


def refuse_at_stage(zero: Mapping, path: str | None) -> None:
    """Raise UserError for what ZeRO has at stage 3 alone, and would ignore at another one."""
    stage, size = zero["stage"], int(zero.get("zero_hpz_partition_size", 1))
    asked = {
        "zero_hpz_partition_size": size if size > 1 else None,
        "offload_param": zero.get("offload_param"),
        "zero_quantized_nontrainable_weights": zero.get("zero_quantized_nontrainable_weights"),
    }
    for name, value in asked.items():
        if value and stage != 3:
            raise UserError(
                f"{path}: zero_optimization.{name} is {value!r}, but the stage is {stage}: weights are partitioned at "
                "stage 3 alone. Change the stage, or leave it out of the file."
            )
    world = distributed.world_size()
    if size > 1 and world % min(size, world):
        raise UserError(
            f"{path}: zero_optimization.zero_hpz_partition_size is {size}, but {distributed.ranks_in_words()} cannot "
            f"be divided into groups of {size}. Give the number of a node's GPUs, or another that divides the ranks."
        )
    if size > 1 and (zero.get("offload_param") or {}).get("device") == "nvme":
        raise UserError(
            f"{path}: zero_optimization.zero_hpz_partition_size is {size} with offload_param.device 'nvme', but the "
            "second copy that hpZ keeps would be in memory. Leave one of the two out of the file."
        )


def refuse_offload_of_roles(config: Mapping) -> None:
    """Raise UserError where the optimizer's states of an engine in which several models learn are in host memory."""
    if config["zero_optimization"].get("offload_optimizer"):
        raise UserError(
            "--share_trunk with an offloaded optimizer: DeepSpeed then takes over the gradients of the last backward "
            "pass alone, which is the actor's, and the critic's would be lost. The states are those of the adapters "
            "alone: leave --offload (offload_optimizer) out."
        )
