"""A converted configuration goes through step 3's --dry_run on tiny models."""

import yaml

from scripts.harness.programs import run_here
from training.convert.__main__ import main


def test_trls(tiny, tmp_path, capfd):
    fields = {
        "dataset_name": str(tiny.folder / "prompts.jsonl"),
        "sft_model_path": str(tiny.folder / "sft"),
        "reward_model_path": str(tiny.folder / "reward"),
        "output_dir": str(tmp_path / "out"),
        "response_length": 8,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "total_episodes": 64,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(fields))
    run = tmp_path / "run.yaml"
    assert main(["trl", str(tmp_path / "ppo.yaml"), "--ranks", "1", "--output", str(run)]) == 0
    result = run_here(3, {"config": run, "max_prompt_seq_len": 6, "num_eval_prompts": 8, "dry_run": True}, capfd)
    assert result.code == 0, result.stderr
    assert "dialect trl_ppo" in result.stdout and "8 steps" in result.stdout  # 64 / (4 x 2)


def test_openrlhfs(tiny, tmp_path, capfd):
    words = (
        f"--pretrain {tiny.folder}/sft --reward_pretrain {tiny.folder}/reward --input_key prompt "
        f"--prompt_data {tiny.folder}/prompts.jsonl --save_path {tmp_path}/out "
        "--rollout_batch_size 8 --train_batch_size 4 --zero_stage 0 "
        "--micro_train_batch_size 2 --prompt_max_len 6 --generate_max_len 8 --param_dtype bf16 --lr_scheduler linear"
    )
    (tmp_path / "flags.sh").write_text(words)
    run = tmp_path / "run.yaml"
    assert main(["openrlhf", str(tmp_path / "flags.sh"), "--ranks", "1", "--output", str(run)]) == 0
    result = run_here(3, {"config": run, "dtype": "fp32", "num_eval_prompts": 8, "dry_run": True}, capfd)
    assert result.code == 0, result.stderr
    assert "lam" in result.stdout and "4 steps" in result.stdout  # 32 prompts / 8
