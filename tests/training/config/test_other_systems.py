"""Flags of other systems: what is said of them, by the tables of their pages."""

import pytest

from tests.training.config.command_lines import dialect_refusal, refusal
from training.config.other_systems import HEADINGS, rows
from training.config.parsing import STEPS
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags


@pytest.mark.parametrize(
    "flags_class, word, message",
    [
        (
            RLHFFlags,
            "--cliprange",
            "TRL's cliprange: in step 3 --clip_range. trlX's method.cliprange: in step 3 --clip_",
        ),
        (
            RLHFFlags,
            "--vf_coef=0.1",
            "TRL's vf_coef: in step 3 --critic_learning_rate, --set value_factor= (policy and",
        ),
        (RLHFFlags, "--algo.kl.init_coef", "OpenRLHF's algo.kl.init_coef: in step 3 --kl_coef."),
        (RLHFFlags, "--init_kl_coef", "OpenRLHF's init_kl_coef: in step 3 --kl_coef. trlX's method.init_kl_coef: in"),
        (RLHFFlags, "--eps_clip", "OpenRLHF's actor.eps_clip: in step 3 --clip_range."),
        (RLHFFlags, "--use_dora", "TRL's use_dora: no counterpart; instead LoRA as docs/lora.md has it."),
        (SFTFlags, "--lora_r", "TRL's lora_r: in steps 1 and 2 --lora_dim."),
        (RewardFlags, "--adam.lr", "OpenRLHF's adam.lr: in steps 1 and 2 --learning_rate (1e-5 here"),
        (RewardFlags, "--cliprange", "TRL's cliprange: in step 3 --clip_range."),
    ],
)
def test_what_is_said(tmp_path, flags_class, word, message):
    name = word.partition("=")[0]
    assert refusal(word, flags_class=flags_class).startswith(f"unknown flag {name}. {message}")
    (tmp_path / "run.yaml").write_text(f"{name[2:]}: 1\n")
    told = refusal("--config", str(tmp_path / "run.yaml"), flags_class=flags_class)
    assert f"run.yaml: unknown key {name[2:]}. {message}" in told


def test_a_field_that_the_dialect_does_not_have():
    assert dialect_refusal("--critic_model_name_or_path", "c", "--set", "cliprange_value=0.1").startswith(
        "--set cliprange_value=0.1: the dialect has no field cliprange_value. TRL's cliprange_value: in step 3 "
        "--value_clip_range."
    )


def test_a_name_that_two_systems_have_with_two_meanings():
    told = refusal("--per_device_train_batch_size", "8", "--output_dir", "o", flags_class=RLHFFlags)
    assert "--per_device_generation_batch_size" in told and "TRL has it, --per_device_training_batch_size" in told
    assert "renamed" not in told


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.system}-{row.names[:1]}-{row.heading}")
def test_each_name_that_is_none_of_ours_is_answered(row):
    for flags_class, step in STEPS.items():
        for name in row.names if step in HEADINGS[row.heading] else ():
            if name not in (*flags_class.__dataclass_fields__, *flags_class.old_flags):
                told = refusal(f"--{name}", "1", flags_class=flags_class)
                assert "Did you mean" not in told and "--help lists" not in told, told
