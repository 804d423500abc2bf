"""Every dialect in fp16 (or bf16) beside fp32, with all weights and with adapters: two steps each of tiny models.

    python scripts/trial_halves.py                                all dialects in fp16, some minutes on two cores
    python scripts/trial_halves.py trlx openai --dtype fp16 bf16  these

Two ranks, ZeRO stage 3, CPUs. All dtypes learn from the responses that fp32 drew, and nothing in an update jumps
(Adam's epsilon is far over the gradients, what is clipped is far out), so that they differ by rounding only.
For each dialect and way (all weights; adapters alone on two trunks; adapters on one trunk that is all models) a row has
the KL to the reference at the second step, nats a response, by fp32 and by the dtype: the first that updates have
moved; by how much losses, gradient norms and this KL differ at most in both steps, relative to the larger of the
metric and 0.1 (of the KL 0.31); and in how many of the optimizer steps gradients overflowed with the loss scale that is
shipped, 2**16, of the actor and of the critic: when one does, both keep their weights. Compared are runs that begin
with 2**8.

Exit code 1 where something differs by more than MOST_OFF.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

TIMEOUT = 3600  # seconds
MOST_OFF = {"fp16": 0.05, "bf16": 0.4}
EXACT = {"fp32": ("fp32", "stage3.json")}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    from transformers.utils import logging

    from engine.algorithms import DIALECTS
    from tests.distributed.halves import COMPARED, WAYS, differences, make_models, words_of
    from tests.distributed.harness import run_ranks

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dialects", nargs="*", metavar="DIALECT", help=f"by default all: {', '.join(DIALECTS)}")
    parser.add_argument("--dtype", nargs="+", choices=tuple(MOST_OFF), default=["fp16"])
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(arguments)
    if unknown := set(options.dialects) - DIALECTS.keys():
        parser.error(f"no dialects: {', '.join(sorted(unknown))}")
    logging.disable_progress_bar()
    variants = EXACT | {dtype: (dtype, "stage3.json") for dtype in options.dtype}
    if "fp16" in options.dtype:
        variants |= {"shipped": ("fp16", "shipped.json")}
    print("| dialect | way | dtype | KL, fp32 | KL | " + " | ".join(COMPARED) + " | overflows |")
    print("| --- " * (len(COMPARED) + 6) + "|", flush=True)
    off = 0
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for dialect in options.dialects or DIALECTS:
            runs = {way: words_of(dialect, way, folder) for way in options.way}
            found, *_ = run_ranks(
                "tests.distributed.work_halves:all_runs", timeout=TIMEOUT, runs=runs, variants=variants
            )
            for way, by_variant in found.items():
                for dtype in options.dtype:
                    gaps = differences(by_variant["fp32"], by_variant[dtype])
                    off += max(gaps.values()) > MOST_OFF[dtype]
                    print(line(dialect, way, dtype, by_variant, gaps), flush=True)
    return int(off > 0)


def line(dialect: str, way: str, dtype: str, by_variant: dict, gaps: dict[str, float]) -> str:
    """A row of the table."""
    from engine.algorithms import DIALECTS
    from tests.distributed.halves import COMPARED, EPOCHS, SETTINGS, skipped

    cells = [f"{by_variant[name][-1]['objective/kl']:.4f}" for name in ("fp32", dtype)]
    cells += [f"{gaps[name]:.1e}" if name in gaps else "-" for name in COMPARED]
    if dtype == "fp16":
        chosen = dict(setting.split("=") for setting in SETTINGS.get(dialect, []))
        updates = EPOCHS * int(chosen.get("mini_batches", DIALECTS[dialect].mini_batches))
        steps = by_variant["shipped"]
        counts = [str(count) for count in skipped(steps, updates).values()]
        cells.append(f"{' + '.join(counts)} of {updates * len(steps)}")
    else:
        cells.append("-")
    return f"| `{dialect}` | {way} | {dtype} | {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
