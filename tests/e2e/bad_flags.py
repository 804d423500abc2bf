"""Mistakes in flags: names, values, and flags that do not go together."""

import dataclasses
import itertools
import random
import types
import typing
from collections.abc import Iterator

from tests.e2e.bad_values import NO_NAMES, NO_NUMBERS, NO_TRUTHS, NO_WHOLE_NUMBERS
from tests.e2e.bad_world import BadWorld
from tests.e2e.mistake import Mistake
from tests.e2e.programs import PROGRAMS

BELOW_ZERO = (
    "unsup_coef",
    "kl_coef",
    "gamma",
    "lam",
    "max_grad_norm",
    "weight_decay",
    "actor_weight_decay",
    "critic_weight_decay",
    "learning_rate",
    "actor_learning_rate",
    "critic_learning_rate",
    "critic_pretrain_learning_rate",
    "lora_learning_rate",
    "actor_lora_learning_rate",
    "critic_lora_learning_rate",
    "ema_decay",
    "dropout",
    "lora_dropout",
)
NOT_ABOVE_ZERO = ("temperature", "lora_alpha", "clip_range", "value_clip_range", "score_clip", "held_out")
FINITE = (*BELOW_ZERO, "temperature", "lora_alpha", "held_out")
ANY_FINITE = ("reward_weights", "reward_model_weight", "length_penalty", "missing_eos_penalty")
SIZES = {
    1: ("per_device_train_batch_size", "gradient_accumulation_steps", "max_seq_len", "held_out"),
    2: (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "max_seq_len",
        "held_out",
        "max_prompt_seq_len",
        "max_answer_seq_len",
    ),
    3: (
        "per_device_generation_batch_size",
        "generation_batches",
        "num_eval_prompts",
        "max_prompt_seq_len",
        "max_answer_seq_len",
        "profile_steps",
    ),
}


def words_that_are_none(step: int, rng: random.Random) -> Iterator[Mistake]:
    """Unknown and misspelt flags, words without a flag, flags without a value, flags left out."""
    names = [spec.name for spec in dataclasses.fields(PROGRAMS[step][1])]
    for name in names:
        spelt = _misspelt(name, rng)
        if spelt not in [*names, *PROGRAMS[step][1].old_flags]:
            yield Mistake("misspelt flag", step, words=(f"--{spelt}", "1"))
            yield Mistake("misspelt YAML key", step, yaml=f"{spelt}: 1\n")
    for words in (
        ("--",),
        ("---",),
        ("-",),
        ("stray",),
        ("-s", "1"),
        ("--", "x"),
        ("--seed", "1", "2"),
        ("=",),
        ("",),
        ("--=3",),
        ("--seed=",),
        ("--no-such-flag",),
        ("@file",),
        ("--seed", "--dtype"),
        ("--ünknown", "1"),
        ("--" + "x" * 5000,),
        ("--seed\n", "1"),
        ("--SEED", "1"),
        ("--see", "1"),
        ("-seed", "1"),
        ("--config",),
    ):
        yield Mistake("words", step, words=words)
    for name, hint in _flags(step):
        if hint is not bool:
            yield Mistake("no value", step, words=(f"--{name}",))
    models = ("actor_model_name_or_path", "critic_model_name_or_path") if step == 3 else ("model_name_or_path",)
    for name in ("output_dir", "data_path", *models):
        yield Mistake("left out", step, {name: None})


def values_of_flags(step: int) -> Iterator[Mistake]:
    """Values of a wrong type, and numbers out of range."""
    for name, hint in _flags(step):
        wrong = {int: NO_WHOLE_NUMBERS, float: NO_NUMBERS, bool: NO_TRUTHS, str: NO_NAMES}[hint]
        spec = PROGRAMS[step][1].__dataclass_fields__[name]
        if spec.metadata["choices"]:
            wrong = ("x", "", next(iter(spec.metadata["choices"])).upper() + " ")
        if name == "stop":  # these are texts, of any length
            wrong = ("",)
        for value in wrong:
            yield Mistake(f"no {hint.__name__}", step, words=(f"--{name}={value}",))
        numbers = [] if hint is not int else ["-1"]
        numbers += ["-1", "-1e-9", "-inf"] if name in BELOW_ZERO else []
        numbers += ["0", "-0.0", "-1", "-inf"] if name in NOT_ABOVE_ZERO else []
        numbers += ["inf"] if name in (*FINITE, *ANY_FINITE) else []
        numbers += ["nan", "-nan"] if hint is float else []
        for value in numbers:
            yield Mistake("out of range", step, words=(f"--{name}={value}",))
    for name in SIZES[step]:
        for value in ("1000000", "1" + "0" * 12, "1" + "0" * 40):
            yield Mistake("huge", step, {name: value})
    stages = ("actor_zero_stage", "critic_zero_stage") if step == 3 else ("zero_stage",)
    for name, value in itertools.product(stages, (4, -1, 33)):
        yield Mistake("out of range", step, {name: value})
    for value in (2**31, 2**63, 10**30):
        yield Mistake("out of range", step, {"seed": value})


