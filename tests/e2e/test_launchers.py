"""The launchers, one for each model size: what they would start, and that a dry run of it is right.

The scripts run with stand-ins for `python` and `deepspeed` on the PATH that print their words; the words of a dry run
are then given to training/runtime/dry_run.py in this process. One whole dry run goes through a shell.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.harness import ROOT
from tests.e2e.launching import flag_of, launched, words_of, write_hostfile
from training.runtime import dry_run

STEPS = {1: "step1_sft.py", 2: "step2_reward.py", 3: "step3_rlhf.py"}
SIZES = {  # launcher: (nodes, dtype, {step: {engine: ZeRO stage}}), by default
    "opt_1.3b": (
        1,
        "fp16",
        {1: {"model": 2}, 2: {"model": 0}, 3: {"actor": 2, "critic": 2, "reference": 0, "reward": 0}},
    ),
    "opt_6.7b": (
        1,
        "fp16",
        {1: {"model": 3}, 2: {"model": 0}, 3: {"actor": 3, "critic": 2, "reference": 3, "reward": 0}},
    ),
    "opt_13b": (
        1,
        "bf16",
        {1: {"model": 3}, 2: {"model": 3}, 3: {"actor": 3, "critic": 2, "reference": 3, "reward": 0}},
    ),
    "opt_30b": (
        4,
        "bf16",
        {1: {"model": 3}, 2: {"model": 3}, 3: {"actor": 3, "critic": 2, "reference": 3, "reward": 0}},
    ),
    "opt_66b": (
        8,
        "bf16",
        {1: {"model": 3}, 2: {"model": 3}, 3: {"actor": 3, "critic": 2, "reference": 3, "reward": 0}},
    ),
    **{
        f"llama2_{size}": (
            nodes,
            "bf16",
            {1: {"model": 3}, 2: {"model": 3}, 3: {"actor": 3, "critic": 3, "reference": 3, "reward": 3}},
        )
        for size, nodes in (("7b", 1), ("13b", 1), ("70b", 8))
    },
}
OFFLOADED = {("opt_6.7b", 3)}  # optimizer states in host memory
CASES = [pytest.param(size, step, id=f"{size}-{step}") for size in SIZES for step in STEPS]


@pytest.fixture
def in_dry_run(monkeypatch, tmp_path):
    """A dry run of these words in this process, in an empty folder; gives (exit code, stdout, stderr)."""

    def tried(words: list[str], capfd) -> tuple[int, str, str]:
        for name in ("WORLD_SIZE", "LOCAL_SIZE"):  # which dry_run sets for good
            monkeypatch.setenv(name, "1")
        monkeypatch.setattr("engine.distributed.world_size", lambda: int(os.environ["WORLD_SIZE"]))
        monkeypatch.setattr(sys, "argv", [str(ROOT / "training" / "dry_run.py"), *words])
        monkeypatch.chdir(tmp_path)
        capfd.readouterr()
        return dry_run.main(words), *capfd.readouterr()

    return tried


def engines_of(printed: str) -> dict[str, dict]:
    """Each engine's configuration in what a dry run prints."""
    decoder = json.JSONDecoder()
    return {
        found.group(1): decoder.raw_decode(printed, found.end())[0]
        for found in re.finditer(r"^engine (\w+): ", printed, re.MULTILINE)
    }


def test_every_launcher_is_here():
    found = {path.stem for path in (ROOT / "scripts").glob("*.sh") if "launch.sh" in path.read_text()}
    assert found - {"launch"} == set(SIZES)


@pytest.mark.parametrize("size, step", CASES)
def test_a_launcher_starts_what_it_says(size, step, stand_ins, tmp_path):
    nodes, dtype, _ = SIZES[size]
    hosts = write_hostfile(tmp_path / "hosts", nodes) if nodes > 1 else ""
    words = words_of(stand_ins, size, str(step), HOSTFILE=hosts)
    launcher = ["deepspeed", *(["--hostfile", hosts] if nodes > 1 else []), "--num_gpus", "8"]
    launcher += ["--log_level", "critical"]
    assert words[: len(launcher) + 1] == [*launcher, str(ROOT / "training" / STEPS[step])]
    assert flag_of(words, "dtype") == dtype and flag_of(words, "data_path") == "Dahoas/rm-static"
    assert flag_of(words, "data_split") == "2,4,4"
    out = f"out/{size.replace('_', '-')}"
    assert flag_of(words, "output_dir") == f"{out}/{ {1: 'sft', 2: 'reward', 3: 'ppo'}[step] }"
    if step == 3:  # where steps 1 and 2 have written
        assert flag_of(words, "actor_model_name_or_path") == f"{out}/sft"
        assert flag_of(words, "critic_model_name_or_path") == f"{out}/reward"


