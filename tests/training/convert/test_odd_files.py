"""Files of other systems with passwords, odd numbers, odd names and odd characters in them."""

import json

import pytest

from engine.errors import UserError
from training.convert.__main__ import convert, main
from training.flags.yaml_file import read_yaml

SECRET = "8f2e1c"


def written(folder, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def command(more: str) -> str:
    return f"python -m openrlhf.cli.train_ppo_ray --pretrain sft {more}\n"


@pytest.mark.parametrize(
    "system, name, text, code",
    [
        ("trl", "ppo.json", json.dumps({"hub_token": SECRET}), 0),
        ("openrlhf", "train.sh", command(f"--use_wandb {SECRET}"), 0),
        ("openrlhf", "train.yaml", f"logger.wandb.key: {SECRET}\n", 0),
        ("openrlhf", "train.sh", command(f"--remote_rm_url http://me:{SECRET}@a/"), 2),
    ],
)
def test_a_password_is_neither_printed_nor_written(system, name, text, code, tmp_path, capfd):
    assert main([system, written(tmp_path, name, text)]) == code
    printed = capfd.readouterr()
    assert SECRET not in printed.out + printed.err
    assert ("(not shown)" in printed.out) == (code == 0)


@pytest.mark.parametrize(
    "system, text, message",
    [
        ("trl", "per_device_train_batch_size: .inf", "per_device_train_batch_size inf: found no number"),
        ("trl", "num_sample_generations: .nan", "num_sample_generations nan: found no number"),
        ("trl", f"learning_rate: 1{'0' * 400}", "found no number"),
        ("trl", "warmup_steps: .nan", "warmup_steps nan: found no number"),
        ("trl", "1: 2", "1 is the name of no field"),
        ("openrlhf", "adam_betas: [0.9]", "adam_betas [0.9]: needed are 2 numbers"),
        ("openrlhf", "eps_clip_low_high: 0.2 0.28", "eps_clip_low_high '0.2 0.28': needed are 2 numbers"),
        ("openrlhf", "reward_clip_range: [a, b]", "reward_clip_range 'a': found no number"),
        ("openrlhf", "save_steps: 2.5", "save_steps 2.5: needed is a whole number"),
        ("openrlhf", "lora_rank: 8.7", "lora_rank 8.7: needed is a whole number"),
        ("openrlhf", "generate_max_len: long", "generate_max_len 'long': found no number"),
        ("openrlhf", "{max_len: 100, generate_max_len: 100}", "leaves no room for a prompt"),
    ],
)
def test_what_is_no_such_value_is_refused(system, text, message, tmp_path):
    with pytest.raises(UserError) as caught:
        convert(system, written(tmp_path, "given.yaml", text))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "brackets within brackets, too deep"),
        ('{"kl_coef": 0.1, "kl_coef": 0.9}', "kl_coef stands there 2 times"),
    ],
)
def test_json_that_is_none(text, message, tmp_path):
    with pytest.raises(UserError) as caught:
        convert("trl", written(tmp_path, "ppo.json", text))
    assert message in str(caught.value)


def test_what_is_written_can_be_read_whatever_characters_a_value_has(tmp_path):
    odd = {"exp_name": "a\x07\x1b[31m\x00b", "output_dir": "out\x07\nrun", "seed": 3}
    text, _ = convert("trl", written(tmp_path, "ppo.json", json.dumps(odd)))
    found = read_yaml(written(tmp_path, "run.yaml", text))
    assert found["output_dir"] == "out\x07\nrun" and found["seed"] == 3 and "exp_name" not in found


def test_a_field_of_the_dialect_with_a_list_of_words_is_left_to_step_3(tmp_path):
    found = read_yaml(
        written(tmp_path, "run.yaml", convert("trl", written(tmp_path, "ppo.yaml", "vf_coef: [a, b]"))[0])
    )
    assert "value_factor=a,b" in found["set"]


@pytest.mark.parametrize(
    "more, field, value",
    [
        ("--save_path 2024_05_01", "output_dir", "2024_05_01"),
        ("--save_path 007", "output_dir", "007"),
        ("--save_path 'a;b'", "output_dir", "a;b"),
        ("--save_path a; echo done", "output_dir", "a"),
        ("--save_path a 1>log 2>&1", "output_dir", "a"),
        ("--save_path a |& tee log", "output_dir", "a"),
        ("--init_kl_coef 1e-3", "kl_coef", 0.001),
        ("--init_kl_coef .5", "kl_coef", 0.5),
        ("--seed -3", "seed", -3),
    ],
)
def test_words_of_a_command_are_the_shells(more, field, value, tmp_path):
    text, _ = convert("openrlhf", written(tmp_path, "train.sh", command(more)))
    assert read_yaml(written(tmp_path, "run.yaml", text))[field] == value


def test_a_command_in_backticks_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        convert("openrlhf", written(tmp_path, "train.sh", command("--save_path `pwd`/out")))
    assert "whose value only the shell knows" in str(caught.value)
