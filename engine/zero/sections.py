"""What stands in a DeepSpeed JSON beside what engines are made of: refused by name where it would do nothing or harm.

What is off is taken out: files that are handed on name much of it as off.
"""

from pathlib import Path
from typing import Any

from engine.errors import UserError

OWNED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
"""What the program decides; a file may leave these out, say "auto", or say the same."""

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
"""Sections and settings of which an engine is made."""

_OWN_ROWS = "all ranks are given rows of their own here, and each computes all of a row"
_OWN_DATA = "rows are read and ordered by the program (--data_path, --data_weights), not by DeepSpeed's data loader"
_OWN_METRICS = (
    "metrics are written by the program: metrics.jsonl and tensorboard/ in the output folder, --wandb_project"
)
_OWN_POINTS = "restart points are the program's own (--save_steps), which ranks of any number and every ZeRO stage read"
_SILENT = "DeepSpeed's log is not shown: wall_clock_breakdown prints times, and --profile_steps writes traces"
_OWN_OPTIMIZER = "the optimizer is the program's: DeepSpeed's Adam in C++ where states are offloaded beside a GPU"
_GONE = "DeepSpeed itself has it no longer"

REFUSED = {
    "optimizer": "the optimizer is the program's, with the learning rates, betas and weight decays of its flags",
    "zero_allow_untested_optimizer": f"{_OWN_OPTIMIZER}, else PyTorch's or TensorFlow's form",
    "zero_force_ds_cpu_optimizer": f"{_OWN_OPTIMIZER}, else PyTorch's or TensorFlow's form",
    "scheduler": "the learning rates' schedule is the program's (--lr_scheduler_type, --num_warmup_steps)",
    "activation_checkpointing": "models of transformers checkpoint by torch's own function, which it does not reach: "
    "give --actor_gradient_checkpointing and --critic_gradient_checkpointing (steps 1 and 2: --gradient_checkpointing)",
    "sequence_parallel_size": f"{_OWN_ROWS}: give --actor_gradient_checkpointing where long rows have no room",
    "data_parallel_size": _OWN_ROWS,
    "pipeline": f"{_OWN_ROWS}: divide the model by --actor_zero_stage 3 and its like",
    "expert_parallel": f"{_OWN_ROWS}: divide the model by --actor_zero_stage 3 and its like",
    "use_data_before_expert_parallelism": _OWN_ROWS,
    "compile": "DeepCompile begins with a call of the engine's that nothing here makes, since rows have other lengths "
    "in each pass",
    "hybrid_engine": "responses are drawn from whole copies of the actor, by --rollout_backend",
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "autotuning": "sizes are the program's flags, and python -m training.memory_plan finds those that fit",
    "tensorboard": _OWN_METRICS,
    "wandb": _OWN_METRICS,
    "csv_monitor": _OWN_METRICS,
    "comet": _OWN_METRICS,
    "comms_logger": _SILENT,
    "dump_state": _SILENT,
    "timers": _SILENT,
    "checkpoint": _OWN_POINTS,
    "datastates_ckpt": _OWN_POINTS,
    "weight_quantization": "weights are computed with as they are",
    "gradient_allreduce_op": "losses are weighted for the mean over ranks",
    "managed_gradient_accumulation": "gradients are looked at between the last backward pass and the step",
    "disable_allgather": "weights would stay those of before the step",
    "seq_parallel_communication_data_type": f"{_OWN_ROWS}, so that nothing is sent in it",
    "elasticity": f"{_GONE}, and {_OWN_POINTS}",
    "nebula": f"{_GONE}, and {_OWN_POINTS}",
    "curriculum_learning": f"{_GONE}, and {_OWN_DATA}",
    "amp": f"{_GONE}: give --dtype bf16 or fp16",
    **dict.fromkeys(
        (
            "compression_training",
            "quantize_training",
            "eigenvalue",
            "sparse_gradients",
            "sparse_attention",
            "graph_harvesting",
            "progressive_layer_drop",
        ),
        _GONE,
    ),
}
"""Why there is no such thing here, and what does its work."""

_OFF = {
    "zero_allow_untested_optimizer": True,
    "sequence_parallel_size": 1,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "seq_parallel_communication_data_type": "fp32",
}
"""Values that change nothing, beside false, 0, null, and sections that are empty or not enabled."""


_DTYPES = ("fp32", "fp16", "bf16")


def refuse_sections(config: dict, path: Path | str) -> None:
    """Raise UserError for a section that is REFUSED; those that are off are taken out of `config`."""
    for name in [name for name in config if name in REFUSED]:
        value = config.pop(name)
        off = value == _OFF[name] if name in _OFF else _is_off(value)
        if not off:
            raise UserError(f"{path}: {name} is {value!r}, but {REFUSED[name]}. Leave it out of the file.")
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


def refuse_scaled_gradients(config: dict, path: Path | str | None) -> None:
    """Raise UserError for gradients that are scaled before they are reduced, where DeepSpeed does not."""
    zero = config["zero_optimization"]
    for name, usual in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        value = config.get(name, usual)
        if value != usual and zero["stage"] > 0 and zero.get("reduce_scatter", True):
            raise UserError(
                f"{path}: {name} is {value!r}, which DeepSpeed takes at stages 1 to 3 with "
                "zero_optimization.reduce_scatter false alone. Say so, or leave it out of the file."
            )


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(own) for own in value.values())
    return not value or value == "none"
