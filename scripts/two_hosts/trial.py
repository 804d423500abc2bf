"""Step 3 on two hosts of this machine, healthy and with faults: scripts/trial_two_hosts.sh.

    python -m scripts.two_hosts.trial [--launchers NAME ...] [--only healthy separate "link cut" ...] [--keep FOLDER]

Prints a line for each run as it ends. Exit code 1 if one is not as it should be, or cannot be tried.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.two_hosts import faults, healthy
from scripts.two_hosts.hosts import TwoHosts
from tests.e2e.programs import Tiny

LAUNCHERS = ("deepspeed", "torchrun", "slurm")
HEALTHY, SEPARATE = "healthy", "separate disks"
DISK = 64 << 20  # bytes of a host's own file system
SETTINGS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> int:
    """Try all that is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", choices=LAUNCHERS, nargs="+", default=LAUNCHERS, help="by default all")
    known = (HEALTHY, SEPARATE, *faults.FAULTS)
    parser.add_argument("--only", choices=known, nargs="+", default=known, help="some of the rows", metavar="ROW")
    parser.add_argument("--keep", type=Path, help="a folder, not there yet, for what the runs write and print")
    options = parser.parse_args()
    if reason := TwoHosts.refusal():
        print(f"no two hosts on this machine: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "trial"
        for name in ("own", "tmp", "cache"):
            (folder / name).mkdir(parents=True)
        os.environ |= {**SETTINGS, "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
        bad = 0
        print("| launcher | run | exit code | all gone after | as it should be |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for launcher, name, code, seconds, wrong in rows(options.launchers, options.only, folder):
            bad += bool(wrong)
            print(f"| {launcher} | {name} | {code} | {seconds:.0f} s | {', '.join(wrong) or 'yes'} |", flush=True)
    print(f"\n{bad} not as they should be" if bad else "\nall as it should be")
    return int(bool(bad))


def rows(launchers: list[str], names: list[str], folder: Path) -> Iterator[tuple[str, str, object, float, list[str]]]:
    """Each run's launcher, name, exit code, seconds and what is wrong with it."""
    tiny, one = Tiny(folder / "tiny"), folder / "one"
    began = time.monotonic()
    healthy.on_one_host(tiny, one)
    alone = time.monotonic() - began
    with TwoHosts(separate_disks={str(folder / "own"): DISK}) as hosts:
        for launcher in launchers:
            if launcher == "deepspeed" and (reason := TwoHosts.ssh_refusal()):
                yield launcher, "all", "-", 0.0, [f"not tried: {reason}"]
                continue
            for name in names:
                place, began = folder / f"{launcher}_{name.replace(' ', '_')}", time.monotonic()
                if name in faults.FAULTS:
                    case = faults.Case(hosts, tiny, place)
                    ended, wrong = faults.tried(faults.FAULTS[name], launcher, case, start_seconds=2 * alone)
                    yield launcher, name, ended.code, ended.seconds or float("nan"), wrong
                elif name == HEALTHY:
                    wrong = healthy.shared(hosts, launcher, tiny, place, one)
                    yield launcher, f"{name}, gone on with, exported", "-", time.monotonic() - began, wrong
                else:
                    wrong = healthy.separate(hosts, launcher, tiny, folder / "own", place)
                    yield launcher, name, "-", time.monotonic() - began, wrong


if __name__ == "__main__":
    sys.exit(main())