def test_other_hardware_is_asked_for_by_name(stand_ins, tmp_path):
    words = words_of(
        stand_ins,
        "opt_13b",
        "3",
        HARDWARE="16xv100-32g",
        HOSTFILE=write_hostfile(tmp_path / "hosts", 4),
        NUM_NODES="2",
    )
    assert words[3:7] == ["--num_nodes", "2", "--num_gpus", "8"] and flag_of(words, "dtype") == "fp16"
    words = words_of(stand_ins, "llama2_7b", "3", HARDWARE="1xa100-80g", NUM_GPUS="2", DTYPE="fp32")
    assert words[:3] == ["deepspeed", "--num_gpus", "2"] and flag_of(words, "dtype") == "fp32"


def test_hardware_that_a_launcher_has_no_settings_for(stand_ins):
    ended = launched(stand_ins, "llama2_70b", "3", "--dry_run", HARDWARE="1xt4")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "error: HARDWARE=1xt4: " in ended.stderr and "has settings for 64xa100-80g 8xa100-80g." in ended.stderr


@pytest.mark.parametrize("size", SIZES)
def test_restart_points_come_before_the_end(size, stand_ins):
    """DeepSpeed-Chat's data, Dahoas/rm-static: 76,256 rows, of which step 3 takes 40 %."""
    words = words_of(stand_ins, size, "3", "--dry_run")
    given = {name: int(flag_of(words, name)) for name in ("num_gpus", "generation_batches", "save_steps")}
    nodes = int(flag_of(words, "num_nodes")) if "--num_nodes" in words else 1
    prompts = given["num_gpus"] * nodes * given["generation_batches"]
    steps = 0.4 * 76_256 // (prompts * int(flag_of(words, "per_device_generation_batch_size")))
    assert given["save_steps"] <= steps / 2


