"""DeepSpeed configurations: read configs/ds/*.json, fill in what the program owns, refuse what contradicts it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from engine.errors import UserError, nearest
from engine.files import read_text
from engine.zero.limits import (
    refuse_at_stage,
    refuse_low_precision,
    refuse_of_zero,
    refuse_out_of_reach,
    refuse_what_cannot_be,
    use_own_swap_folder,
)
from engine.zero.sections import OWNED, TAKEN, refuse_scaled_gradients, refuse_sections

# A wheel has the folder configs/ds beside this file; a checkout has it at its top level.
_INSTALLED = Path(__file__).with_name("configs")
CONFIG_DIR = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "configs" / "ds"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which DeepSpeed configuration an engine runs under.

    role: "actor", "critic", "reference" or "reward", for messages; stage: 0 to 3; offload: optimizer state (and, at
    stage 3, parameters) in host memory; path: a JSON file that wins over the shipped one.
    """

    role: str
    stage: int
    offload: bool = False
    path: str | None = None

    def flag(self, name: str) -> str:
        """This engine's flag of the name: steps 1 and 2 train one "model", whose flags are not called after a role."""
        return f"--{name}" if self.role == "model" else f"--{self.role}_{name}"

    def check_stage(self) -> None:
        """Raise UserError for a stage that ZeRO does not have."""
        if self.stage not in (0, 1, 2, 3):
            raise UserError(f"{self.flag('zero_stage')} {self.stage}: ZeRO has the stages 0, 1, 2 and 3.")

    def check_offload(self, flag: str = "--offload", trained: bool = True) -> None:
        """Raise UserError where `flag` contradicts a file, or a trained engine has nothing that could be offloaded."""
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
        micro_batch_size: sequences per rank and forward pass, for DeepSpeed's own bookkeeping.
        gradient_clipping: the maximal gradient norm; 0 for none.
        trained: whether the engine has an optimizer.

    Raises: UserError for a stage that is none, a missing or broken file, an unknown key, or a contradiction.
    """
    choice.check_stage()
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
        refuse_low_precision(config, dtype, choice.path)
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
        refuse_out_of_reach(config["zero_optimization"], choice.path)
    else:
        use_own_swap_folder(config["zero_optimization"], choice.role)
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
    # The optimizer is ours, also where its state is offloaded; nothing is printed but what the program prints.
    return {
        "steps_per_print": 10**9,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        **config,
        **owned,
    }


def zero_settings(config: dict) -> Any:
    """The ZeRO section of what `build_ds_config` gives, with DeepSpeed's own values where it says nothing; an object
    with the settings as attributes."""
    return _sections()["zero_optimization"](**config["zero_optimization"])


def read_ds_file(choice: EngineConfig) -> dict:
    """The JSON of one engine, with its stage in it, checked for unknown keys and for what its flags say."""
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
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise UserError(f"DeepSpeed configuration of the {choice.role}: {path} is not valid JSON ({error}).") from None
    if not isinstance(config, dict):
        raise UserError(f"DeepSpeed configuration of the {choice.role}: {path} holds no JSON object.")
    refuse_sections(config, path)
    refuse_what_cannot_be(config, str(path))
    _refuse_unknown(config, TAKEN, path)
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
    refuse_of_zero(zero, str(path))
    for name, model in sections.items():
        _check_section(config[name], model, path, name)
    refuse_at_stage(zero, str(path))
    refuse_scaled_gradients(config, path)
    return config


def stage_of_file(path: str, role: str) -> int | None:
    """The ZeRO stage that a user's file asks for, if it says one."""
    try:
        stage = json.loads(read_text(path)).get("zero_optimization", {}).get("stage")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None  # build_ds_config says what is wrong with the file
    if stage is not None and stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage is {stage!r} for the {role}; ZeRO has the stages 0 to 3.")
    return stage


def _sections() -> dict[str, type]:
    """DeepSpeed's own description of each section that it describes as a pydantic model."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    return {"zero_optimization": DeepSpeedZeroConfig, "fp16": DeepSpeedFP16Config, "bf16": DeepSpeedBF16Config}


def _check_section(section: dict, model: type[BaseModel], path: Path, name: str) -> None:
    """Refuse keys and values that DeepSpeed would refuse later, when the weights are loaded."""
    fields = model.model_fields
    _refuse_unknown(section, {key for field in fields for key in (field, fields[field].alias) if key}, path, f"{name}.")
    try:
        model(**section)
    except ValidationError as refusal:
        error = refusal.errors()[0]
        key = ".".join(str(part) for part in (name, *error["loc"]))
        raise UserError(f"{path}: {key} is {error['input']!r}: {error['msg']}.") from None


def _refuse_unknown(section: dict, known: set[str], path: Path, prefix: str = "") -> None:
    for key in section:
        if key not in known:
            near = nearest(key, sorted(known))
            hint = f" Did you mean {prefix}{near}?" if near else f" Known: {', '.join(sorted(known))}."
            raise UserError(f"{path}: unknown key {prefix}{key}.{hint}")
