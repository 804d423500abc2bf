"""Tries hundreds of mistakes on the three programs: each has to end with one message and exit code 2.

    python scripts/check_bad_input.py --count 300 --seed 0

A message is one line on stderr that begins with `error: `; nothing may stand in the output folder that did not stand
there before; and a program that does not end is stopped. Most cases run one after the other in a process that is kept
(imports take seconds), some by `python` and some by `deepspeed --num_gpus 2` (--started, --launched).

Exit code 1 if any mistake ended otherwise; they are listed.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project
os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported

from transformers.utils import logging

from engine.zero.communication import init
from scripts.harness.bad_world import BadWorld
from scripts.harness.mistakes import Case, cases
from scripts.harness.programs import Result, Tiny, launch_words, run_caught, snapshot, start_words

SECONDS = 60.0  # for one case in the process that is kept


def main() -> int:
    """Try the cases, print what failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="cases (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--started", type=int, default=3, help="of them in a process of their own (default: 3)")
    parser.add_argument("--launched", type=int, default=2, help="of them by DeepSpeed's launcher (default: 2)")
    options = parser.parse_args()
    logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # tokenised data
        (root / "here").mkdir()
        os.chdir(root / "here")  # relative names begin there
        world = BadWorld(root / "bad", Tiny(root / "tiny"))
        tried = cases(world, options.count, options.seed)
        before = snapshot(root / "tiny"), snapshot(root / "bad")
        failed, ways = [], Counter()
        with Worker() as worker:
            for number, case in enumerate(tried):
                way = (
                    "launched"
                    if number < options.launched
                    else "started"
                    if number < options.launched + options.started
                    else "in the process that is kept"
                )
                ways[way] += 1
                problem = try_case(case, root / "out", way, worker)
                if problem:
                    failed.append((case, problem))
                    print(f"FAILED {case}\n    {problem}", flush=True)
        if (snapshot(root / "tiny"), snapshot(root / "bad")) != before:
            failed.append((None, "models or data were changed"))
            print(f"FAILED {failed[-1][1]}")
    report(tried, failed, ways)
    return 1 if failed else 0


def try_case(case: Case, output_dir: Path, way: str, worker: "Worker") -> str | None:
    """Run the case; returns what is wrong with how it ended, or None."""
    words = case.words(output_dir)
    try:
        result = {"launched": launch_words, "started": start_words}.get(way, worker.run)(case.step, words)
    except TimeoutError:
        return "it did not end"
    return case.problem(result, output_dir)


def report(tried: list, failed: list, ways: Counter) -> None:
    """Print a table of kinds and a summary."""
    kinds = Counter(case.mistake.kind for case in tried)
    bad = Counter(case.mistake.kind for case, _ in failed if case is not None)
    print(f"\n{'kind':24} {'tried':>6} {'failed':>6}")
    for kind, count in kinds.items():
        print(f"{kind:24} {count:6} {bad[kind]:6}")
    print(
        f"{len(tried)} mistakes tried ({', '.join(f'{count} {way}' for way, count in ways.items())}): "
        f"{len(failed)} ended otherwise than with one message and exit code 2"
    )


class Worker:
    """A process that runs one case after the other, and is replaced when one does not end."""

    def __init__(self):
        self.context = multiprocessing.get_context("spawn")
        self.process = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        if self.process is not None:
            self.pipe.close()  # which ends it
            self.process.join(10)
            self.process.kill()

    def run(self, step: int, words: list[str]) -> Result:
        """The Result of the program with these words; raises TimeoutError."""
        if self.process is None:
            self.pipe, other = self.context.Pipe()
            self.process = self.context.Process(target=_serve, args=(other,), daemon=True)
            self.process.start()
            other.close()
            assert self.pipe.recv() == "ready"
        self.pipe.send((step, words))
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
        except EOFError:
            pass  # the program has ended the process itself
        self.process.kill()
        self.process = None
        raise TimeoutError


def _serve(pipe) -> None:
    """Run what comes through the pipe, with stdout and stderr caught, whoever writes to them."""
    init()
    pipe.send("ready")
    while True:
        try:
            step, words = pipe.recv()
        except EOFError:
            return
        pipe.send(run_caught(step, words))


if __name__ == "__main__":
    sys.exit(main())
