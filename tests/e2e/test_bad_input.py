"""Mistakes in flags, files, folders and the environment are told in one message."""

import json
import os
from unittest import mock

import pytest

from engine.zero.accelerator import device, why_not
from scripts.harness.programs import assert_one_message, forked, launch, run_here, snapshot

# (steps, changed flags, what the message holds). {bad} is the folder of `bad`, {tiny} that of `tiny`. What one module
# refuses stands in its own tests; here it has come through the programs.
MISTAKES = [
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
        (1,),
        {"data_path": "~no_such_user/x.jsonl"},
        ["--data_path ~no_such_user/x.jsonl: no home folder"],
    ),
    ((1,), {"eval_data_path": "{bad}/broken.jsonl"}, ["{bad}/broken.jsonl, line 3"]),
    ((3,), {"eval_data_path": "{bad}/broken.jsonl", "num_eval_prompts": 100}, ["{bad}/broken.jsonl, line 3"]),
    ((2,), {"normalization_data_path": "{bad}/other_column.jsonl"}, ["{bad}/other_column.jsonl, line 2", "question"]),
    ((1,), {"tensorboard_path": "{bad}/loop.jsonl"}, ["--tensorboard_path", "{bad}/loop.jsonl is a link that"]),
    ((1, 2, 3), {"output_dir": "{bad}"}, ["--output_dir {bad} is not empty"]),
    ((1, 2, 3), {"output_dir": "{tiny}"}, ["--output_dir {tiny}: it contains --data_path {tiny}/", "apart from it"]),
    ((3,), {"resume": "{bad}/nowhere"}, ["--resume {bad}/nowhere", "no checkpoint", "--save_steps"]),
    ((3,), {"resume": "{bad}/state_alone"}, ["--resume", "{bad}/state_alone is damaged", "manifest.json is missing"]),
    ((1, 2), {"model_name_or_path": "{bad}/state_alone"}, ["--model_name_or_path", "{bad}/state_alone", "config.json"]),
    ((2,), {"sft_model_name_or_path": "{bad}/absent"}, ["--sft_model_name_or_path", "{bad}/absent"]),
    ((3,), {"actor_model_name_or_path": "{tiny}/reward"}, ["--actor_model_name_or_path", "is not a language model"]),
    (
        (3,),
        {"critic_model_name_or_path": "{tiny}/sft"},
        ["--critic_model_name_or_path", "is not a reward model but GPT2LMHeadModel", "training/step2_reward.py"],
    ),
    (
        (3,),
        {"reward_model_name_or_path": "{bad}/reward_few_words"},
        ["{bad}/reward_few_words knows 48 tokens, the actor's tokenizer has 64", "trained with"],
    ),
    (
        (2, 3),
        {"max_prompt_seq_len": 60, "max_answer_seq_len": 5},
        ["--max_prompt_seq_len 60", "--max_answer_seq_len 5", "64 positions", "model_name_or_path {tiny}/sft", "Lower"],
    ),
    (
        (3,),
        {"max_prompt_seq_len": 32, "max_answer_seq_len": 32, "cut_responses": "closed"},
        ["--max_answer_seq_len 32 and 1 for the end of cut responses", "65 tokens", "{tiny}/reward has 64 positions"],
    ),
    (
        (3,),
        {"cut_responses": "closed", "set": ["score_before_pad=true", "pad_token=eos"]},
        ["cut_responses closed: EOS is the pad token", "--set pad_token=tokenizer"],
    ),
    ((1, 2), {"max_seq_len": 65}, ["--max_seq_len 65", "64 positions", "--model_name_or_path", "Lower"]),
    ((1, 2, 3), {"sed": 1}, ["unknown flag --sed", "Did you mean --seed?"]),
    (
        (3,),
        {"dialect": "deepspeed_chat_2023", "set": "missing_end_value=1"},
        ["missing_end_value 1.0: it has no effect where", "missing_end is 'none'", "Change that"],
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
    ((3,), {"profile_steps": [4, 2, 3]}, ["--profile_steps 4 3: this run trains steps 1 to 2"]),
    ((3,), {"profile_steps": 2, "enable_test_mode": True, "test_stop_step": 1}, ["--profile_steps 2", "steps 1 to 1"]),
    (
        (1, 2),
        {"per_device_train_batch_size": 33},
        ["32 examples", "33 over 1 rank", "Lower --per_device_train_batch_size"],
    ),
    (
        (1, 2, 3),
        {"data_path": "{bad}/three.jsonl", "held_out": None, "num_eval_prompts": None},
        ["3 rows", "--data_path {bad}/three.jsonl", "--{held_out_flag}"],
    ),
    (
        (3,),
        {"per_device_generation_batch_size": 33, "per_device_training_batch_size": 33},
        ["--data_path", "32 prompts are too few", "33 over 1 rank", "Lower"],
    ),
    (
        (3,),
        {"actor_ds_config": "{bad}/stage2.json", "actor_zero_stage": 3},
        ["{bad}/stage2.json", "stage is 2", "--actor_zero_stage is 3"],
    ),
    ((3,), {"reward_ds_config": "{bad}/absent.json"}, ["reward", "{bad}/absent.json"]),
]
CASES = [
    pytest.param(step, change, expected, id=f"step{step}-" + "-".join(f"{k}={v}" for k, v in change.items()))
    for steps, change, expected in MISTAKES
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
    assert_one_message(run_here(1, flags, capfd), [r"a\nb\u202e\x1b[31m\x00\ud800 is no key"])


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
