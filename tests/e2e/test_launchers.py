"""The launchers, one for each model size, with programs on the PATH that stand in for `python` and `deepspeed`:
their words, plans of memory, and several nodes."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from engine import distributed
from scripts.harness import ROOT
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.runtime.plan import count_steps
from training.runtime.start_report import POINTS, RunSchedule
from training.supervised import supervised_schedule
from training.tools import dry_run
from training.tools.memory.__main__ import main as planner
from training.tools.memory.cluster import Cluster, gpu_bytes
from training.tools.memory.flags import MemoryFlags
from training.tools.memory.plan import MemoryPlan, plan


def stand_in(program: Path, prints: str) -> None:
    """Write a program that prints these words of a shell, a NUL behind each."""
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' {prints}\n")
    program.chmod(0o755)


def write_hostfile(file: Path, nodes: int) -> str:
    """A hostfile that names so many nodes of eight slots; returns its path."""
    file.write_text("# a comment\n" + "".join(f"node{number} slots=8\n" for number in range(nodes)))
    return str(file)


def words_of(stand_ins: Path, launcher: str, *arguments: str, **settings: str) -> list[str]:
    """What the launcher would start."""
    ended = launched(stand_ins, launcher, *arguments, **settings)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\0")[:-1]


def launched(
    stand_ins: Path, launcher: str, *arguments: str, path: str = ":/usr/bin:/bin", **settings: str
) -> subprocess.CompletedProcess:
    """The launcher's end; path: what comes behind the stand-ins in PATH."""
    return subprocess.run(
        [shutil.which("bash"), str(ROOT / "scripts" / f"{launcher}.sh"), *arguments],
        env={"PATH": f"{stand_ins}{path}", **settings},
        text=True,
        capture_output=True,
        timeout=60,
    )


def flag_of(words: list[str], name: str) -> str:
    """The value that counts: the last one."""
    return words[len(words) - words[::-1].index(f"--{name}")]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory) -> Path:
    """A folder for the PATH: python, deepspeed and pdsh print their words, a NUL behind each."""
    folder = tmp_path_factory.mktemp("stand_ins")
    for name in ("python", "deepspeed", "pdsh"):
        stand_in(folder / name, f'{name} "$@"')
    return folder


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
    "llama3.1_8b": (
        1,
        "bf16",
        {1: {"model": 3}, 2: {"model": 3}, 3: {"actor": 3, "critic": 3, "reference": 3, "reward": 3}},
    ),
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
        role: decoder.raw_decode(printed, found.end())[0]
        for found in re.finditer(r"^engine ([\w ]+): ", printed, re.MULTILINE)
        for role in found.group(1).split(" and ")
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
    assert "error: HARDWARE=1xt4: " in ended.stderr
    assert "has settings for 64xa100-80g 64xh100-80g 8xa100-80g 8xh100-80g." in ended.stderr


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
    assert words[:3] == ["python", "-m", "training.tools.dry_run"]
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
        **{name: value for name, value in os.environ.items() if name != "MASTER_PORT"},
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
    assert words_of(stand_ins, "opt_1.3b", "3", MASTER_PORT="29502")[:3] == ["deepspeed", "--master_port", "29502"]
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
    assert re.search("16xv100-32g +all weights, states on the host", ended.stdout) and "HOSTFILE=hosts " in ended.stdout
    assert "HARDWARE is 8xa100-80g by default." in ended.stdout
    flags = words_of(stand_ins, "opt_13b", "2", "--help", "all")
    assert flags[:2] == ["python", str(ROOT / "training" / "step2_reward.py")] and flags[-2:] == ["--help", "all"]


@pytest.mark.parametrize("nodes, options", [(1, "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"), (0, "")])
def test_ssh_gives_up_a_node_that_is_cut_off(nodes, options, tmp_path):
    stand_in(tmp_path / "deepspeed", '"$PDSH_SSH_ARGS_APPEND"')
    hosts = write_hostfile(tmp_path / "hosts", nodes) if nodes else ""
    assert words_of(tmp_path, "opt_1.3b", "3", HOSTFILE=hosts) == [options]


