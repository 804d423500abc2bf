"""DeepSpeed configurations. A JSON file, from configs/ds/ or from the user, is checked and completed with the program's
own settings. DeepSpeed's own check of the whole configuration follows at once, before anything is loaded.
docs/zero_features.md lists what a file may not turn on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from engine import distributed
from engine.errors import UserError, nearest
from engine.files import read_text

# In a wheel the files of configs/ds are in the folder `configs` beside this file; in a checkout they are at its top
# level.
_INSTALLED = Path(__file__).with_name("configs")
CONFIG_DIR = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "configs" / "ds"

SECTIONS = ("zero_optimization", "fp16", "bf16", "data_types")
PASSED_ON = (
    *SECTIONS,
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "flops_profiler",
    "aio",
)
"""Keys of a file that are passed on to DeepSpeed. All others are refused: DeepSpeed says nothing of a misspelt key, and
some of its features would change what the engines compute."""

OWN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_force_ds_cpu_optimizer",
    "zero_allow_untested_optimizer",
)
"""Keys that the program sets. A file may leave them out, set them to "auto", or to the program's value."""

INSTEAD = {
    "optimizer": "--actor_learning_rate and its like",
    "scheduler": "--lr_scheduler_type, --num_warmup_steps",
    "activation_checkpointing": "--actor_gradient_checkpointing; in steps 1 and 2 --gradient_checkpointing",
    "hybrid_engine": "--rollout_backend",
    "checkpoint": "--save_steps",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), "--report_to"),
    **dict.fromkeys(("amp", "torch_autocast"), "--dtype"),
    "tensor_parallel": "--actor_zero_stage 3",
    "sequence_parallel_size": "--sequence_parallel_size",
}
"""{key of a file: the flags that stand in its place}."""

_ROUNDED = "it rounds numbers to 4 or 8 bits, and the models would not be those that were given"
_SAVED = "no checkpoint can be written with it"
UNSOUND = {
    **dict.fromkeys(
        ("data_types.param_dtype", "data_types.buffer_dtype", "data_types.keep_in_fp32_modules"),
        "all models compute in the dtype of --dtype",
    ),
    "fp16.fp16_master_weights_and_grads": "in fp16 updates below 6e-8 are 0",
    "zero_optimization.zero_quantized_weights": _ROUNDED,
    "zero_optimization.zero_quantized_gradients": _ROUNDED,
    "zero_optimization.zero_quantized_nontrainable_weights": _ROUNDED,
    "zero_optimization.zenflow": _SAVED,
    "zero_optimization.offload_optimizer.super_offload": _SAVED,
    "zero_optimization.module_granularity_threshold": "decoder layers are fetched as one anyway",
    "zero_optimization.stage3_module_granularity_threshold": "decoder layers are fetched as one anyway",
    "zero_optimization.cpu_offload": "this is an old name of offload_optimizer",
    "zero_optimization.cpu_offload_param": "this is an old name of offload_param",
}
"""{setting: why a file may not turn it on}."""

ONLY_AT_STAGES = {"offload_optimizer": (1, 2, 3), "offload_param": (3,), "zero_hpz_partition_size": (3,)}
"""{setting of ZeRO: the stages at which it does something}."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The user's choices for the DeepSpeed configuration of one engine.

    role: "actor", "critic", "reference" or "reward", for messages.
    stage: the ZeRO stage, 0 to 3.
    offload: whether the optimizer state, and at stage 3 the parameters too, are in host memory.
    path: a JSON file that replaces the file from configs/ds.
    """

    role: str
    stage: int
    offload: bool = False
    path: str | None = None

    def flag(self, name: str) -> str:
        """The full name of this engine's flag, for example --actor_NAME. In steps 1 and 2, which train a single
        "model", flags do not begin with a role."""
        return f"--{name}" if self.role == "model" else f"--{self.role}_{name}"

    def check_offload(self, flag: str = "--offload", trained: bool = True) -> None:
        """Raise UserError if `flag` contradicts the engine's file, or if the engine trains and has nothing that could
        be offloaded."""
        if self.offload and self.path is not None:
            raise UserError(
                f"{flag} and {self.flag('ds_config')} {self.path} contradict each other: say in the file what is "
                "offloaded."
            )
        if self.offload and self.stage == 0 and trained:
            raise UserError(
                f"{flag} with {self.flag('zero_stage')} 0: there is nothing that could be offloaded. Offload "
                "needs stage 1, 2 or 3."
            )


