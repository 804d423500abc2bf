"""What stands on this machine, or is to be made, gets an absolute path; names on the Hub stay names."""

from pathlib import Path

from training.config.flags import make_paths_absolute
from training.config.step3 import RLHFFlags

REQUIRED = {"data_path": ["p"], "actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


def test_paths_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sft").mkdir()
    Path("auto").mkdir()
    Path("prompts.jsonl").touch()
    Path("judge.py").touch()
    Path("reward").symlink_to("sft")
    args = RLHFFlags(
        output_dir="new/out",
        tensorboard_path="curves",
        actor_model_name_or_path="sft",
        critic_model_name_or_path="reward",
        reward_model_name_or_path="owner/reward",
        data_path=["prompts.jsonl", "Dahoas/rm-static", "local/jsonfile"],
        reward_function=["judge.py:score", "math_verify"],
        resume="auto",
    )
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/new/out" and args.tensorboard_path == f"{tmp_path}/curves"
    assert args.actor_model_name_or_path == f"{tmp_path}/sft"
    assert args.critic_model_name_or_path == f"{tmp_path}/reward"
    assert args.reward_model_name_or_path == "owner/reward"
    assert args.data_path == [f"{tmp_path}/prompts.jsonl", "Dahoas/rm-static", "local/jsonfile"]
    assert args.reward_function == [f"{tmp_path}/judge.py:score", "math_verify"]
    assert args.resume == "auto" and args.data_output_path is None and args.actor_ds_config is None
    args.reward_function = ["judge:score"]
    make_paths_absolute(args)
    assert args.reward_function == ["judge:score"]


def test_up_from_a_folder_that_is_not_there(tmp_path, monkeypatch):
    """Made later, it would lead to files that were not found before."""
    monkeypatch.chdir(tmp_path)
    Path("disk/runs").mkdir(parents=True)
    Path("link").symlink_to("disk/runs")
    args = RLHFFlags(output_dir="new/./dot/../out", tensorboard_path="link/../curves", **REQUIRED)
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/new/out"
    assert args.tensorboard_path == f"{tmp_path}/disk/curves", "up from where a link leads to"
    args = RLHFFlags(output_dir="link/out", **REQUIRED)
    make_paths_absolute(args)
    assert args.output_dir == f"{tmp_path}/link/out"
