"""Whether a long run of step 3 grows: live tensors, their bytes and each rank's resident memory, over the steps.

    scripts/quickstart.sh quickstart                      # the models, once
    python scripts/trial_growth.py quickstart --steps 300
    python scripts/trial_growth.py quickstart --trim      # without what the C library keeps of freed memory
    python scripts/trial_growth.py quickstart --still     # with responses that do not become longer as the actor learns

Trains the quickstart's models for so many steps with two ranks under ZeRO-3, EMA included, and counts after every fifth
what the garbage collector, Python's allocator, the C library and the system know. Printed is the slope from step 50 on,
and that of the run's second half, by least squares, with standard errors: nothing grows where a slope is within two of
these of 0. What fills up and then stays (caches of shapes, memory kept for the next tensor) shows in the first alone.
"""

import argparse
import ctypes
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FOLDER = "TRIAL_GROWTH_FOLDER"  # set where this file is the program that the launcher starts
TRIM = "TRIAL_GROWTH_TRIM"
EVERY, FIRST = 5, 50  # steps
COUNTED = {
    "tensors": ("live tensors", 1),
    "bytes": ("their bytes, MB", 1e6),
    "blocks": ("blocks of Python's objects", 1),
    "in_use": ("in use of the C library's memory, MB", 1e6),
    "resident": ("resident memory, MB", 1e6),
}


def main() -> int:
    """Run, and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="the quickstart's folder, with sft, reward and data")
    parser.add_argument("--steps", type=int, default=300, help="of training (default: 300)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--batch", type=int, default=32, help="prompts a step and rank (default: 32)")
    parser.add_argument("--master_port", type=int, default=29500, help="of the process group (default: 29500)")
    parser.add_argument("--trim", action="store_true", help="give freed memory back before each reading (malloc_trim)")
    parser.add_argument("--still", action="store_true", help="learn next to nothing: responses keep their lengths")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("deepspeed")), "--log_level", "critical"]
        command += ["--num_gpus", str(options.ranks), "--master_port", str(options.master_port), __file__]
        for name, value in flags(options, folder).items():
            command += [f"--{name}", *([] if value is True else [str(value)])]
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", FOLDER: folder, TRIM: str(int(options.trim))}
        result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if result.returncode:
            print(result.stdout[-3000:] + result.stderr[-3000:], file=sys.stderr)
            return 1
        half = max(FIRST, options.steps // 2)
        print(f"| rank | | at step {FIRST} | at the end | a step, from step {FIRST} on | from step {half} on |")
        print("| --- " * 6 + "|")
        for rank in range(options.ranks):
            lines = [json.loads(line) for line in Path(folder, f"{rank}.jsonl").read_text().splitlines()]
            for name, (label, unit) in COUNTED.items():
                print(row(rank, label, [(line["step"], line[name] / unit) for line in lines], half))
    return 0


def flags(options: argparse.Namespace, folder: str) -> dict:
    """Of step 3: as in scripts/quickstart.sh, but for the steps and their size."""
    return {
        "actor_model_name_or_path": options.models / "sft",
        "critic_model_name_or_path": options.models / "reward",
        "data_path": options.models / "data" / "prompts.jsonl",
        "output_dir": f"{folder}/out",
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "max_prompt_seq_len": 12,
        "max_answer_seq_len": 32,
        "per_device_generation_batch_size": options.batch,
        "per_device_training_batch_size": options.batch,
        "num_eval_prompts": 0,
        "max_steps": options.steps,
        "ppo_epochs": 2,
        "kl_coef": 0.15,
        "actor_learning_rate": 1e-12 if options.still else 1.5e-3,
        "critic_learning_rate": 2e-3,
        "lr_scheduler_type": "cosine",
        "enable_ema": True,
        "print_answers_interval": 0,
    }


def row(rank: int, label: str, points: list[tuple[int, float]], half: int) -> str:
    """A line of the table, of (step, number) pairs."""
    late = [(step, number) for step, number in points if step >= FIRST]
    slopes = [least_squares([point for point in late if point[0] >= first]) for first in (FIRST, half)]
    told = " | ".join(f"{slope:+.4f} ± {error:.4f}" for slope, error in slopes)
    return f"| {rank} | {label} | {late[0][1]:,.1f} | {late[-1][1]:,.1f} | {told} |"


def least_squares(points: list[tuple[int, float]]) -> tuple[float, float]:
    """The slope of the line through these points, and its standard error.

    What is left beside the line comes in runs, so that it counts as fewer numbers, by its correlation with the one
    before: n (1 - r) / (1 + r) (Santer et al. 2000, J. Geophys. Res. 105, 7337-7356, section 2).
    """
    count = len(points)
    middle, mean = (sum(column) / count for column in zip(*points))
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - mean) for x, y in points) / spread
    left = [y - mean - slope * (x - middle) for x, y in points]
    squares = sum(number**2 for number in left)
    again = max(0.0, sum(one * other for one, other in itertools.pairwise(left)) / squares) if squares else 0.0
    free = max(1.0, count * (1 - again) / (1 + again) - 2)
    return slope, (squares / free / spread) ** 0.5


def recorded() -> None:
    """Step 3's program, which writes a line of counts after every fifth step; each rank runs this."""
    from training import ppo_trainer, step3_rlhf

    path, train = Path(os.environ[FOLDER], f"{os.environ['RANK']}.jsonl"), ppo_trainer.PPOTrainer.step

    def step(self, *given):
        report = train(self, *given)
        if self.steps_done % EVERY == 0:
            with path.open("a") as file:
                file.write(json.dumps({"step": self.steps_done, **counts()}) + "\n")
        return report

    ppo_trainer.PPOTrainer.step = step
    step3_rlhf.program()


def counts() -> dict[str, int]:
    """Live tensors of this process and the bytes of their storages; blocks that Python's allocator has given out; bytes
    that the C library has, to anybody, and not got back; and resident memory, with what the library keeps in between,
    which it cannot use for all sizes."""
    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)]
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    count = len(tensors)
    del tensors
    if os.environ[TRIM] == "1":
        ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "tensors": count,
        "bytes": sum(sizes.values()),
        "blocks": sys.getallocatedblocks(),
        "in_use": in_use(),
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def in_use() -> int:
    """Bytes of glibc's that are given out: in its heaps, and as mappings of their own."""

    class Mallinfo2(ctypes.Structure):  # malloc.h
        _fields_ = [(f"field_{index}", ctypes.c_size_t) for index in range(10)]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    info = mallinfo2()
    return info.field_4 + info.field_7  # hblkhd, uordblks


if __name__ == "__main__":
    if FOLDER in os.environ:
        recorded()
    else:
        sys.exit(main())
