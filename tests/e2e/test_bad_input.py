"""Mistakes in flags, files, folders and the environment are told in one message."""

import json
import os
from unittest import mock

import pytest

from engine.zero.accelerator import device, why_not
from scripts.harness.programs import assert_one_message, forked, launch, run_here, snapshot

# (steps, changed flags, what the message holds). {bad} is the folder of `bad`, {tiny} that of `tiny`.
FILES = [
    ((1, 2, 3), {"data_path": "{bad}/absent.jsonl"}, ["{bad}/absent.jsonl", "No such file", "check the path"]),
    (
        (1, 2, 3),
        {"data_path": "{bad}/loop.jsonl"},
        ["{bad}/loop.jsonl", "Too many levels of symbolic", "check the path"],
    ),
    (
        (1, 2, 3),
        {"data_path": "~no_such_user/x.jsonl"},
        ["--data_path ~no_such_user/x.jsonl: no home folder of ~no_such_user", "Write the folder out"],
    ),
    ((1, 2, 3), {"data_path": "{bad}/empty.jsonl"}, ["{bad}/empty.jsonl", "found no records"]),
    (
        (1, 2, 3),
        {"data_path": "{bad}/broken.jsonl"},
        ["{bad}/broken.jsonl, line 3", "'prompt: 3'", "Write one JSON object a line"],
    ),
    (
        (1, 2, 3),
        {"data_path": "{bad}/other_column.jsonl"},
        ["{bad}/other_column.jsonl, line 2", "question, answer", "needed: ", "prompt"],
    ),
    (
        (1, 2, 3),
        {"data_path": "{bad}/number.jsonl"},
        ["{bad}/number.jsonl, line ", "column prompt", "7", "needed a string"],
    ),
    ((1, 2), {"eval_data_path": "{bad}/broken.jsonl"}, ["{bad}/broken.jsonl, line 3"]),
    ((3,), {"eval_data_path": "{bad}/broken.jsonl", "num_eval_prompts": 100}, ["{bad}/broken.jsonl, line 3"]),
    ((2,), {"normalization_data_path": "{bad}/other_column.jsonl"}, ["{bad}/other_column.jsonl, line 2", "question"]),
    ((1, 2, 3), {"output_dir": "{bad}/empty.jsonl"}, ["--output_dir", "{bad}/empty.jsonl is a file", "folder"]),
    ((1, 2, 3), {"output_dir": "{bad}/empty.jsonl/out"}, ["--output_dir", "{bad}/empty.jsonl is a file", "folder"]),
    ((1, 2, 3), {"output_dir": "~no_such_user/x"}, ["--output_dir ~no_such_user/x: no home folder"]),
    ((1, 2, 3), {"tensorboard_path": "{bad}/loop.jsonl"}, ["--tensorboard_path", "{bad}/loop.jsonl is a link that"]),
    ((1, 2, 3), {"output_dir": "{bad}"}, ["--output_dir {bad} is not empty"]),
    ((1, 2, 3), {"output_dir": "{tiny}"}, ["--output_dir {tiny}: it contains --data_path {tiny}/", "apart from it"]),
    ((3,), {"resume": "{bad}/nowhere"}, ["--resume {bad}/nowhere", "no checkpoint", "--save_steps"]),
    ((3,), {"resume": "{bad}/state_alone"}, ["--resume", "{bad}/state_alone is damaged", "manifest.json is missing"]),
]
MODELS = [
    ((1, 2), {"model_name_or_path": "{bad}/absent"}, ["--model_name_or_path", "{bad}/absent"]),
    ((1, 2), {"model_name_or_path": "{bad}/state_alone"}, ["--model_name_or_path", "{bad}/state_alone", "config.json"]),
    ((1, 2), {"model_name_or_path": "{tiny}/reward"}, ["--model_name_or_path", "{tiny}/reward", "no language model"]),
    (
        (1, 2),
        {"model_name_or_path": "{bad}/sft_no_weights"},
        ["--model_name_or_path", "{bad}/sft_no_weights", "no weights"],
    ),
    ((2,), {"sft_model_name_or_path": "{bad}/absent"}, ["--sft_model_name_or_path", "{bad}/absent"]),
    (
        (2,),
        {"sft_model_name_or_path": "{bad}/sft_other_tokenizer"},
        ["--model_name_or_path", "the tokenizer in {tiny}/sft gives other ids", "must be trained"],
    ),
    ((3,), {"actor_model_name_or_path": "{bad}/absent"}, ["--actor_model_name_or_path", "{bad}/absent"]),
    ((3,), {"actor_model_name_or_path": "{tiny}/reward"}, ["--actor_model_name_or_path", "no language model"]),
    (
        (3,),
        {"critic_model_name_or_path": "{tiny}/sft"},
        ["--critic_model_name_or_path", "no reward model but GPT2LMHeadModel", "training/step2_reward.py"],
    ),
    ((3,), {"reward_model_name_or_path": "{tiny}/sft"}, ["--reward_model_name_or_path", "no reward model"]),
    (
        (3,),
        {"critic_model_name_or_path": "{bad}/reward_two_labels"},
        ["--critic_model_name_or_path", "{bad}/reward_two_labels has num_labels = 2", "which has 1"],
    ),
    (
        (3,),
        {"reward_model_name_or_path": "{bad}/loop.jsonl"},
        ["--reward_model_name_or_path", "there is no folder {bad}/loop.jsonl"],
    ),
    (
        (3,),
        {"reward_model_name_or_path": "{bad}/reward_few_words"},
        [
            "--reward_model_name_or_path",
            "{bad}/reward_few_words knows 48 tokens, the actor's tokenizer has 64",
            "trained with",
        ],
    ),
    (
        (3,),
        {"reward_model_name_or_path": "{bad}/reward_other_tokenizer"},
        ["--reward_model_name_or_path", "{bad}/reward_other_tokenizer gives other ids", "must be trained"],
    ),
    (
        (3,),
        {"max_prompt_seq_len": 60, "max_answer_seq_len": 5},
        ["--max_prompt_seq_len 60", "--max_answer_seq_len 5", "64 positions", "--actor_model_name_or_path", "Lower"],
    ),
    (
        (2,),
        {"max_prompt_seq_len": 60, "max_answer_seq_len": 5},
        [
            "--max_prompt_seq_len 60",
            "--max_answer_seq_len 5",
            "64 positions",
            "--model_name_or_path {tiny}/sft",
            "Lower",
        ],
    ),
    ((1, 2), {"max_seq_len": 65}, ["--max_seq_len 65", "64 positions", "--model_name_or_path", "Lower"]),
]
FLAGS = [
    ((1, 2, 3), {"sed": 1}, ["unknown flag --sed", "Did you mean --seed?"]),
    ((1, 2, 3), {"seed": "one"}, ["--seed", "invalid int value", "'one'"]),
    ((1, 2, 3), {"data_path": None}, ["required", "--data_path"]),
    ((1, 2, 3), {"dtype": "fp8"}, ["--dtype", "'fp8'", "fp32"]),
    ((3,), {"dialect": "deepspeed"}, ["--dialect", "'deepspeed'", "deepspeed_chat"]),
    ((3,), {"set": "kl_targt=3"}, ["'kl_targt'", "did you mean kl_target", "kl_coef, kl_estimator"]),
    ((3,), {"dialect": "trl_rloo", "num_samples_per_prompt": 1}, ["samples_per_prompt 1", "RLOO", "2 or more"]),
    ((3,), {"dialect": "trl_rloo", "critic_learning_rate": 1e-5}, ["--critic_learning_rate 1e-05", "no critic", "0"]),
    ((3,), {"kl_controller": "adaptive"}, ["--kl_controller", "Give --set kl_controller=adaptive."]),
    ((3,), {"set": "ema_decay=0.5"}, ["--set ema_decay=0.5 needs --enable_ema or --reference ema.", "leave it out"]),
    (
        (3,),
        {"dialect": "deepspeed_chat_2023", "set": "missing_end_value=1"},
        ["missing_end_value 1.0: it has no effect where", "missing_end is 'none'", "Change that"],
    ),
    (
        (3,),
        {"dialect": "deepspeed_chat_2023", "missing_eos_penalty": 1},
        ["--missing_eos_penalty 1.0", "every end would be missing", "Give a truncate_token"],
    ),
    ((3,), {"set": "hydra_layers=99"}, ["hydra_layers 99", "layers"]),
    (
        (3,),
        {"dialect": "summarize", "per_device_generation_batch_size": 1, "per_device_training_batch_size": 1},
        ["whiten_advantages over a batch of one", "rank"],
    ),
    (
        (3,),
        {"dialect": "summarize", "set": "truncate_token=w1 w2"},
        ["truncate_token 'w1 w2': 2 tokens", "should be one"],
    ),
    ((3,), {"dialect": "summarize", "set": "truncate_token=."}, ["truncate_token '.'", "does not know it"]),
    ((1, 2), {"zero_stage": 4}, ["--zero_stage 4", "at most 3"]),
    ((3,), {"critic_zero_stage": 4}, ["--critic_zero_stage 4", "at most 3"]),
    ((3,), {"rollout_backend": "hybrid"}, ["--rollout_backend", "'hybrid'", "auto", "replica"]),
    ((3,), {"decoding": "recorded", "rollout_backend": "zero3"}, ["--decoding recorded", "--rollout_backend zero3"]),
    ((3,), {"decoding": "recorded", "replicas_between_steps": "free"}, ["--replicas_between_steps free"]),
    ((3,), {"profile_steps": [2, 0]}, ["--profile_steps 2 0: each must be at least 1."]),
    ((3,), {"profile_steps": [4, 2, 3]}, ["--profile_steps 4 3: this run trains steps 1 to 2"]),
    ((3,), {"profile_steps": 2, "enable_test_mode": True, "test_stop_step": 1}, ["--profile_steps 2", "steps 1 to 1"]),
    ((1, 2), {"offload": True}, ["--offload", "--zero_stage 0", "stage 1, 2 or 3"]),
    ((3,), {"offload": True, "actor_zero_stage": 2}, ["--offload", "--critic_zero_stage 0", "stage 1, 2 or 3"]),
    ((1, 2), {"learning_rate": "-1e-5"}, ["--learning_rate -1e-05", "at least 0"]),
    ((3,), {"actor_learning_rate": "-1e-5"}, ["--actor_learning_rate -1e-05", "at least 0"]),
    ((2, 3), {"temperature": 0}, ["--temperature 0.0", "greater than 0"]),
    (
        (3,),
        {"num_samples_per_prompt": 3, "per_device_training_batch_size": 8, "gradient_accumulation_steps": 1},
        [
            "12 responses",
            "--per_device_generation_batch_size 4",
            "--num_samples_per_prompt 3",
            "no multiple of the 8",
            "--per_device_training_batch_size 8",
        ],
    ),
    (
        (1, 2),
        {"per_device_train_batch_size": 33},
        ["--data_path", "32 examples", "--per_device_train_batch_size 33", "Lower"],
    ),
    (
        (1, 2, 3),
        {"data_path": "{bad}/three.jsonl", "held_out": None, "num_eval_prompts": None},
        ["3 rows", "--data_path {bad}/three.jsonl", "--{held_out_flag}"],
    ),
    (
        (3,),
        {"per_device_generation_batch_size": 33, "per_device_training_batch_size": 33},
        ["--data_path", "32 prompts are too few", "33 over 1 ranks", "Lower"],
    ),
    (
        (1, 2),
        {"ds_config": "{bad}/unknown_key.json"},
        ["{bad}/unknown_key.json", "zero_optimisation", "Did you mean zero_optimization"],
    ),
    (
        (1, 2),
        {"ds_config": "{bad}/stage2.json", "zero_stage": 3},
        ["{bad}/stage2.json", "stage is 2", "--zero_stage is 3"],
    ),
    ((1, 2), {"ds_config": "{bad}/stage2.json", "offload": True}, ["--offload", "--ds_config {bad}/stage2.json"]),
    (
        (3,),
        {"actor_ds_config": "{bad}/unknown_key.json"},
        ["{bad}/unknown_key.json", "zero_optimisation", "Did you mean zero_optimization"],
    ),
    (
        (3,),
        {"actor_ds_config": "{bad}/stage2.json", "actor_zero_stage": 3},
        ["{bad}/stage2.json", "stage is 2", "--actor_zero_stage is 3"],
    ),
    (
        (3,),
        {"critic_ds_config": "{bad}/clipping.json"},
        ["{bad}/clipping.json", "gradient_clipping is 5", "Leave it out"],
    ),
    ((3,), {"reward_ds_config": "{bad}/absent.json"}, ["reward", "{bad}/absent.json"]),
    ((3,), {"reference_ds_config": "{bad}/stage2.json"}, ["reference", "stage 2", "0 or 3"]),
]
CASES = [
    pytest.param(step, change, expected, id=f"step{step}-" + "-".join(f"{k}={v}" for k, v in change.items()))
    for steps, change, expected in FILES + MODELS + FLAGS
    for step in steps
]