@pytest.mark.parametrize("size, step", CASES)
def test_its_dry_run_is_right(size, step, stand_ins, in_dry_run, tmp_path, capfd):
    nodes, dtype, stages = SIZES[size]
    words = words_of(stand_ins, size, str(step), "--dry_run")
    assert words[:3] == ["python", "-m", "training.runtime.dry_run"]
    code, printed, said = in_dry_run(words[3:], capfd)
    assert (code, said) == (0, "")
    assert shlex.split(printed.splitlines()[1]) == words[3:]
    assert os.environ["WORLD_SIZE"] == str(8 * nodes) and os.environ["LOCAL_SIZE"] == "8"
    engines = engines_of(printed)
    assert {role: config["zero_optimization"]["stage"] for role, config in engines.items()} == stages[step]
    micro = int(flag_of(words, "per_device_training_batch_size" if step == 3 else "per_device_train_batch_size"))
    for role, config in engines.items():
        assert (config["fp16"]["enabled"], config["bf16"]["enabled"]) == (dtype == "fp16", dtype == "bf16")
        assert config["train_micro_batch_size_per_gpu"] == micro
        offloaded = role in ("actor", "critic") and (size, step) in OFFLOADED
        device = (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
        assert device == ("cpu" if offloaded else "none"), (role, config)
    assert "not looked at: Dahoas/rm-static" in printed
    assert "\ndry run: nothing was loaded or written\n" in printed
    assert ("\nmissing: several nodes need a --hostfile" in printed) == (nodes > 1)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_through_the_shell(tmp_path):
    """Nothing stands in: as a user has it, with models and data that are here."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "NUM_GPUS": "2",
        "OUT": str(tmp_path / "out"),
    }
    command = [str(ROOT / "scripts" / "llama2_7b.sh"), "3", "--dry_run", "--kl_coef", "0.25", "--dtype", "fp32"]
    ended = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("command\n  deepspeed --num_gpus 2 ") and "--kl_coef 0.25" in ended.stdout
    assert "kl_coef = 0.25 (given; the dialect's is" in ended.stdout
    assert set(engines_of(ended.stdout)) == {"actor", "critic", "reference", "reward"}
    assert f"not looked at: {tmp_path}/out/sft" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_flags_on_the_command_line_win(stand_ins, in_dry_run, capfd):
    words = words_of(
        stand_ins,
        "opt_6.7b",
        "3",
        "--dry_run",
        "--actor_zero_stage",
        "2",
        "--offload",
        "false",
        "--dtype",
        "bf16",
        "--per_device_training_batch_size",
        "2",
    )
    code, printed, said = in_dry_run(words[3:], capfd)
    assert (code, said) == (0, "")
    engines = engines_of(printed)
    stages = {role: config["zero_optimization"]["stage"] for role, config in engines.items()}
    assert stages == {"actor": 2, "critic": 2, "reference": 0, "reward": 0}
    assert all(config["bf16"]["enabled"] for config in engines.values())
    assert all(config["train_micro_batch_size_per_gpu"] == 2 for config in engines.values())
    assert "offload_optimizer" not in engines["actor"]["zero_optimization"]


def test_settings_from_outside(stand_ins, tmp_path):
    hosts = write_hostfile(tmp_path / "my hosts", 3)
    words = words_of(
        stand_ins,
        "opt_1.3b",
        "3",
        HOSTFILE=hosts,
        NUM_NODES="2",
        NUM_GPUS="4",
        MASTER_ADDR="10.0.0.1",
        MASTER_PORT="29501",
        DTYPE="bf16",
        OUT="o",
        DATA="a.jsonl b/c",
    )
    meeting = ["--master_addr", "10.0.0.1", "--master_port", "29501"]
    assert words[:11] == ["deepspeed", "--hostfile", hosts, *meeting, "--num_nodes", "2", "--num_gpus", "4"]
    assert flag_of(words, "dtype") == "bf16" and flag_of(words, "output_dir") == "o/ppo"
    place = words.index("--data_path")
    assert words[place : place + 4] == ["--data_path", "a.jsonl", "b/c", "--data_split"]


@pytest.mark.parametrize("settings, ranks", [({"NUM_NODES": "3"}, 24), ({"HARDWARE": "8xa100-80g"}, 32)])
def test_hosts_count_in_a_dry_run(settings, ranks, stand_ins, in_dry_run, tmp_path_factory, capfd):
    hosts = write_hostfile(tmp_path_factory.mktemp("hosts") / "hosts", 4)
    words = words_of(stand_ins, "llama2_70b", "3", "--dry_run", HOSTFILE=hosts, **settings)
    assert in_dry_run(words[3:], capfd)[0] == 0
    assert os.environ["WORLD_SIZE"] == str(ranks)


@pytest.mark.parametrize("arguments", [[], ["4"], ["sft"], ["--dry_run"]])
def test_a_step_that_is_none(arguments, stand_ins):
    ended = launched(stand_ins, "opt_13b", *arguments)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("usage: ") and "STEP: 1 (SFT), 2 (reward model), 3 (PPO)" in ended.stderr


def test_help(stand_ins):
    ended = launched(stand_ins, "opt_13b", "--help")
    assert ended.returncode == 0 and ended.stdout.startswith("usage: ")
    assert "16xv100-32g  all weights, states on the host" in ended.stdout and "HOSTFILE=hosts " in ended.stdout
    flags = words_of(stand_ins, "opt_13b", "2", "--help")
    assert flags == ["python", str(ROOT / "training" / "step2_reward.py"), "--help"]


def test_a_wrong_flag_ends_the_dry_run(stand_ins, in_dry_run, capfd):
    words = words_of(stand_ins, "opt_13b", "3", "--dry_run", "--kl_cof", "0.1")
    code, _, said = in_dry_run(words[3:], capfd)
    assert (code, said) == (2, "error: unknown flag --kl_cof. Did you mean --kl_coef?\n")