def test_nodes_that_are_not_named_are_asked_for(stand_ins, tmp_path):
    """deepspeed would end with a stack trace, or go on with fewer nodes, or on this machine alone."""
    missing = launched(stand_ins, "llama2_70b", "3")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: HARDWARE=64xa100-80g is 8 nodes: name them, HOSTFILE=hosts")
    few = launched(stand_ins, "llama2_70b", "3", "--dry_run", HOSTFILE=write_hostfile(tmp_path / "hosts", 4))
    assert (few.returncode, few.stdout) == (2, "")
    assert "names 4 nodes, and 8 are asked for (HARDWARE=64xa100-80g)" in few.stderr
    nowhere = launched(stand_ins, "opt_1.3b", "3", HOSTFILE="nowhere")
    assert (nowhere.returncode, nowhere.stdout) == (2, "")
    assert "error: HOSTFILE=nowhere: there is no such file." in nowhere.stderr


def test_pdsh_is_asked_for(stand_ins, tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "grep"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    stand_in(tmp_path / "bin" / "deepspeed", '"$@"')
    hosts = {nodes: write_hostfile(tmp_path / f"hosts{nodes}", nodes) for nodes in (1, 2)}
    assert launched(tmp_path / "bin", "opt_1.3b", "3", path="", HOSTFILE=hosts[1]).returncode == 0
    without = launched(tmp_path / "bin", "opt_1.3b", "3", path="", HOSTFILE=hosts[2])
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr.startswith("error: there is no pdsh here")
    assert launched(stand_ins, "opt_1.3b", "3", HOSTFILE=hosts[2]).returncode == 0


def test_a_task_of_srun_is_a_rank(stand_ins):
    words = words_of(stand_ins, "llama2_70b", "3", "--resume", "auto", LAUNCHER="srun")
    assert words[:3] == ["python", "-u", str(ROOT / "training" / "step3_rlhf.py")]
    assert flag_of(words, "resume") == "auto" and flag_of(words, "actor_zero_stage") == "3"


@pytest.mark.parametrize(
    "given, started",
    [
        (["training/step1_sft.py", "--seed", "1"], ["python", "-u", "training/step1_sft.py", "--resume", "auto"]),
        (["scripts/opt_13b.sh", "3", "--seed", "1"], ["env", "LAUNCHER=srun", "scripts/opt_13b.sh", "3"]),
    ],
)
def test_a_slurm_job_starts_a_step_or_a_launcher(given, started, tmp_path):
    stand_in(tmp_path / "srun", '"$SRUN_CPUS_PER_TASK" "$@"')
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "slurm.sh"), *given],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_PER_TASK": "6"},
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    cores, *words = ended.stdout.split("\0")[:-1]
    command = [word for word in words if word not in ("--kill-on-bad-exit=1", "--wait=60")]
    assert cores == "6" and command[: len(started)] == started
    assert command[-4:] == ["--resume", "auto", "--seed", "1"]


PAGE = ROOT / "docs" / "memory.md"
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a Llama's, as step 2 has them
ROW = re.compile(r"^#   (\S+)(?: or (\S+))? +(\S.*?) {2,}(\d+) GB \((\w+)\), (\d+) GB$", re.MULTILINE)


LLAMA = {  # meta-llama/Llama-*: width, feed-forward width, layers, heads, heads of keys and values
    "llama-2-7b": (4096, 11008, 32, 32, 32),
    "llama-2-13b": (5120, 13824, 40, 40, 40),
    "llama-2-70b": (8192, 28672, 80, 64, 8),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8),
}
QWEN = {"qwen2.5-0.5b": (896, 4864, 24, 14, 2)}  # Qwen/Qwen2.5-0.5B, in the same order
OPT = {  # facebook/opt-*: width, feed-forward width, layers, heads
    "opt-350m": (1024, 4096, 24, 16),
    "opt-1.3b": (2048, 8192, 24, 32),
    "opt-6.7b": (4096, 16384, 32, 32),
    "opt-13b": (5120, 20480, 40, 40),
    "opt-30b": (7168, 28672, 48, 56),
    "opt-66b": (9216, 36864, 64, 72),
}


def configuration(name: str) -> dict:
    """config.json of a published model, as far as shapes follow from it."""
    if name in LLAMA:
        width, middle, layers, heads, kept = LLAMA[name]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": middle,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kept,
            "vocab_size": 32000 if "2" in name.split("-") else 128256,
            "max_position_embeddings": 4096 if "2" in name.split("-") else 131072,
            "tie_word_embeddings": False,
        }
    if name in QWEN:
        width, middle, layers, heads, kept = QWEN[name]
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": width,
            "intermediate_size": middle,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kept,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        }
    width, middle, layers, heads = OPT[name]
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": width,
        "ffn_dim": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512 if name == "opt-350m" else width,
        "do_layer_norm_before": name != "opt-350m",
    }


