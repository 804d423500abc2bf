"""Kills a run on two ranks at ZeRO-3 at random instants, goes on with --resume auto, and compares the ends.

    python scripts/trial_kills.py --kills 20 --seed 0
    python scripts/trial_kills.py --kills 7 --lora trunk    # one trunk for all four models

Weights, held-out samples and metrics (time and memory aside) have to be to the last bit those of a run that nothing
happened to. Exit code 1 if any are not.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project

from scripts.harness.kills import KillTrial, flags_of_lora, random_instants
from scripts.harness.programs import Tiny


def main() -> int:
    """Kill, compare, print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="how many (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which instants (default: 0)")
    parser.add_argument("--steps", type=int, default=4, help="of the run (default: 4)")
    parser.add_argument(
        "--lora",
        default="none",
        choices=("none", "pairs", "trunk"),
        help="whole models, LoRA in actor and critic, or in one trunk for all four (default: none)",
    )
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"  # tokenised data
        tiny = Tiny(Path(folder) / "tiny")
        flags = flags_of_lora(tiny, options.lora)
        trial = KillTrial(tiny, Path(folder) / "runs", options.steps, **flags)
        print("| kill | after | in the middle of | gone on from | identical |\n| --- | --- | --- | --- | --- |")
        for number, instant in enumerate(random_instants(options.kills, options.steps, options.seed), start=1):
            outcome = trial.kill(instant, f"run_{number:02d}")
            failed += bool(outcome.different)
            verdict = "yes" if not outcome.different else f"NO: {', '.join(outcome.different)}"
            print(
                f"| {number} | {outcome.seconds:.2f} s | {outcome.phase} | {outcome.resumed} | {verdict} |", flush=True
            )
    print(f"\n{options.kills - failed} of {options.kills} identical")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
