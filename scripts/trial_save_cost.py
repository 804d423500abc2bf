"""How long restart points hold up training, written in the foreground and beside it, against their size and the disk.

    python scripts/trial_save_cost.py --size 34m --ranks 2 --folder /data/scratch

Runs step 3 three times, on models with random weights: without restart points, with --async_checkpoints false, and with
true. The disk's rate is that of dd with fsync for as many bytes, taken before each run.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed


def main() -> int:
    """Run, measure, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="34m", help="of actor and critic: 260k, 9m, 34m, 136m, ... (default: 34m)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--steps", type=int, default=9, help="of each run; every third is saved (default: 9)")
    parser.add_argument("--folder", type=Path, help="on the disk to write to (default: the temporary files')")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        flags = prepared(folder, options)
        print("| restart points | each held up training | whole after | size | rate | disk's rate | a step | the run |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for label, chosen in (
            ("none", {"save_steps": 0}),
            ("in the foreground", {"save_steps": 3, "async_checkpoints": "false"}),
            ("beside training", {"save_steps": 3, "async_checkpoints": "true"}),
        ):
            print(row(label, folder, {**flags, **chosen}, options.ranks), flush=True)
    return 0


def prepared(folder: Path, options: argparse.Namespace) -> dict:
    """Make the models and the prompts; returns the runs' flags."""
    import torch

    from scripts.benchmark_models import SIZES, make_models

    actor, critic = make_models(folder / "models", options.size, options.size, torch.float32)
    rng, words = random.Random(0), SIZES[options.size]["vocab_size"]
    prompts = [" ".join(f"w{rng.randrange(4, words)}" for _ in range(16)) for _ in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return {
        "data_path": folder / "prompts.jsonl",
        "actor_model_name_or_path": actor,
        "critic_model_name_or_path": critic,
        "max_prompt_seq_len": 16,
        "max_answer_seq_len": 16,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 4,
        "ppo_epochs": 1,
        "num_eval_prompts": 0,
        "max_steps": options.steps,
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "print_answers_interval": 0,
        "max_kl": 1e9,
    }


def row(label: str, folder: Path, flags: dict, ranks: int) -> str:
    """One run, and its row of the table."""
    from tests.e2e.programs import launch, metric_lines

    weights = [path for role in ("actor", "critic") for path in (folder / "models" / role).glob("*.safetensors")]
    disk = disk_rate(folder, weights)
    output_dir, started = folder / "out", time.monotonic()
    shutil.rmtree(output_dir, ignore_errors=True)
    result = launch(3, {**flags, "output_dir": output_dir}, ranks)
    seconds = time.monotonic() - started
    assert (output_dir / "actor").is_dir(), result.stdout + result.stderr
    lines = metric_lines(output_dir)
    found = {
        name: [line[name] for line in lines if name in line]
        for name in ("time/checkpoint", "checkpoint/seconds", "checkpoint/bytes", "time/step")
    }
    step = f"{statistics.median(found['time/step']):.2f} s"
    if not found["checkpoint/bytes"]:
        return f"| {label} | - | - | - | - | {disk / 1e6:.0f} MB/s | {step} | {seconds:.0f} s |"
    held_up, whole, size = (
        statistics.median(found[name]) for name in ("time/checkpoint", "checkpoint/seconds", "checkpoint/bytes")
    )
    return (
        f"| {label} | {held_up:.2f} s | {whole:.2f} s | {size / 1e6:.0f} MB | {size / whole / 1e6:.0f} MB/s | "
        f"{disk / 1e6:.0f} MB/s | {step} | {seconds:.0f} s |"
    )


def disk_rate(folder: Path, sources: list[Path]) -> float:
    """Bytes a second that dd writes and fsyncs; of files that stand in memory by then."""
    target, size, seconds = folder / "dd", 0, 0.0
    for source in sources * 3:  # as much as weights and both moments
        source.read_bytes()
        started = time.monotonic()
        subprocess.run(
            ["dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync"], check=True, stderr=subprocess.DEVNULL
        )
        seconds += time.monotonic() - started
        size += source.stat().st_size
        target.unlink()
    return size / seconds


if __name__ == "__main__":
    sys.exit(main())
