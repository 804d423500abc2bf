"""Has a run go on, from restart points, on other numbers of ranks and at other ZeRO stages, and compares.

    python scripts/change_layout.py                                    2 ranks at ZeRO-3, 1 at ZeRO-2, 3 at ZeRO-3
    python scripts/change_layout.py --layouts 1:0 2:1 2:3 --dtype bf16

At each change every number of the state that was loaded has to be that of the restart point, bit by bit, and the step
that is trained again has to draw the same responses, with losses within 1e-5 (in fp32; in 16 bits as they round). Tiny
models on the CPU. Exit code 1 if anything is not so.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
sys.path.insert(0, ROOT)  # for tests/, which is not installed
LIMIT = {"fp32": 1e-5, "bf16": 1e-1}


def main() -> int:
    """Run the layouts, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", nargs="+", default=["2:3", "1:2", "3:3"], metavar="RANKS:STAGE")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": ROOT}

    from tests.e2e.programs import Tiny
    from tests.e2e.relayouts import Layout, RelayoutTrial

    layouts = [Layout(*map(int, words.split(":"))) for words in options.layouts]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # tokenised data
        trial = RelayoutTrial(Tiny(Path(folder) / "tiny"), Path(folder) / "runs", options.dtype)
        print(
            "| from | to | state | bit by bit | the module's weights | losses apart | other responses |\n"
            "| --- | --- | --- | --- | --- | --- | --- |"
        )
        for change in trial.changes(layouts):
            print(
                f"| {change.before} | {change.after} | {change.tensors} tensors, {change.numbers} numbers | "
                f"{_verdict(change.different)} | {_verdict(change.modules)} | {change.losses:.1e} | "
                f"{change.other_responses} of 12 |",
                flush=True,
            )
            far = change.losses > LIMIT[options.dtype] or (options.dtype == "fp32" and change.other_responses)
            failed = failed or far or bool(change.different or change.modules)
    return int(failed)


def _verdict(different: list[str]) -> str:
    return "equal" if not different else f"NOT EQUAL: {', '.join(different[:3])}"


if __name__ == "__main__":
    sys.exit(main())
