"""Make all checks, one after the other, within nine minutes; print a table, keep JSON.

    scripts/check_gpu.sh [--output FOLDER] [--budget SECONDS] [--only NAME ...] [--keep]

Exit code 1 if one failed.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from scripts.gpu_checks.catalogue import CHECKS
from scripts.gpu_checks.check import FAIL, NOT_RUN, ROOT, SKIPPED, Check, Outcome, isolated
from scripts.gpu_checks.table import table

SLOWER = 3.0  # limits are so many times as long in a dry run, where two ranks may share a core
BUDGET = 520.0  # seconds: nine minutes, less what it takes to begin and to print


def make_all(checks: Sequence[Check], *, dry: bool, gpus: int, output: Path, budget: float) -> list[Outcome]:
    """Make these checks, in their order, for as long as `budget` seconds last; print what comes of each at once."""
    deadline = time.monotonic() + budget
    outcomes = []
    for check in checks:
        left = deadline - time.monotonic()
        if check.ranks > gpus:
            why = f"needs {check.ranks} GPUs, and here is {gpus}; unseen: {check.unseen}"
            found = Outcome(check.name, SKIPPED, why)
        elif left < check.least:
            found = Outcome(check.name, NOT_RUN, f"{max(left, 0):.0f} s were left, and it takes {check.least:.0f}")
        else:
            limit = min(check.limit, left)
            found = isolated(check, dry=dry, output=output, models=output / "models", limit=limit)
        outcomes.append(found)
        print(f"{found.name}: {found.status}, {found.seconds:.0f} s. {found.why}".rstrip(), flush=True)
        (output / "checks.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    return outcomes


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, make the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/check_gpu.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a new folder for logs, JSON and the table")
    parser.add_argument("--budget", type=float, help="seconds for all checks together")
    parser.add_argument("--only", nargs="+", choices=[check.name for check in CHECKS], metavar="NAME", help="these")
    parser.add_argument("--keep", action="store_true", help="keep the models that were made, several GB")
    args = parser.parse_args(argv)
    dry = os.environ.get("DRY") == "1"
    gpus = 2 if dry else gpus_that_compute()  # ranks on the CPU
    if not gpus:
        print("error: torch finds no GPU that computes. DRY=1 goes through the checks without one.", file=sys.stderr)
        return 2
    output = args.output or ROOT / "gpu_checks" / time.strftime("%Y%m%d_%H%M%S")
    if output.exists() and any(output.iterdir()):
        print(f"error: --output {output} is not empty. Give a folder that is new.", file=sys.stderr)
        return 2
    output.mkdir(parents=True, exist_ok=True)
    slower = SLOWER if dry else 1.0
    chosen = [
        replace(check, limit=check.limit * slower) for check in CHECKS if args.only is None or check.name in args.only
    ]
    budget = args.budget or BUDGET * slower
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the check under way ends, too
    try:
        outcomes = make_all(chosen, dry=dry, gpus=gpus, output=output.resolve(), budget=budget)
    finally:
        signal.signal(signal.SIGTERM, before)
    if not args.keep:
        for name in ("models", "work"):
            shutil.rmtree(output / name, ignore_errors=True)
    lines = table(outcomes)
    (output / "table.md").write_text("\n".join(lines) + "\n")
    print("", *lines, "", f"logs and JSON: {output}", sep="\n")
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
