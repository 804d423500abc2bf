"""DeepSpeed configurations. A JSON file, from configs/ds/ or from the user, is checked and completed with the program's
own settings.

TAKEN and TAKEN_OF_ZERO list the settings that a file may have. Any other setting is refused; for settings that occur
often in other projects' files, REASONS has the reason. Settings that are switched off are removed instead of refused,
since other projects' files list many settings as off.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from torch import nn

from engine import distributed
from engine.errors import UserError, nearest
from engine.files import read_text

# In a wheel the files of configs/ds are in the folder `configs` beside this file; in a checkout they are at its top
# level.
_INSTALLED = Path(__file__).with_name("configs")
CONFIG_DIR = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "configs" / "ds"


OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""Settings that the program decides. A file may leave them out, set them to "auto", or set them to the program's
value."""

TAKEN = {
    *OWNED,
    "zero_optimization",
    "fp16",
    "bf16",
    "data_types",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "flops_profiler",
    "aio",
    "comment",
}
"""Sections and settings that a file may have."""

_AT_STAGE_3 = (
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "gather_fp16_weights_on_model_save",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "use_all_reduce_for_fetch_params",
)
TAKEN_OF_ZERO = {
    "stage",
    "allgather_bucket_size",
    "allgather_partitions",
    "compute_grad_norm",
    "contiguous_gradients",
    "ignore_unused_parameters",
    "leaf_module",
    "load_from_fp32_weights",
    "log_trace_cache_warnings",
    "memory_efficient_linear",
    "offload_optimizer",
    "offload_param",
    "overlap_comm",
    "parameter_alignment",
    "reduce_bucket_size",
    "reduce_scatter",
    "round_robin_gradients",
    "sub_group_size",
    "use_multi_rank_bucket_allreduce",
    "zero_hpz_partition_size",
    "zero_quantized_nontrainable_weights",
    *_AT_STAGE_3,
    *(f"stage3_{name}" for name in _AT_STAGE_3),
}
"""Settings of zero_optimization that a file may have, if the installed DeepSpeed has them too."""

_ROWS = (
    "all ranks are given rows of their own here, and each computes all of a row. Divide the model by "
    "--actor_zero_stage 3 and its like; where long rows have no room, give --actor_gradient_checkpointing"
)
_OPTIMIZER = "the optimizer is the program's, with the learning rates, betas and weight decays of its flags"
_METRICS = "metrics are written by the program: metrics.jsonl in the output folder, and --report_to"
_POINTS = "checkpoints are the program's own (--save_steps), which ranks of any number and every ZeRO stage read"
_ROUNDED = (
    "its numbers are rounded to 4 or 8 bits, so that a step learns another thing than old log-probs and rewards were "
    "computed of: zero_hpz_partition_size sends less and changes no number"
)
_LAYERS = (
    "decoder layers are fetched as one here already, and a leaf within a leaf is freed twice: leaf_module names others"
)
_MICS = "DeepSpeed itself has it no longer: zero_hpz_partition_size keeps gathers within a node, too"
REASONS = {
    **dict.fromkeys(("optimizer", "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"), _OPTIMIZER),
    "scheduler": "the learning rates' schedule is the program's (--lr_scheduler_type, --num_warmup_steps)",
    "activation_checkpointing": "models of transformers checkpoint by torch's own function, which it does not reach: "
    "give --actor_gradient_checkpointing and --critic_gradient_checkpointing (steps 1 and 2: --gradient_checkpointing)",
    **dict.fromkeys(("tensor_parallel", "sequence_parallel_size", "pipeline", "expert_parallel"), _ROWS),
    "hybrid_engine": "responses are drawn from whole copies of the actor, by --rollout_backend",
    "compile": "DeepCompile begins with a call of the engine's that nothing here makes, since rows have other lengths "
    "in each pass",
    **dict.fromkeys(("amp", "torch_autocast"), "all engines compute in one dtype: give --dtype bf16 or fp16"),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), _METRICS),
    **dict.fromkeys(("checkpoint", "zero_optimization.elastic_checkpoint"), _POINTS),
    "zero_optimization.zenflow": "no checkpoint can be written of what it keeps in another optimizer",
    "zero_optimization.zero_quantized_weights": _ROUNDED,
    "zero_optimization.zero_quantized_gradients": _ROUNDED,
    "zero_optimization.mics_shard_size": _MICS,
    "zero_optimization.mics_hierarchical_params_gather": _MICS,
    "zero_optimization.stage3_module_granularity_threshold": _LAYERS,
    "zero_optimization.module_granularity_threshold": _LAYERS,
    "zero_optimization.cpu_offload": 'it is an old name: write "offload_optimizer": {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'it is an old name: write "offload_param": {"device": "cpu"}',
}
"""{setting: why this program does not support it, and what to use instead}."""

