"""Make all checks, one after the other, within nine minutes; print and keep each line, and write one page.

    scripts/check_gpu.sh [--output FOLDER] [--budget SECONDS] [--only NAME ...] [--keep]

Exit code 1 if one failed.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scripts.gpu_checks.check import (
    FAIL,
    NOT_RUN,
    ROOT,
    SKIPPED,
    Check,
    Outcome,
    Trial,
    isolated,
    lines_of,
    outcomes_of,
)
from scripts.gpu_checks.page import PAGE, Followed, to_act_on


def _of(module: str, function: str) -> str:
    return f"scripts.gpu_checks.{module}:{function}"


CHECKS = [
    Check("machine", _of("machine", "look"), limit=40),
    Check("attention", _of("attention", "alone"), limit=60),
    Check("decoding", _of("decoding", "against_plain"), ("graphs", None, "16 bits"), limit=75),
    Check("ppo", _of("ppo", "at_stages"), least=30, limit=130),
    Check("graphs", _of("decoding", "against_plain"), ("graphs", "gqa", "fp32", "16 bits"), limit=60),
    Check("steps bf16", _of("steps", "at_all_stages"), ("bf16",), limit=90),
    Check("memory", _of("copies", "planned"), least=30, limit=90),
    Check("sequences", _of("sequences", "split"), least=30, limit=150),
    Check("long rows", _of("sequences", "alone"), limit=90),
    Check("implementations", _of("implementations", "against_math"), limit=60),
    Check("auto", _of("copies", "under_limits"), limit=60),
    Check("between steps", _of("copies", "between_steps"), limit=60),
    Check("offload", _of("steps", "offloaded"), least=60, limit=120),
    Check("restart", _of("restarts", "resumed"), limit=60),
    Check("adapters", _of("steps", "learn"), limit=60),
    Check("steps fp16", _of("steps", "at_all_stages"), ("fp16",), limit=90),
    Check("quickstart", _of("quickstart", "learned"), least=60, limit=150),
    Check("vllm", _of("vllm", "alike"), least=30, limit=150),
    Check(
        "ranks",
        _of("ranks", "side_by_side"),
        least=40,
        limit=180,
        ranks=2,
        unseen="NCCL, partitions and their gathers, copies that ranks hold together, time-outs of groups",
    ),
]


SLOWER = 3.0  # limits are so many times as long in a dry run, where two ranks may share a core
BUDGET = 520.0  # seconds: nine minutes, less what it takes to begin and to print


def make_all(
    checks: Sequence[Check], *, dry: bool, gpus: int, output: Path, scratch: Path, budget: float
) -> list[Outcome]:
    """Make these checks, in their order, for as long as `budget` seconds last; print and keep each line at once.

    scratch: a folder for models and for what checks write, which nobody needs later.
    """
    began = time.monotonic()
    heard = Followed(output, dry)
    for check in checks:
        folder = scratch / "work" / check.name.replace(" ", "_")
        trial = Trial(dry, folder, scratch / "models", check.name, output, began)
        trial.line(begins=True)
        started = time.monotonic()
        left = began + budget - started
        if check.ranks > gpus:
            status, why = SKIPPED, f"needs {check.ranks} GPUs, and here is {gpus}; unseen: {check.unseen}"
        elif left < check.least:
            status, why = NOT_RUN, f"{max(left, 0):.0f} s were left, and it takes {check.least:.0f}"
        else:
            status, why = isolated(check, trial, logs=output / "logs", limit=check.limit, left=left, heard=heard)
        trial.line(status=status, why=why, seconds=round(time.monotonic() - started, 1))
        heard()
    return outcomes_of(lines_of(output))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, make the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a new folder for the page, the lines and logs")
    parser.add_argument("--budget", type=float, help="seconds for all checks together")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME", help="these")
    parser.add_argument("--keep", action="store_true", help="keep the models that were made, several GB")
    args = parser.parse_args(argv)
    dry = os.environ.get("DRY") == "1"
    gpus = 2 if dry else gpus_that_compute()  # ranks on the CPU
    if not gpus:
        why = subprocess.run([sys.executable, "-m", "engine.zero.gpu_support"], capture_output=True, text=True).stderr
        print(*why.splitlines()[-1:], file=sys.stderr)
        print("error: torch finds no GPU that computes. DRY=1 goes through the checks without one.", file=sys.stderr)
        return 2
    output = args.output or ROOT / "gpu_checks" / time.strftime("%Y%m%d_%H%M%S")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        print(f"error: --output {output} is not an empty folder. Give one that is new.", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    slower = SLOWER if dry else 1.0
    chosen = [
        replace(check, limit=check.limit * slower) for check in CHECKS if args.only is None or check.name in args.only
    ]
    budget = args.budget or BUDGET * slower
    scratch = Path(tempfile.mkdtemp(prefix="gpu_checks_"))
    # The check under way ends with this process, also if the terminal goes; nohup has that ignored.
    ends = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda ended_by, _: sys.exit(128 + ended_by)) for number in ends}
    try:
        outcomes = make_all(chosen, dry=dry, gpus=gpus, output=output.resolve(), scratch=scratch, budget=budget)
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print("", *to_act_on(outcomes, dry), f"the page: {output / PAGE}", sep="\n")
    if args.keep:
        print(f"models: {scratch / 'models'}")
    return int(any(found.status == FAIL for found in outcomes))


def gpus_that_compute() -> int:
    """How many GPUs torch can use: one that is listed may be hidden, or too old for this torch.

    Another process looks, because one that has used a GPU holds memory of it.
    """
    words = "import torch; n = torch.cuda.device_count(); n and torch.ones(1, device='cuda').add(1).item(); print(n)"
    found = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    return int(found.stdout) if found.returncode == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