def rows() -> dict[tuple[str, str], re.Match]:
    """The rows of all launchers' first lines: by launcher and the first HARDWARE of a row."""
    texts = {path.stem: path.read_text() for path in sorted((ROOT / "scripts").glob("*.sh"))}
    return {(name, row[1]): row for name, text in texts.items() if "launch.sh" in text for row in ROW.finditer(text)}


def planned(launcher: str, hardware: str, folder: Path) -> MemoryPlan:
    """The plan of its step 3, on the models that its steps 1 and 2 make; `folder` is where they stand."""
    family, _, size = launcher.partition("_")
    scorer = {"opt": "opt-350m", "llama2": "llama-2-7b", "llama3.1": "llama-3.1-8b"}[family]
    name = f"{scorer.rpartition('-')[0]}-{size}"
    models = {"sft": configuration(name), "reward": configuration(scorer)}
    for name, content in models.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(content))
    base = {"base_model_name_or_path": str(folder / "sft"), "peft_type": "LORA", "task_type": "SEQ_CLS"}
    base |= {"r": 64, "target_modules": LINEAR}
    (folder / "reward" / "adapter").mkdir(exist_ok=True)
    (folder / "reward" / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    return plan_of(flags_given(launcher, 3, hardware, folder), hardware)


def flags_given(launcher: str, step: int, hardware: str, folder: Path) -> list[str]:
    """The flags that a launcher gives to a step's program."""
    for name in ("python", "deepspeed"):  # without deepspeed in PATH, a launcher takes the .venv that tests may run in
        (folder / name).write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HARDWARE": hardware, "OUT": str(folder), "LAUNCHER": "srun"}
    script = [str(ROOT / "scripts" / f"{launcher}.sh"), str(step)]
    ended = subprocess.run(script, env=environment, text=True, capture_output=True, timeout=60, check=True)
    words = ended.stdout.split("\0")[:-1]
    program = next(
        place for place, word in enumerate(words) if word.startswith(str(ROOT / "training" / f"step{step}_"))
    )
    return words[program + 1 :]


def plan_of(words: list[str], hardware: str) -> MemoryPlan:
    """The plan of step 3 with these flags, on "8xa100-40g" and its like."""
    args = parse_flags(MemoryFlags, words, "")
    _ = args.ds_configs  # what DeepSpeed cannot do is refused
    count, _, gpu = hardware.partition("x")
    cluster = Cluster(gpus=min(8, int(count)), nodes=max(1, int(count) // 8), gpu=gpu_bytes(gpu))
    return plan(args, cluster)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """One folder for each launcher's models: what is planned of a model is planned once."""
    return tmp_path_factory.mktemp("launchers")


@pytest.mark.parametrize("launcher, hardware", sorted(rows()))
def test_a_launcher_needs_what_it_says(launcher, hardware, folders):
    found, row = planned(launcher, hardware, folders / launcher), rows()[launcher, hardware]
    needed, host = round(found.needed / 1e9), round(found.host / 1e9)
    said = f"#   {hardware} ... {needed} GB ({found.peak.phase}), {host} GB"
    assert row[5] == found.peak.phase and abs(int(row[4]) - needed) <= 1, said
    assert abs(int(row[6]) - host) <= max(1, 0.03 * host), said
    assert found.fits


def test_every_launcher_has_rows_for_all_its_hardware():
    named = {(launcher, name) for (launcher, _), row in rows().items() for name in (row[1], row[2]) if name}
    for path in (ROOT / "scripts").glob("*.sh"):
        known = re.search(r"^hardware (.*)$", path.read_text(), re.MULTILINE)
        assert known is None or {(path.stem, name) for name in known[1].split()} <= named


@pytest.mark.parametrize("launcher, hardware", sorted(key for key, row in rows().items() if row[2]))
def test_the_second_hardware_of_a_row_has_its_memory_and_flags(launcher, hardware, tmp_path):
    other = rows()[launcher, hardware][2]
    count, _, gpu = other.partition("x")
    assert hardware.startswith(f"{count}x") and gpu_bytes(gpu) == gpu_bytes(hardware.partition("x")[2])
    for step in STEPS:
        assert flags_given(launcher, step, other, tmp_path) == flags_given(launcher, step, hardware, tmp_path)


@pytest.mark.parametrize("launcher, hardware", sorted(key for key in rows() if key[1].startswith("1x")))
def test_one_gpu_updates_all_weights_at_once(launcher, hardware, tmp_path):
    """At stage 0 in 16 bits DeepSpeed updates them one by one (`chosen_stage`); the last of equal flags counts."""
    for step in STEPS:
        words = flags_given(launcher, step, hardware, tmp_path)
        given = {word: value for word, value in pairwise(words) if word.endswith("zero_stage")}
        assert "0" not in given.values()


# Of step 3's training_scripts in DeepSpeedExamples, as they run without arguments: the flags that both have.
PUBLISHED = """--data_path Dahoas/rm-static --data_split 2,4,4 --num_padding_at_beginning 1 --generation_batches 1
    --ppo_epochs 1 --max_answer_seq_len 256 --max_prompt_seq_len 256 --actor_learning_rate 5e-4
    --critic_learning_rate 5e-6 --num_train_epochs 1 --lr_scheduler_type cosine --gradient_accumulation_steps 1
    --num_warmup_steps 100 --deepspeed --seed 1234 --enable_hybrid_engine --actor_zero_stage 3 --critic_zero_stage 3
    --actor_gradient_checkpointing --disable_actor_dropout --actor_lora_dim 128
    --actor_lora_module_name decoder.layers. """


PUBLISHED_FOR = {
    # opt/single_node/run_13b.sh
    ("13b", "8xa100-40g"): "--per_device_generation_batch_size 16 --per_device_training_batch_size 16 "
    "--inference_tp_size 2",
    # opt/multi_node/run_66b.sh; batches by the names that main.py has had since
    ("66b", "64xa100-80g"): "--per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
    "--tp_gather_partition_size 4 --actor_weight_decay 0.1 --critic_weight_decay 0.1",
}


@pytest.mark.parametrize("size, hardware", PUBLISHED_FOR)
def test_what_deepspeed_chat_has_published_fits(size, hardware, folders):
    for name in (size, "350m"):
        (folders / name).mkdir(exist_ok=True)
        (folders / name / "config.json").write_text(json.dumps(configuration(f"opt-{name}")))
    models = ["--actor_model_name_or_path", str(folders / size), "--critic_model_name_or_path", str(folders / "350m")]
    words = (PUBLISHED + PUBLISHED_FOR[size, hardware]).split()
    found = plan_of([*models, *words, "--dtype", "fp16"], hardware)  # the default there
    shape = configuration(f"opt-{size}")
    width, ffn, layers = shape["hidden_size"], shape["ffn_dim"], shape["num_hidden_layers"]
    matrices = layers * (4 * width**2 + 2 * width * ffn)
    others = layers * (9 * width + ffn) + 2 * width + (50272 + 2050) * width  # biases, norms; embeddings
    factors = 128 * layers * (4 * 2 * width + 2 * (width + ffn))
    ranks = int(hardware.partition("x")[0])
    rest = found.peak_of("generate").device
    assert rest["actor", "weights"] == pytest.approx(2 * (matrices + others + factors) / ranks, rel=1e-3)
    assert rest["actor", "optimizer"] == pytest.approx(12 * (others + factors) / ranks, rel=1e-3)
    assert rest["reference", "weights"] == pytest.approx(2 * (matrices + others) / ranks, rel=1e-3)
    assert found.fits, found.needed
    figures = f"{found.needed / 1e9:.1f} of {gpu_bytes(hardware.partition('x')[2]) / 1e9:.1f} GB"
    assert figures in PAGE.read_text(), f"{PAGE} should say {figures}"


def test_the_page_shows_what_the_planner_prints(folders, capsys):
    """The table of its command; a line that ends with " ..." goes on."""
    in_blocks = r"```bash\n(four-engine-rlhf plan .*?)\n```.*?```\n(memory plan: .*?)```"
    command, shown = re.search(in_blocks, PAGE.read_text(), re.DOTALL).groups()
    for name, size in (("facebook/opt-13b", "13b"), ("opt-350m-reward", "350m")):
        (folders / size).mkdir(exist_ok=True)
        (folders / size / "config.json").write_text(json.dumps(configuration(f"opt-{size}")))
        command = command.replace(name, str(folders / size))
    assert planner(command.replace("\\\n", " ").split()[2:]) == 0
    for line, said in zip(capsys.readouterr().out.splitlines(), shown.splitlines(), strict=True):
        assert line == said or (said.endswith(" ...") and line.startswith(said[:-4])), line


CHECKPOINTING = ["--actor_gradient_checkpointing", "--critic_gradient_checkpointing"]
ADAPTERS = [*CHECKPOINTING, "--actor_lora_dim", "64", "--critic_lora_dim", "64", "--only_optimize_lora"]


@pytest.mark.parametrize(
    "page, name, flags, said",
    [
        ("README.md", "qwen2.5-0.5b", [], "Step 3 takes {} GB by the plan"),
        ("README.md", "qwen2.5-0.5b", CHECKPOINTING, ", {} GB with `--actor_gradient_checkpointing --critic_gradient"),
        ("docs/memory.md", "opt-350m", CHECKPOINTING, "of OPT-350M takes {} GB"),
        ("docs/memory.md", "opt-1.3b", CHECKPOINTING, "of OPT-1.3B {} GB"),
        ("docs/memory.md", "opt-1.3b", ADAPTERS, "OPT-1.3B takes {} GB"),
        ("docs/memory.md", "llama-2-7b", ADAPTERS, "Llama-2 7B {} GB"),
        ("docs/memory.md", "llama-2-13b", ADAPTERS, "13B {} GB"),
    ],
)
def test_pages_say_what_one_gpu_needs(page, name, flags, said, folders):
    (folders / name).mkdir(exist_ok=True)
    (folders / name / "config.json").write_text(json.dumps(configuration(name)))
    models = [f"--{role}_model_name_or_path={folders / name}" for role in ("actor", "critic")]
    needed = plan_of([*models, *flags, "--dtype", "bf16"], "1xa100-80g").needed
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert said.format(round(needed / 1e9)) in text


@pytest.mark.parametrize(
    "page, launcher, hardware, said",
    [
        ("README.md", "llama2_7b", "8xa100-80g", "{needed} GB of a GPU by the plan"),
        ("docs/guide.md", "llama2_13b", "8xa100-80g", "step 3 with offloaded frozen models takes {needed} of 85 GB"),
        ("docs/guide.md", "llama2_13b", "8xa100-40g", "with adapters of rank 64, {needed} of 42.5 GB"),
        ("docs/many_nodes.md", "llama3.1_8b", "8xh100-80g", "8 --sequence_parallel_size 8` | {needed} GB |"),
        (
            "docs/many_nodes.md",
            "llama3.1_8b",
            "16xh100-80g",
            "the same and `--sequence_parallel_size 8` | {needed} GB |",
        ),
    ],
)
def test_pages_say_what_launchers_say(page, launcher, hardware, said):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert said.format(needed=rows()[launcher, hardware][4]) in text


def test_the_page_says_what_four_nodes_of_v100_need(folders):
    models = folders / "four_nodes"
    planned("llama2_7b", "16xv100-32g", models)  # makes the models
    words = flags_given("llama2_7b", 3, "16xv100-32g", models)
    needed = plan_of([*words, "--offload", "false"], "32xv100-32g").needed
    text = (ROOT / "docs" / "many_nodes.md").read_text(encoding="utf-8")
    assert f"({needed / 1e9:.1f} of {gpu_bytes('v100-32g') / 1e9:.1f} GB)" in text


FLAGS = {1: SFTFlags, 2: RewardFlags, 3: RLHFFlags}
RM_STATIC = 76_256
"""Rows of Dahoas/rm-static's training split, by the card of the data set."""


def course_of(launcher: str, step: int, hardware: str, folder, monkeypatch) -> RunSchedule:
    """The course of a launcher's step, on this hardware."""
    words = flags_given(launcher, step, hardware, folder)
    args = parse_flags(FLAGS[step], words, "")
    monkeypatch.setattr(distributed, "world_size", lambda: int(hardware.partition("x")[0]))
    two, four = (RM_STATIC * part // 10 for part in (2, 4))  # --data_split 2,4,4
    assert words[words.index("--data_split") + 1] == "2,4,4"
    if step < 3:
        share = two if step == 1 else four
        return supervised_schedule(args, share - int(share * args.held_out))
    steps = count_steps(args, four)
    return RunSchedule(steps, 1.0, args.schedule())


@pytest.mark.parametrize("launcher, hardware", sorted(rows()))
def test_a_run_that_dies_late_loses_little(launcher, hardware, tmp_path, monkeypatch):
    for step in FLAGS:
        course = course_of(launcher, step, hardware, tmp_path, monkeypatch)
        told = f"{launcher} {step} on {hardware}: {course.lines()}"
        assert course.points >= POINTS and not any("warning" in line for line in course.lines()), told
        assert course.schedule.steps <= course.steps / 4, told  # the most that is trained twice
        assert course.schedule.keep, told  # they are large