def build_ds_config(
    choice: EngineConfig, *, dtype: str, micro_batch_size: int, gradient_clipping: float = 0.0, trained: bool = True
) -> dict:
    """The complete DeepSpeed configuration of one engine.

    Args:
        dtype: "fp32", "fp16" or "bf16".
        micro_batch_size: the number of sequences per rank in one forward pass, for DeepSpeed's own bookkeeping.
        gradient_clipping: the norm above which gradients are clipped; 0 for no clipping.
        trained: whether the engine has an optimizer.

    Raises: UserError for a missing or broken file, an unknown key, or settings that contradict each other or the flags.
    """
    if not trained and choice.stage in (1, 2):
        raise UserError(
            f"DeepSpeed configuration of the {choice.role}: stage {choice.stage} partitions what an "
            "optimizer needs, and a frozen model has none. Use stage 0 or 3."
        )
    config = read_ds_file(choice)
    zero, path = config["zero_optimization"], choice.path
    # The program creates the optimizer itself, even if the optimizer state is offloaded.
    own = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    for name in OWN:
        given = config.pop(name, "auto")
        if given not in ("auto", own.get(name, "auto")):
            raise UserError(f"{path}: {name} is {given!r}, but the program sets it. Leave it out of the file.")
    if trained:
        _check_trained(config, dtype, path)
    else:
        zero.pop("offload_optimizer", None)
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            config["bf16"].pop(name, None)
        _use_own_swap_folder(zero, choice.role)
    for name in ("fp16", "bf16"):
        enabled = dtype == name
        if config[name].get("enabled", "auto") not in ("auto", enabled):
            raise UserError(
                f"{path}: {name}.enabled is {config[name]['enabled']!r}, but --dtype is {dtype}. Leave it out of the "
                "file."
            )
        config[name] = {**(config[name] if enabled else {}), "enabled": enabled}
    _check_stage(zero, path)
    config = {"steps_per_print": 10**9, **config, **own}
    _check_by_deepspeed(config, path)
    return config


