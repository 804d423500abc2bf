"""Every family of models in bf16 and fp16, by --rollout_backend auto and zero3: two steps, resumed, saved, on two CPUs.

    python scripts/trial_families.py                          all, about a quarter of an hour on two cores
    python scripts/trial_families.py llama gpt2 --dtype fp16  these

Tiny models with random weights (tests/tiny_families.py), all four engines at ZeRO stage 3 with every parameter
partitioned, two ranks. A line for each family, dtype and backend has

    finite      whether all metrics of both steps are numbers, no step was skipped and weights have changed
    resumed     whether the second step is the same, bit by bit, when it is gone on with from a restart point behind the
                first: its metrics, master weights, and weights
    weights     whether transformers, which knows nothing of this project, finds in the saved actor and critic the very
                weights that were trained
    log-probs   by how much those of transformers' model differ at most from the trained actor's, on rows with padding
    values      the same of the critic's

The last two are rounding; MOST_OFF has what is too much. fp16's loss scale begins at 2**8, so that the first steps are
none that only look for it. Exit code 1 where something is otherwise.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for tests/, which is not installed

DTYPES, WAYS = ("bf16", "fp16"), ("auto", "zero3")
MOST_OFF = {"fp32": 1e-4, "fp16": 0.05, "bf16": 0.4}  # of a log-prob or a value, which are about 1 to 10
HEADER = "| family | dtype | backend | finite | resumed | weights | log-probs | values |"


def trial(family: str, dtype: str, ways: list[str], timeout: float) -> dict[str, dict | str]:
    """By backend what the ranks found, or the last line of what stopped them."""
    from tests.distributed.conftest import write_stage_files
    from tests.distributed.harness import run_ranks
    from tests.tiny_families import make_family

    found: dict[str, dict | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_family(family, Path(folder))
        write_stage_files(Path(folder))
        for chosen in (ways, *([way] for way in ways)):  # where one fails, each alone
            if found.keys() >= set(chosen) or any(isinstance(found.get(way), dict) for way in ways if way in chosen):
                continue
            try:
                ranks = run_ranks(
                    "tests.distributed.work_family_trial:trial",
                    timeout=timeout,
                    folder=folder,
                    output=str(Path(folder) / "-".join(chosen)),
                    dtype=dtype,
                    ways=chosen,
                )
                found |= {way: agreed([rank[way] for rank in ranks]) for way in chosen}
            except RuntimeError as error:
                if len(chosen) == 1:
                    print(error, file=sys.stderr)
                    found[chosen[0]] = str(error).strip().splitlines()[-1]
    return found


def agreed(ranks: list[dict]) -> dict:
    """One finding of all ranks': what is true on all, gaps of the rank that is furthest off."""
    gaps = {name: max(rank["saved"][name] for rank in ranks) for name in ranks[0]["saved"]}
    return {
        "finite": all(rank["finite"] and rank["moved"] and not rank["skipped"] for rank in ranks),
        "resumed": all(rank["resumed"] for rank in ranks),
        "weights": gaps["weights"] == 0,
        "logprobs": gaps["logprobs"],
        "values": gaps["values"],
    }


def is_right(found: dict | str, dtype: str) -> bool:
    """Whether everything is as it should be."""
    if isinstance(found, str):
        return False
    far = max(found["logprobs"], found["values"]) > MOST_OFF[dtype]
    return found["finite"] and found["resumed"] and found["weights"] and not far


def line(family: str, dtype: str, way: str, found: dict | str) -> str:
    """A row of the table."""
    if isinstance(found, str):
        return f"| {family} | {dtype} | {way} | failed: {found} | | | | |"
    words = ["yes" if found[name] else "NO" for name in ("finite", "resumed", "weights")]
    words += [f"{found[name]:.1e}" for name in ("logprobs", "values")]
    return f"| {family} | {dtype} | {way} | {' | '.join(words)} |"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from transformers.utils import logging

    from tests.tiny_families import FAMILIES

    logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"by default all: {', '.join(FAMILIES)}")
    parser.add_argument("--dtype", nargs="+", choices=("fp32", *DTYPES), default=DTYPES)
    parser.add_argument("--backend", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for both backends of one family")
    options = parser.parse_args(arguments)
    if unknown := set(options.families) - FAMILIES.keys():
        parser.error(f"no families that are tried here: {', '.join(sorted(unknown))}")
    print(f"{HEADER}\n{'| --- ' * 8}|", flush=True)
    verdicts = []
    for family in options.families or FAMILIES:
        for dtype in options.dtype:
            for way, found in trial(family, dtype, list(options.backend), options.timeout).items():
                print(line(family, dtype, way, found), flush=True)
                verdicts.append(is_right(found, dtype))
    print(f"\n{sum(verdicts)} of {len(verdicts)} are right")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