def contradictions(step: int, world: BadWorld) -> Iterator[Mistake]:
    """Flags that do not go together."""
    none_for_this_step = ",".join("0" if number == step else "1" for number in (1, 2, 3))
    changes = [
        {"data_split": "2,4"},
        {"data_split": "a,b,c"},
        {"data_split": "0,0,0"},
        {"data_split": "1,-1,1"},
        {"data_split": "nan,1,1"},
        {"data_split": none_for_this_step},
        {"data_split": ["2,4,4", "1"]},
        {"data_split": "1,1,1", "data_path": world.folder / "three.jsonl"},
        {"data_weights": [1, 2]},
        {"data_weights": 0},
        {"data_weights": -1},
        {"data_weights": "nan"},
        {"data_weights": 1e-9},
        {"data_weights": "inf"},
        {"data_weights": [1, 1, 1]},
        {"wandb_project": "p", "enable_tensorboard": "false"},
    ]
    if step == 3:
        changes += [
            {"ema_decay": 0.5},
            {"ema_device": "cpu"},
            {"enable_ema": True, "ema_decay": 1.5},
            {"test_stop_step": 3},
            {"enable_test_mode": True},
            {"offload": True},
            {"offload": True, "actor_zero_stage": 2},
            {"reward_weights": 2},
            {"reward_url": "10.0.0.7:8000"},
            {"reward_url_columns": "answer"},
            {"unsupervised_dataset_config_name": "x"},
            {"actor_dropout": 0.1},
            {"critic_dropout": 0.5},
            {"only_optimize_lora": True},
            {"only_optimize_lora": True, "actor_lora_dim": 0},
            {"actor_lora_module_name": "layers."},
            {"critic_lora_learning_rate": 1e-4},
            {"lora_alpha": 2},
            {"actor_lora_dim": 8, "actor_lora_module_name": "layrs."},
            {"critic_lora_dim": 8, "critic_lora_module_name": "decoder.layers."},
            {"actor_lora_dim": 8, "lora_target_modules": ["q_prjo", "w"]},
            {"actor_lora_dim": 8, "lora_target_modules": ["all-linear", "lm_haed"]},
            {"actor_lora_dim": 8, "actor_lora_module_name": "q_proj", "lora_target_modules": "q_proj"},
            {"actor_lora_dim": 8, "lora_dropout": 0.1},
            {"actor_lora_dim": 8, "actor_learning_rate": 0},
            {"actor_lora_dim": 8, "set": "hydra_layers=1"},
            {"critic_lora_dim": 8, "dialect": "trl_rloo", "critic_lora_module_name": "layers."},
            {"share_trunk": True},
            {"enable_mixed_precision_lora": True},
            {"inference_tp_size": 0},
            {"inference_tp_size": 2, "rollout_backend": "zero3"},
            {"deepspeed_config": "x.json"},
            {"per_device_training_batch_size": 3, "gradient_accumulation_steps": 1},
            {"per_device_training_batch_size": 8, "gradient_accumulation_steps": 1},
            {"gradient_accumulation_steps": 3},
            {"per_device_train_batch_size": 4},
            {"generation_batch_numbers": 1},
            {"per_device_mini_train_batch_size": 4},
            {"max_prompt_seq_len": 60, "max_answer_seq_len": 5},
            {"per_device_generation_batch_size": 33},
            {"dialect": "default", "reward_model_weight": 2, "critic_model_name_or_path": None},
            {"actor_ds_config": world.stage2, "actor_zero_stage": 3},
            {"actor_ds_config": world.stage2, "offload": True},
            {"reference_ds_config": world.stage2},
            {"reward_ds_config": world.stage2},
            {"critic_ds_config": world.stage2, "critic_zero_stage": 0},
            {"num_eval_prompts": 40},
        ]
    else:
        changes += [
            {"offload": True},
            {"offload": True, "ds_config": world.stage2},
            {"zero_stage": 3, "ds_config": world.stage2},
            {"per_device_train_batch_size": 33},
            {"gradient_accumulation_steps": 9},
            {"max_seq_len": 65},
            {"max_seq_len": 1},
            {"held_out": 40},
            {"held_out": 1.5},
            {"held_out": 0.001},
            {"only_optimize_lora": True},
            {"lora_module_name": "layers."},
            {"lora_dim": 8, "lora_module_name": "layrs."},
            {"lora_dim": 8, "lora_target_modules": "w"},
            {"lora_dim": 8, "lora_dropout": 1},
            {"lora_dim": 8, "learning_rate": 0},
            {"dropout": 1},
            {"no_bf16_to_fp32_loss": True},
            {"deepspeed_config": "x.json"},
        ]
    for change in changes:
        yield Mistake("contradiction", step, change)


def _flags(step: int) -> list[tuple[str, type]]:
    """(name, kind of its value) of every flag."""
    hints = typing.get_type_hints(PROGRAMS[step][1])
    return [(spec.name, _kind(hints[spec.name])) for spec in dataclasses.fields(PROGRAMS[step][1])]


def _kind(hint) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint


def _misspelt(name: str, rng: random.Random) -> str:
    place = rng.randrange(len(name))
    return rng.choice(
        [
            name[:place] + name[place + 1 :],
            name[:place] + name[place] + name[place:],
            name.replace("_", "-"),
            name + "s",
            name[:place] + "q" + name[place:],
        ]
    )