def zero_settings(config: dict) -> Any:
    """The ZeRO section of a configuration from `build_ds_config`, completed with DeepSpeed's defaults: an object that
    has the settings as attributes."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return DeepSpeedZeroConfig(**config["zero_optimization"])


def read_ds_file(choice: EngineConfig) -> dict:
    """The content of an engine's JSON file, with all SECTIONS and the engine's stage, and without keys that are off.
    Raises: UserError for a broken file, a key that is not passed on, an unsound setting, or another stage."""
    path = (
        Path(choice.path)
        if choice.path
        else CONFIG_DIR / f"zero{choice.stage}{'_offload' if choice.offload and choice.stage > 0 else ''}.json"
    )
    try:
        config = json.loads(read_text(path))
    except OSError as error:
        raise UserError(
            f"DeepSpeed configuration of the {choice.role}: cannot read {path} ({error.strerror})."
        ) from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits raises ValueError too
        raise UserError(f"DeepSpeed configuration of the {choice.role}: {path} is not valid JSON ({error}).") from None
    config.pop("comment", None)
    for name in [name for name in config if name not in (*PASSED_ON, *OWN)]:
        if _is_off(config.pop(name)):
            continue
        if name in INSTEAD:
            raise UserError(f"{path}: {name} has no effect here. Leave it out of the file, and use {INSTEAD[name]}.")
        near = nearest(name, PASSED_ON)
        hint = f"Did you mean {near}?" if near else f"Known are {', '.join(PASSED_ON)}."
        raise UserError(f"{path}: {name} is no key that is passed on to DeepSpeed. {hint}")
    for name in SECTIONS:
        if not isinstance(config.setdefault(name, {}), dict):
            raise UserError(f"{path}: {name} is {config[name]!r}, but should be a JSON object.")
    zero = config["zero_optimization"]
    if zero.setdefault("stage", choice.stage) != choice.stage:
        raise UserError(
            f"{path}: zero_optimization.stage is {zero['stage']!r}, but {choice.flag('zero_stage')} is "
            f"{choice.stage}. Give the same in both places."
        )
    for name in ("offload_optimizer", "offload_param"):
        if not zero.get(name) or _setting(zero, f"{name}.device") == "none":
            zero.pop(name, None)
    for name, reason in UNSOUND.items():
        value = _setting(config, name)
        if value not in (None, "auto") and not _is_off(value):
            raise UserError(f"{path}: {name} is {value!r}, but {reason}. Leave it out of the file.")
    return config


def chosen_stage(given: int | None, path: str | None, role: str, dtype: str | None, gpus: int) -> int:
    """The ZeRO stage of a model that trains: the flag's, else that of the user's file (0 if the file sets none). If
    there is neither: 1 on one GPU in 16 bits, else 0. gpus: the number of all GPUs; 0 on CPUs.

    On one GPU nothing is divided at stage 1, but DeepSpeed updates all weights at once, in flat buffers. At stage 0 in
    16 bits it updates them one by one, and the host waits for the GPU once a weight (DeepSpeed 0.19.8,
    runtime/fp16/unfused_optimizer.py).
    """
    if given is not None:
        return given
    if path is not None:
        return stage_of_file(path, role) or 0
    return int(gpus == 1 and dtype in ("fp16", "bf16"))


def stage_of_file(path: str, role: str) -> int | None:
    """The ZeRO stage in a user's file; None if the file sets no stage."""
    try:
        stage = json.loads(read_text(path)).get("zero_optimization", {}).get("stage")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # build_ds_config refuses the file with a message
    if stage not in (None, 0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage is {stage!r} for the {role}; ZeRO has the stages 0 to 3.")
    return stage


def refuse_offload_of_roles(config: Mapping) -> None:
    """Raise UserError if an engine in which several models learn offloads its optimizer state to host memory."""
    if config["zero_optimization"].get("offload_optimizer"):
        raise UserError(
            "--share_trunk with an offloaded optimizer: DeepSpeed then takes over the gradients of the last backward "
            "pass alone, which is the actor's, and the critic's would be lost. The states are those of the adapters "
            "alone: leave --offload (offload_optimizer) out."
        )


def _is_off(value: Any) -> bool:
    """Whether a setting is off. Files of other projects list many settings as off."""
    return not value or value == "none" or (isinstance(value, dict) and value.get("enabled") is False)


def _setting(config: Mapping, name: str) -> Any:
    """The value of a setting by its dotted name; None if the file does not have it."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _check_trained(config: Mapping, dtype: str, path: str | None) -> None:
    """Raise UserError for settings with which an engine that trains would lose small updates, or would keep a part of
    its state where no checkpoint can read it."""
    zero = config["zero_optimization"]
    for name in ("offload_optimizer.device", "offload_param.device", "offload_optimizer.ratio"):
        value = _setting(zero, name)
        if value == "nvme" or (name.endswith("ratio") and value not in (None, 1)):
            raise UserError(f"{path}: zero_optimization.{name} is {value!r}, but {_SAVED}. Leave it out of the file.")
    masters, moments = "bf16_master_weights_and_grads", "bf16_optimizer_states"
    given = [bool(config["bf16"].get(name)) for name in (masters, moments)]
    if any(given) and not (all(given) and dtype == "bf16" and zero["stage"] and "offload_optimizer" not in zero):
        raise UserError(
            f"{path}: bf16.{masters} and bf16.{moments} go together, with --dtype bf16 at stages 1 to 3 and without "
            "offload. Change that, or leave both out of the file."
        )
    if zero["stage"] == 1 and config["data_types"].get("grad_accum_dtype") not in (None, dtype):
        raise UserError(
            f"{path}: data_types.grad_accum_dtype at stage 1 makes DeepSpeed use another optimizer. Use stage 2, or "
            "leave it out."
        )


def _check_stage(zero: Mapping, path: str | None) -> None:
    """Raise UserError for settings of ZeRO that do nothing at this stage, and for groups that do not divide the
    ranks."""
    size, world = zero.get("zero_hpz_partition_size", 1), distributed.world_size()
    for name, stages in ONLY_AT_STAGES.items():
        if zero.get(name) not in (None, 0, 1) and zero["stage"] not in stages:
            raise UserError(
                f"{path}: zero_optimization.{name} is {zero[name]!r}, which does nothing at stage {zero['stage']}. "
                "Change the stage, or leave it out of the file."
            )
    if isinstance(size, int) and size > 1 and world % min(size, world):
        raise UserError(
            f"{path}: zero_optimization.zero_hpz_partition_size is {size}, but {world} ranks cannot be divided into "
            f"groups of {size}. Give the number of a node's GPUs, or another that divides the ranks."
        )


def _check_by_deepspeed(config: Mapping, path: str | None) -> None:
    """Raise UserError for what DeepSpeed refuses: it would do so again when the weights are loaded."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(config))
    except ValidationError as refusal:
        error = refusal.errors()[0]
        key = ".".join(str(part) for part in error["loc"])
        raise UserError(f"{path}: {key} is {error['input']!r}: {error['msg']} ({refusal.title}).") from None
    except Exception as refusal:  # DeepSpeed raises exceptions of many classes
        raise UserError(f"{path}: DeepSpeed does not take it: {str(refusal) or type(refusal).__name__}") from None


def _use_own_swap_folder(zero: dict, role: str) -> None:
    """Give an engine that swaps parameters to a disk its own subfolder of the folder in the file. DeepSpeed empties the
    swap folder when it creates an engine, and would remove the parameters of another engine there."""
    section = zero.get("offload_param") or {}
    if section.get("device") == "nvme" and section.get("nvme_path") is not None:
        zero["offload_param"] = {**section, "nvme_path": str(Path(section["nvme_path"]) / role)}


LIVE, AHEAD = 100_000_000, 30_000_000
"""Lower bounds at stage 3, in numbers of parameters. LIVE: of how many are gathered at a time. AHEAD: of how many are
fetched in advance."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The decoder layers of a Policy or Scorer: the modules whose class is in transformers' `_no_split_modules`."""
    names = set(getattr(getattr(module, "model", None), "_no_split_modules", None) or [])
    return [part for part in module.modules() if type(part).__name__ in names]


def with_fitting_sizes(module: nn.Module, ds_config: dict) -> dict:
    """The configuration. At stage 3 its limits are set so that three layers can be gathered at a time: the layer that
    computes, the next layer, which is being fetched, and the previous layer.

    A layer of a 7B Llama has 2e8 parameters. With a limit of 1e8 parameters, no layer would be fetched before it has to
    compute. If layers are small, several are fetched at a time.
    """
    from engine.zero.gathering import full_numel  # imports DeepSpeed, which is too slow when flags are read

    zero = ds_config["zero_optimization"]
    if zero.get("stage") != 3:
        return ds_config
    layers = decoder_layers(module)
    layer = max((sum(full_numel(parameter) for parameter in one.parameters()) for one in layers), default=0)
    sizes = {
        "stage3_prefetch_bucket_size": max(AHEAD, layer),
        "stage3_max_live_parameters": max(LIVE, 3 * layer),
        "stage3_max_reuse_distance": max(LIVE, 2 * layer),
    }
    unnamed = {name: size for name, size in sizes.items() if name.removeprefix("stage3_") not in zero}
    return {**ds_config, "zero_optimization": {**unnamed, **zero}}


def with_fitting_bucket(module: nn.Module, ds_config: dict) -> dict:
    """The configuration, in which the bucket for gradients is no larger than all gradients together.

    DeepSpeed always allocates a whole bucket (at stage 3 permanently), even if the model is small or only adapters have
    gradients. A bucket that this function has made smaller still holds all gradients.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from engine.zero.gathering import full_numel

    zero = ds_config["zero_optimization"]
    trained = sum(full_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)
    given = zero.get("reduce_bucket_size", DeepSpeedZeroConfig().reduce_bucket_size)
    return {**ds_config, "zero_optimization": {**zero, "reduce_bucket_size": min(int(given), trained)}}
