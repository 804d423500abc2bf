"""Whether two versions of this repository compute the same, to the last digit: run each, then compare.

    python scripts/same_results.py record OUT/before --tree ../old_clone --models quickstart
    python scripts/same_results.py record OUT/after --models quickstart
    python scripts/same_results.py compare OUT/before OUT/after

`record` runs the quickstart's step 3, and three steps of every dialect with 1 and 2 ranks at ZeRO stages 0 and 3 (real
partitions: the thresholds below which DeepSpeed keeps small weights gathered are 0), half an hour on two CPU cores.
`--models` is a folder of scripts/quickstart_models.sh, the same for both; run both on one machine. `compare` reads
metrics.jsonl apart from times and memory, the samples, and every weight that was saved. Exit code 1 where they differ.
"""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file

from engine.algorithms import get_dialect

ROOT = Path(__file__).resolve().parents[1]
NAMES = "from engine.algorithms import DIALECTS; print(*DIALECTS)"  # of the version that is run
SETTINGS = {
    "openai": ["query_start=", "query_end=", "truncate_token=eos", "truncate_after=0"],
    "grpo": ["samples_per_prompt=4"],
}
MEASURED_ANEW = (
    "time/",
    "speed/",
    "mfu/",
    "memory/",
    "rollout/tokens_per_second",
)  # differ between two runs of one version
THRESHOLDS = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance")


def quickstart(models: Path, out: Path) -> list[str]:
    """The quickstart's step 3 on two ranks, as scripts/quickstart.sh has it."""
    return words(
        models,
        out,
        critic_zero_stage=3,
        actor_zero_stage=3,
        num_eval_prompts=256,
        max_answer_seq_len=32,
        per_device_generation_batch_size=64,
        per_device_training_batch_size=64,
        max_steps=60,
        eval_steps=15,
        ppo_epochs=2,
        kl_coef=0.15,
        actor_learning_rate=1.5e-3,
        critic_learning_rate=2e-3,
        lr_scheduler_type="cosine",
        ema_decay=0.95,
        print_answers_interval=20,
    ) + ["--enable_ema"]


def dialect_run(models: Path, out: Path, dialect: str, ranks: int, stage: int) -> list[str]:
    """Three steps of a dialect."""
    has_critic = get_dialect(dialect).has_critic
    flags = {"critic_learning_rate": 1e-3, "critic_zero_stage": stage} if has_critic else {}
    if stage == 3:
        roles = ["actor", "reference", "reward", "critic"][: 4 if has_critic else 3]
        if dialect == "trlx":
            roles.remove("reference")  # within the actor's engine
        flags |= {f"{role}_ds_config": out.parent / "zero3.json" for role in roles}
    found = words(
        models,
        out,
        dialect=dialect,
        actor_zero_stage=stage,
        num_eval_prompts=16,
        max_answer_seq_len=24,
        per_device_generation_batch_size=16 // ranks,
        per_device_training_batch_size=8 // ranks,
        max_steps=3,
        actor_learning_rate=1e-3,
        num_warmup_steps=1,
        print_answers_interval=0,
        **flags,
    )
    if dialect in SETTINGS:
        found += ["--set", *SETTINGS[dialect]]
    return found


def words(models: Path, out: Path, **flags) -> list[str]:
    """The words of a step 3 on these models."""
    flags = {
        "actor_model_name_or_path": models / "sft",
        "critic_model_name_or_path": models / "reward",
        "data_path": models / "data" / "prompts.jsonl",
        "eval_data_path": models / "data" / "eval_prompts.jsonl",
        "data_output_path": out.parent / "cache",
        "max_prompt_seq_len": 12,
        "output_dir": out,
        "dtype": "fp32",
        **flags,
    }
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


def record(tree: Path, models: Path, out: Path, only: str) -> None:
    """Run everything in the repository at `tree`; raises CalledProcessError where a run fails."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((ROOT / "configs" / "ds" / "zero3.json").read_text())
    config["zero_optimization"] |= dict.fromkeys(THRESHOLDS, 0)
    (out / "zero3.json").write_text(json.dumps(config, indent=2))
    runs = {"quickstart": (2, quickstart(models, out / "quickstart"))}
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    asked = [sys.executable, "-c", NAMES]
    names = subprocess.run(asked, cwd=tree, check=True, capture_output=True, text=True, env=environment).stdout
    for dialect in names.split():
        for ranks in (1, 2):
            for stage in (0, 3):
                name = f"{dialect}_ranks{ranks}_stage{stage}"
                runs[name] = ranks, dialect_run(models, out / name, dialect, ranks, stage)
    for name, (ranks, flags) in runs.items():
        if only not in name or (out / name / "actor").is_dir():
            continue
        command = [
            "deepspeed",
            *("--log_level", "critical"),
            "--num_gpus",
            str(ranks),
            "--master_port",
            str(free_port()),
            "training/step3_rlhf.py",
            *flags,
            "--overwrite_output_dir",
        ]
        print(f"{name}: {shlex.join(command[:6])} ...", flush=True)
        with (out / f"{name}.log").open("w") as log:
            subprocess.run(
                command,
                cwd=tree,
                check=True,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def differences(before: Path, after: Path) -> list[str]:
    """What two runs' folders hold that is not the same."""
    found = []
    for name, kind in (("metrics.jsonl", metrics), ("samples/before.jsonl", lines), ("samples/after.jsonl", lines)):
        a, b = kind(before / name), kind(after / name)
        if len(a) != len(b):
            found.append(f"{name}: {len(a)} lines and {len(b)}")
        for number, (one, other) in enumerate(zip(a, b, strict=False), start=1):
            keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
            found += [f"{name}, line {number}: {key} {one.get(key)!r} and {other.get(key)!r}" for key in keys]
    for file in sorted(before.glob("*/*.safetensors")):
        a, b = load_file(file), load_file(after / file.relative_to(before))
        for key in sorted(a.keys() | b.keys()):
            if key not in a or key not in b or a[key].dtype != b[key].dtype or not a[key].equal(b[key]):
                found.append(f"{file.relative_to(before)}: {key}")
    return found


def lines(path: Path) -> list[dict]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metrics(path: Path) -> list[dict]:
    """The same, without what no two runs have alike."""
    return [{key: value for key, value in row.items() if not key.startswith(MEASURED_ANEW)} for row in lines(path)]


def compare(before: Path, after: Path) -> int:
    """Print which runs differ and where; returns the exit code."""
    names = sorted(path.parent.name for path in before.glob("*/metrics.jsonl"))
    assert names, f"{before} holds no runs"
    differing = 0
    for name in names:
        found = differences(before / name, after / name) if (after / name / "metrics.jsonl").is_file() else ["missing"]
        differing += bool(found)
        print(f"{name}: " + (f"{len(found)} differences, first: {'; '.join(found[:4])}" if found else "identical"))
    print(f"{len(names) - differing} of {len(names)} runs identical")
    return int(differing > 0)


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("out", type=Path)
    recording.add_argument("--tree", type=Path, default=ROOT, help="the version to run (default: this one)")
    recording.add_argument("--models", type=Path, required=True, help="a folder of scripts/quickstart_models.sh")
    recording.add_argument("--only", default="", help="runs whose names hold this text")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after)
    record(options.tree.resolve(), options.models.resolve(), options.out.resolve(), options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
