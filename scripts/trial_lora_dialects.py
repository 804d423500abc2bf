"""Every dialect with adapters alone, on two trunks and on one: two steps each of tiny models, two ranks, stage 3, CPUs.

    python scripts/trial_lora_dialects.py               all dialects, about a minute on two cores
    python scripts/trial_lora_dialects.py trlx openai   these

Both ways compute the same, to rounding: a row has the KL to the reference after the first step, by either way, and by
how much the metric differs that differs most, relative to the larger of it and 0.1. CI tests two of them
(tests/distributed/test_lora_systems.py).
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

TIMEOUT = 3600  # seconds


def main(dialects: list[str]) -> int:
    """Run and print; returns how many dialects learn otherwise on one trunk."""
    from engine.algorithms import DIALECTS
    from tests.distributed.harness import run_ranks
    from tests.distributed.test_lora_systems import MOST_OFF, WAYS, difference, make_models, runs_of

    chosen = dialects or list(DIALECTS)
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        runs = runs_of(chosen, folder)
        found, *_ = run_ranks("tests.distributed.work_lora_systems:all_runs", timeout=TIMEOUT, runs=runs)
    print(f"{'':22}" + "".join(f"{way:>14}" for way in WAYS) + f"{'differ':>12}")
    off = 0
    for dialect in chosen:
        two, one = (found[f"{dialect}, {way}"] for way in WAYS)
        most = difference(two, one)
        off += most > MOST_OFF
        print(f"{dialect:22}" + "".join(f"{steps[-1]['objective/kl']:14.6f}" for steps in (two, one)) + f"{most:12.1e}")
    return off


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
