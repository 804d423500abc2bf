"""What DeepSpeed's configurations may not ask for here, of one engine or of several in one process, and why."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    """Raise UserError for a file that keeps numbers of the training state where no restart point finds them."""
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


def refuse_together(configs: Mapping[str, Mapping], paths: Mapping[str, str | None]) -> None:
    """Raise UserError for engines, by role, that DeepSpeed cannot have in one process.

    configs: the engines' whole configurations; paths: the users' files that they come from.
    """
    zeros = {role: config["zero_optimization"] for role, config in configs.items()}
    sizes = {role: zero.get("zero_hpz_partition_size", 1) for role, zero in zeros.items() if zero["stage"] == 3}
    role, size = max(sizes.items(), key=lambda item: item[1], default=("", 1))
    if size > 1 and len(sizes) > 1:
        others = ", ".join(f"{other} {own}" for other, own in sizes.items() if other != role)
        raise UserError(
            f"{paths[role]}: zero_optimization.zero_hpz_partition_size is {size} for the {role}, but there are other "
            f"engines at stage 3 ({others}), and DeepSpeed makes its groups once in a process. Leave it out of the "
            "file."
        )


def refuse_offload_of_roles(config: Mapping) -> None:
    """Raise UserError where the optimizer's states of an engine in which several models learn are in host memory."""
    if config["zero_optimization"].get("offload_optimizer"):
        raise UserError(
            "--share_trunk with an offloaded optimizer: DeepSpeed then takes over the gradients of the last backward "
            "pass alone, which is the actor's, and the critic's would be lost. The states are those of the adapters "
            "alone: leave --offload (offload_optimizer) out."
        )
