"""OpenRLHF's command line: conversions by hand, both forms of its names, and what is refused."""

import pytest
import yaml

from engine.algorithms import get_dialect
from engine.errors import UserError
from training.convert.__main__ import convert, main
from training.convert.openrlhf import DIALECTS
from training.convert.openrlhf_table import RENAMED, TABLE
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags

SCRIPT = """set -x
# python3 -m openrlhf.cli.train_ppo_ray --not this
ray job submit --address="http://127.0.0.1:8265" \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --pretrain sft --reward_pretrain reward --save_path out/ppo --prompt_data org/a,org/b --input_key prompt \\
   --actor_num_nodes 2 --actor_num_gpus_per_node 4 --colocate_all_models \\
   --micro_train_batch_size 2 --train_batch_size 128 --micro_rollout_batch_size 8 --rollout_batch_size 1024 \\
   --prompt_max_len 512 --generate_max_len 256 --zero_stage 3 --bf16 --actor_learning_rate 5e-7 {more}
"""
DOTTED = """python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path sft --reward.model_name_or_path reward \\
   --ckpt.output_dir out/ppo --data.prompt_dataset org/a,org/b --data.input_key prompt --actor.num_nodes 2 \\
   --actor.num_gpus_per_node 4 --train.colocate_all --train.micro_batch_size 2 --train.batch_size 128 \\
   --rollout.micro_batch_size 8 --rollout.batch_size 1024 --data.max_len 768 --rollout.max_new_tokens 256 \\
   --ds.zero_stage 3 --ds.param_dtype bf16 --actor.adam.lr 5e-7
"""


def converted(tmp_path, more: str = "", ranks: int | None = None, text: str = SCRIPT) -> dict:
    """The YAML's settings."""
    path = tmp_path / "train.sh"
    path.write_text(text.replace("{more}", more))
    return yaml.safe_load(convert("openrlhf", str(path), ranks)[0])