@pytest.mark.parametrize("step, change, expected", CASES)
def test_a_mistake_is_told_in_one_message(step, change, expected, tiny, bad, tmp_path, capfd):
    places = {"bad": bad, "tiny": tiny.folder, "held_out_flag": "num_eval_prompts" if step == 3 else "held_out"}
    change = {name: value.format(**places) if isinstance(value, str) else value for name, value in change.items()}
    if step == 3:
        change.pop("held_out", None)
    else:
        change.pop("num_eval_prompts", None)
    before = snapshot(bad), snapshot(tiny.folder)
    result = run_here(step, tiny.flags(step, **{"output_dir": tmp_path / "out", **change}), capfd)
    assert_one_message(result, [part.format(**places) for part in expected])
    assert not (tmp_path / "out").exists()
    assert (snapshot(bad), snapshot(tiny.folder)) == before


def test_a_message_is_one_line_whatever_it_quotes(tiny, bad, tmp_path, capfd):
    (tmp_path / "odd.json").write_text(json.dumps({"a\nb\u202e\x1b[31m\0\ud800": 1}))
    flags = tiny.flags(1, output_dir=tmp_path / "out", ds_config=tmp_path / "odd.json")
    assert_one_message(run_here(1, flags, capfd), [r"unknown key a\nb\u202e\x1b[31m\x00\ud800."])


