"""The plan of memory against what a run's tensors take, counted, by phase.

    python scripts/measure_memory.py               twelve combinations of stage, ranks, adapters, dtype and so on
    python scripts/measure_memory.py "stage 3"     those with this text in their names
    python scripts/measure_memory.py --ways 34m    one task in four ways: what adapters and shared trunks save

Runs on CPUs, where device and host are one memory; models have random weights. Bytes of storages are counted, each
once, at every operation: the figures are peaks in MB, of the first rank.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

PHASES = ("load", "generate", "experience", "train", "save")


def main(words: list[str]) -> int:
    """Count and print; returns how many figures are more than 10 % off."""
    from tests.distributed.memory_cases import CASES, ways

    with tempfile.TemporaryDirectory() as folder:
        if words[:1] == ["--ways"]:
            for size in words[1:] or ["34m", "136m"]:
                print_ways(ways(size), Path(folder))
            return 0
        print(f"{'':24}" + "".join(f"{phase:>22}" for phase in PHASES), flush=True)
        chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
        return sum(compared(case, Path(folder)) for case in chosen)


def compared(case, folder: Path) -> int:
    """Print planned / counted MB of each phase, and by how much they differ; returns how many differ by over 10 %."""
    planned, counted, _ = measured(case, folder)
    line, off = f"{case.name:24}", 0
    for phase in PHASES:
        difference = planned[phase] / counted[phase] - 1
        off += abs(difference) > 0.1
        line += f"{planned[phase] / 1e6:7.0f}/{counted[phase] / 1e6:6.0f} {difference:+7.1%}"
    print(line, flush=True)
    return off


def print_ways(cases, folder: Path) -> None:
    """Print what is held between two steps, and the peak of each phase, counted, of the same task in several ways."""
    print(f"{cases[0].size:32}{'rest':>8}" + "".join(f"{phase:>12}" for phase in PHASES), flush=True)
    for case in cases:
        _, counted, rest = measured(case, folder)
        print(
            f"{case.name:32}{rest / 1e6:8.0f}" + "".join(f"{counted[phase] / 1e6:12.0f}" for phase in PHASES),
            flush=True,
        )


def measured(case, folder: Path) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of the first rank by phase: planned, and counted; and those that are held between two steps."""
    from tests.distributed.harness import run_ranks

    actor, critic = case.models(folder)
    planned = case.planned(actor, critic)
    counted = run_ranks(
        "tests.distributed.work_memory:counted", world=case.world, timeout=1200, case=case, actor=actor, critic=critic
    )[0]
    return {phase: planned.of_main_rank(phase) for phase in PHASES}, counted, counted["between"]


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