def parsed(tmp_path, *args, **how) -> RLHFFlags:
    """The flags that step 3 makes of them."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(converted(tmp_path, *args, **how)))
    return parse_flags(RLHFFlags, ["--config", str(path)], "a program")


def refusal(tmp_path, more: str = "", **how) -> str:
    with pytest.raises(UserError) as caught:
        converted(tmp_path, more, **how)
    return str(caught.value)


def test_a_script(tmp_path):
    """1024 prompts / 8 ranks = 128, 8 at once; 128 responses / (2 x 8) = 8 passes, 1024 / 128 = 8 optimizer steps."""
    args = parsed(tmp_path)
    assert (args.per_device_generation_batch_size, args.generation_batches) == (8, 16)
    assert args.rows_per_rank == 128 and args.mini_batches == 8
    assert (args.per_device_training_batch_size, args.gradient_accumulation_steps) == (2, 8)
    assert args.data_path == ["org/a", "org/b"] and args.output_dir == "out/ppo" and args.dtype == "bf16"
    assert (args.max_prompt_seq_len, args.max_answer_seq_len) == (512, 256)
    assert args.actor_zero_stage == args.critic_zero_stage == 3 and args.seed == 42
    _, changed = args.resolved_dialect()
    assert {name: new for name, (_, new) in changed.items()} == {
        "kl_coef": 0.01,
        "score_clip": 10.0,
        "lam": 1.0,
        "value_clip_range": 0.5,
        "old_logprobs": "forward",
        "min_response_tokens": 0,
        "warmup_from_zero": True,
        "lr_schedule": "cosine",
        "actor_lr": 5e-7,
        "critic_lr": 9e-6,
        "ppo_epochs": 1,
        "mini_batches": 8,
    }


def test_names_with_dots_mean_the_same(tmp_path):
    assert converted(tmp_path, text=DOTTED) == converted(tmp_path)  # max_len 768 - 256 = 512


def test_flags_alone_and_yaml_files_are_read_too(tmp_path):
    words = SCRIPT.split("train_ppo_ray \\")[-1].replace("{more}", "")
    assert converted(tmp_path, text=words) == converted(tmp_path)
    fields = {"pretrain": "sft", "reward_pretrain": "reward", "rollout_batch_size": 16, "train_batch_size": 16}
    (tmp_path / "flags.yaml").write_text(yaml.safe_dump(fields | {"micro_train_batch_size": 4}))
    found = yaml.safe_load(convert("openrlhf", str(tmp_path / "flags.yaml"), 4)[0])
    assert found["gradient_accumulation_steps"] == 1 and found["dtype"] == "fp16"


def test_settings_of_several_flags(tmp_path):
    found = converted(
        tmp_path,
        "--kl_target 6 --eps_clip_low_high 0.2 0.27 --overlong_buffer_len 64 --critic_pretrain critic --enable_ema "
        "--reward_clip_range -5 5 --freezing_actor_steps 3 --save_steps 20 --lora_rank 16",
    )
    settings = set(found["set"])
    assert {"kl_controller=adaptive", "kl_target=6", "clip_range_high=0.27", "overlong_buffer=0.25"} <= settings
    assert found["clip_range"] == 0.2 and found["score_clip"] == 5.0 and found["ema_decay"] == 0.992
    assert found["critic_model_name_or_path"] == "critic" and found["reward_model_name_or_path"] == "reward"
    assert found["critic_warmup_steps"] == 3 and (found["save_steps"], found["keep_checkpoints"]) == (20, 3)
    assert found["actor_lora_dim"] == found["critic_lora_dim"] == 16 and found["lora_alpha"] == 16
    assert found["critic_lora_learning_rate"] == 9e-6


@pytest.mark.parametrize("estimator, dialect", DIALECTS.items())
def test_each_estimator_has_a_dialect_that_step_3_takes(estimator, dialect, tmp_path):
    args = parsed(tmp_path, f"--advantage_estimator {estimator} --n_samples_per_prompt 4")
    resolved, _ = args.resolved_dialect()
    assert resolved.name == dialect and resolved.samples_per_prompt == 4
    assert resolved.has_critic == (estimator == "gae") and args.mini_batches == 32  # 1024 x 4 / 128
    assert args.per_device_generation_batch_size == 2  # micro_rollout_batch_size 8 / 4


def test_what_is_refused(tmp_path):
    assert "unknown field kl_coef of OpenRLHF (did you mean init_kl_coef" in refusal(tmp_path, "--kl_coef 0.1")
    assert "rollout_batch_size 1024 is no multiple of 7 ranks" in refusal(tmp_path, ranks=7)
    assert "train_batch_size 128 is no multiple of micro_train_batch_size 2 x 128 ranks" in refusal(tmp_path, ranks=128)
    assert "--seed is given twice" in refusal(tmp_path, "--seed 1 --seed 2")
    assert "$SEED is a variable" in refusal(tmp_path, "--seed $SEED")
    assert "init_kl_coef is given, too" in refusal(tmp_path, "--init_kl_coef 1 --algo.kl.init_coef 1")
    assert "train_ppo_ray is called 2 times" in refusal(tmp_path, text=SCRIPT + SCRIPT)
    assert "found no command that calls train_ppo_ray" in refusal(tmp_path, text="echo hello\n")
    assert "advantage_estimator best: known are gae" in refusal(tmp_path, "--advantage_estimator best")


def test_what_has_no_counterpart_is_listed(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT.replace("{more}", "--async_train --remote_rm_url rules.py --label_key answer --top_p 1.0"))
    text, missing = convert("openrlhf", str(path))
    assert [line.split(":")[0] for line in missing] == [
        "remote_rm_url rules.py",
        "lr_scheduler cosine_with_min_lr",
        "lr_warmup_ratio 0.03",
        "async_train true",
    ]
    assert all(f"#   {line}" in text for line in missing)


def test_the_share_of_warm_up_is_told_in_numbers(tmp_path):
    (tmp_path / "train.sh").write_text(SCRIPT.replace("{more}", "--max_epochs 2"))
    _, missing = convert("openrlhf", str(tmp_path / "train.sh"))
    told = "give --num_warmup_steps, 0.03 x 8 x max_epochs 2 = 0.48 times the steps, which --dry_run counts"
    assert any(line.startswith(f"lr_warmup_ratio 0.03: {told}; without it the dialect's, 10") for line in missing)


def test_what_is_written_is_tried_with_as_many_processes(tmp_path, capsys):
    (tmp_path / "train.sh").write_text(SCRIPT.replace("{more}", ""))
    for name, more, launcher in (("a", [], "--num_nodes 2 --num_gpus 4"), ("b", ["--ranks", "8"], "--num_gpus 8")):
        output = str(tmp_path / name)
        assert main(["openrlhf", str(tmp_path / "train.sh"), "--output", output, *more]) == 0
        told = f"try it: deepspeed {launcher} training/step3_rlhf.py --config {output} --dry_run"
        assert told in capsys.readouterr().out


def test_advice_for_values_that_are_not_taken_stands_beside_none_that_is(tmp_path):
    for value, taken in (("flash_attention_2", True), ("flex_attention", False)):
        (tmp_path / "train.sh").write_text(SCRIPT.replace("{more}", f"--attn_implementation {value}"))
        text, missing = convert("openrlhf", str(tmp_path / "train.sh"))
        assert ("give another --attn_implementation" in text) == (not taken)
        assert (f"attn_implementation: {value}  # attn_implementation {value}\n" in text) == taken
        assert any(line.endswith("give another --attn_implementation") for line in missing) == (not taken)


def test_a_reward_server_is_asked_in_its_form_and_no_reward_model(tmp_path):
    more = "--remote_rm_url http://a:5000/get_reward,http://b:5000/get_reward --label_key answer"
    found = converted(tmp_path, more)
    assert found["reward_url"] == ["http://a:5000/get_reward", "http://b:5000/get_reward"]
    assert (found["reward_url_form"], found["reward_url_columns"]) == ("openrlhf", ["answer"])
    assert "critic_model_name_or_path" not in found and "reward_model_name_or_path" not in found
    assert parsed(tmp_path, more).reward_url == found["reward_url"]


def test_every_flag_of_the_table_is_one_of_step_3_and_every_setting_a_field():
    flags, fields = RLHFFlags.__dataclass_fields__, get_dialect("default").__dataclass_fields__
    assert {flag for entry in TABLE.values() for flag in entry.flags} <= flags.keys()
    assert {name for entry in TABLE.values() for name in entry.settings} <= fields.keys()
    assert set(RENAMED.values()) <= TABLE.keys()