_OFF = {"zero_allow_untested_optimizer": True, "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}
"""{setting: the value with which it is off}. A setting is also off if it is false, 0, null, or a section that is empty
or not enabled."""

_OUT_OF_REACH: dict[str, Callable[[Any], bool]] = {
    "offload_optimizer.device": lambda device: device == "nvme",
    "offload_optimizer.ratio": lambda ratio: ratio < 1,
    "offload_optimizer.super_offload": bool,
    "offload_param.device": lambda device: device == "nvme",
    "zero_quantized_nontrainable_weights": bool,
}
"""{setting of ZeRO: a function that says for a value whether checkpoints cannot be written with it}. They cannot be if
numbers of the training state are on a disk, in another optimizer or in another process, or differ from the numbers that
the engine computes with."""

_DTYPES = ("fp32", "fp16", "bf16")


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

    Raises: UserError for a stage that does not exist, a missing or broken file, an unknown key, or settings that
        contradict each other or the flags.
    """
    if choice.stage not in (0, 1, 2, 3):
        raise UserError(f"{choice.flag('zero_stage')} {choice.stage}: ZeRO has the stages 0, 1, 2 and 3.")
    if not trained and choice.stage in (1, 2):
        raise UserError(
            f"DeepSpeed configuration of the {choice.role}: stage {choice.stage} partitions what an "
            "optimizer needs, and a frozen model has none. Use stage 0 or 3."
        )
    config = read_ds_file(choice)
    owned = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": gradient_clipping,
    }
    for name in OWNED:
        if config.get(name, "auto") not in ("auto", owned.get(name, "auto")):
            raise UserError(
                f"{choice.path}: {name} is {config[name]!r}, but the program sets it from its flags"
                f"{f' ({owned[name]})' if name in owned else ''}. Leave it out of the file."
            )
        config.pop(name, None)
    if trained:
        _refuse_low_precision(config, dtype, choice.path)
    else:
        for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            config["bf16"].pop(name, None)
    for name in ("fp16", "bf16"):
        section = dict(config.get(name, {}))
        if section.get("enabled", "auto") not in ("auto", dtype == name):
            raise UserError(
                f"{choice.path}: {name}.enabled is {section['enabled']!r}, but --dtype is {dtype}. "
                "Leave it out of the file."
            )
        section["enabled"] = dtype == name
        config[name] = section if dtype == name else {"enabled": False}
    if not trained:
        config["zero_optimization"].pop("offload_optimizer", None)
    if not config["zero_optimization"].get("compute_grad_norm", True):
        raise UserError(
            f"{choice.path}: zero_optimization.compute_grad_norm is false, but the gradient norm is one of "
            "the metrics. Leave it out of the file."
        )
    if trained:
        _refuse_out_of_reach(config["zero_optimization"], choice.path)
    else:
        _use_own_swap_folder(config["zero_optimization"], choice.role)
    bucket = config["zero_optimization"].get("allgather_bucket_size", 0)
    if choice.stage in (1, 2) and bucket % 2:
        raise UserError(
            f"{choice.path}: zero_optimization.allgather_bucket_size is {bucket!r}, but at stages 1 and 2 DeepSpeed "
            "takes even numbers only. Give one, or leave it out."
        )
    if choice.stage == 1 and config.get("data_types", {}).get("grad_accum_dtype") not in (None, dtype):
        raise UserError(
            f"{choice.path}: data_types.grad_accum_dtype at stage 1 makes another optimizer of "
            "DeepSpeed's. Use stage 2, or leave it out."
        )
    config.pop("comment", None)
    # The program creates the optimizer itself, even if the optimizer state is offloaded. DeepSpeed's own output is off.
    return {
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **config,
        **owned,
    }


def zero_settings(config: dict) -> Any:
    """The ZeRO section of a configuration from `build_ds_config`, completed with DeepSpeed's defaults: an object that
    has the settings as attributes."""
    return _sections()["zero_optimization"](**config["zero_optimization"])


def read_ds_file(choice: EngineConfig) -> dict:
    """The content of an engine's JSON file, with the engine's stage. It is checked for unknown keys and against the
    engine's flags."""
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
    if not isinstance(config, dict):
        raise UserError(f"DeepSpeed configuration of the {choice.role}: {path} holds no JSON object.")
    _keep_taken(config, TAKEN, path)
    sections = _sections()
    for name in sections:
        if not isinstance(config.setdefault(name, {}), dict):
            raise UserError(f"{path}: {name} is {config[name]!r}, but should be a JSON object.")
    zero = config["zero_optimization"]
    if zero.setdefault("stage", choice.stage) != choice.stage:
        raise UserError(
            f"{path}: zero_optimization.stage is {zero['stage']!r}, but {choice.flag('zero_stage')} is "
            f"{choice.stage}. Give the same in both places."
        )
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name, {})
        if section in (None, {}) or (isinstance(section, dict) and section.get("device") == "none"):
            zero.pop(name, None)
    for name, model in sections.items():
        _check_section(config[name], model, path, name)
    _refuse_dtypes(config, path)
    _refuse_at_stage(zero, path)
    for name, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        value = config.get(name, usual)
        if value != usual and zero["stage"] > 0 and zero.get("reduce_scatter", True):
            raise UserError(
                f"{path}: {name} is {value!r}, which DeepSpeed takes at stages 1 to 3 with "
                "zero_optimization.reduce_scatter false alone. Say so, or leave it out of the file."
            )
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