def test_nothing_is_read_from_stdin(tiny, tmp_path, capfd):
    (tmp_path / "asks.py").write_text("import os\nraise ValueError(f'was told {os.read(0, 9)}')\n")
    reading, writing = os.pipe()
    os.write(writing, b"y\n")
    kept = os.dup(0)
    os.dup2(reading, 0)
    try:
        result = run_here(3, tiny.flags(3, output_dir=tmp_path / "out", reward_function=f"{tmp_path}/asks.py:f"), capfd)
    finally:
        os.dup2(kept, 0)
        for number in (reading, writing, kept):
            os.close(number)
    assert_one_message(result, ["ValueError: was told b''"])


@pytest.mark.skipif(why_not("fp16") is None, reason="this machine trains in fp16")
@pytest.mark.parametrize("step", (1, 2, 3))
def test_fp16_where_the_machine_has_none(step, tiny, tmp_path, capfd):
    result = run_here(step, tiny.flags(step, output_dir=tmp_path / "out", dtype="fp16"), capfd)
    assert_one_message(result, ["--dtype fp16", device().type, "Use fp32"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "started, step, change, expected",
    [
        (launch, 3, {"acter_zero_stage": 3}, "unknown flag --acter_zero_stage. Did you mean --actor_zero_stage?"),
        (forked, 2, {"data_path": "{bad}/broken.jsonl"}, "{bad}/broken.jsonl, line 3"),
        (
            forked,
            3,
            {"per_device_generation_batch_size": 17, "per_device_training_batch_size": 17},
            "which takes 34 over 2 ranks",
        ),
    ],
)
def test_two_ranks_say_it_once(started, step, change, expected, tiny, bad, tmp_path):
    change = {name: value.format(bad=bad) if isinstance(value, str) else value for name, value in change.items()}
    result = started(step, tiny.flags(step, output_dir=tmp_path / "out", **change))
    assert_one_message(result, [expected.format(bad=bad)])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "found, told",
    [
        ({"RANK": "abc"}, "RANK is 'abc', no whole number"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT is '-1', no whole number"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 of WORLD_SIZE 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 of WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "0", "MASTER_ADDR": "a"}, "WORLD_SIZE is 2, but it has no MASTER_PORT, w"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "9", "MASTER_ADDR": ""}, "WORLD_SIZE is 2, but it has no MASTER_ADDR, w"),
    ],
)
def test_an_environment_that_cannot_be_a_launchers(tiny, tmp_path, capfd, monkeypatch, found, told):
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    assert_one_message(run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd), [f"the environment's {told}"])


def test_a_task_of_srun_that_is_told_too_little(tiny, tmp_path, capfd):
    """What it is told when that suffices: tests/training/runtime/test_environment.py."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    own = {name: value for name, value in os.environ.items() if name not in launched and "SLURM" not in name}
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    with mock.patch.dict(os.environ, {**own, **task, "SLURM_TASKS_PER_NODE": "2"}, clear=True):
        result = run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd)
    assert_one_message(
        result, ["srun has started this process", "no SLURM_STEP_NODELIST or SLURM_NODELIST", "MASTER_A"]
    )