def _keep_taken(
    section: dict, taken: Collection[str], path: Path, prefix: str = "", harmless: Collection[str] | None = None
) -> None:
    """Check the settings of a section that are not in `taken`: remove those that are off, and raise UserError for any
    other.

    harmless: the names that are removed if they are off, in addition to those in REASONS; None for any name.
    """
    for name in [name for name in section if name not in taken]:
        value, reason = section[name], REASONS.get(prefix + name)
        known = reason is not None or harmless is None or name in harmless
        if known and (value == _OFF.get(name, False) or _is_off(value, deep=reason is not None)):
            del section[name]
        elif reason is not None:
            raise UserError(f"{path}: {prefix}{name} is {value!r}, but {reason}. Leave it out of the file.")
        else:
            near = nearest(name, sorted(taken))
            hint = f" Did you mean {prefix}{near}?" if near else f" Known: {', '.join(sorted(taken))}."
            raise UserError(f"{path}: unknown key {prefix}{name}.{hint}")


def _is_off(value: Any, deep: bool) -> bool:
    """Whether a setting is off. deep: whether a section also counts as off if all its settings are off."""
    if isinstance(value, dict):
        empty = all(_is_off(own, deep) for own in value.values()) if deep else not value
        return empty or value.get("enabled") is False
    return not value or value == "none"


def _check_section(section: dict, model: type[BaseModel], path: Path, name: str) -> None:
    """Raise UserError for keys and values that DeepSpeed would refuse only when the weights are loaded."""
    fields = model.model_fields
    known = {key for field in fields for key in (field, fields[field].alias) if key}
    _keep_taken(section, TAKEN_OF_ZERO if name == "zero_optimization" else known, path, f"{name}.", known)
    try:
        model(**section)
    except ValidationError as refusal:
        error = refusal.errors()[0]
        key = ".".join(str(part) for part in (name, *error["loc"]))
        raise UserError(f"{path}: {key} is {error['input']!r}: {error['msg']}.") from None


def _refuse_dtypes(config: dict, path: Path) -> None:
    """Raise UserError for dtypes, which --dtype sets, and for names that DeepSpeed does not know."""
    types = config.get("data_types", {})
    if not isinstance(types, dict):
        raise UserError(f"{path}: data_types is {types!r}, but should be a JSON object.")
    for name in sorted(types.keys() - {"grad_accum_dtype"}):
        if types[name] not in (None, "auto"):
            raise UserError(
                f"{path}: data_types.{name} is {types[name]!r}, but weights and buffers have the dtype of --dtype, in "
                "all engines and copies. Leave it out of the file."
            )
    sent = {"communication_data_type": config.get("communication_data_type")}
    for name, value in (sent | {"data_types.grad_accum_dtype": types.get("grad_accum_dtype")}).items():
        if value is not None and value not in _DTYPES:
            raise UserError(f"{path}: {name} is {value!r}; DeepSpeed knows {', '.join(_DTYPES)}.")


def _refuse_at_stage(zero: Mapping, path: Path) -> None:
    """Raise UserError, if the stage is not 3, for settings that ZeRO uses at stage 3 only and would ignore at another
    stage."""
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


def _refuse_out_of_reach(zero: Mapping, path: str | None) -> None:
    """Raise UserError for a file that keeps a part of the training state where checkpoints cannot read it, or that
    offloads at stage 0, at which offloading is impossible."""
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
                f"{path}: zero_optimization.{name} is {value!r}, under which no checkpoint can be written, and a "
                "run that is asked to end writes one. Leave it out of the file."
            )


def _refuse_low_precision(config: Mapping, dtype: str, path: str | None) -> None:
    """Raise UserError for 16-bit master weights if DeepSpeed does not support them, or if small updates would be
    rounded to 0."""
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


def _use_own_swap_folder(zero: dict, role: str) -> None:
    """Give an engine that swaps parameters to a disk its own subfolder of the folder in the file. DeepSpeed empties the
    swap folder when it creates an engine, and would remove the parameters of another engine there."""
    section = zero.get("offload_param") or {}
    if section.get("device") == "nvme" and section.get("nvme_path") is not None:
        zero["offload_param"] = {**section, "nvme_path": str(Path(section["nvme_path"]) / role)}


def _sections() -> dict[str, type]:
    """{section: DeepSpeed's pydantic model of it}, for the sections that have such a model."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}


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
