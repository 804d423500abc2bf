"""Changes valid inputs at random and runs the programs on them: each has to end with one message, or to succeed.

    python scripts/fuzz_inputs.py --count 500 --seed 0
    python scripts/fuzz_inputs.py --only 137 --seed 0        # that case alone, with all that it prints

Changed are flags, YAML, data files, DeepSpeed JSON, model folders and restart points. A message is one line on stderr
that begins with `error: `, with exit code 2; in the output folder nothing may be made or changed, and no case may take
longer than --seconds. Cases run in forks of a process that has everything imported: as dry runs, or, where models are
to be loaded, up to the first step. The last --started of them run by the real command line, to the end.

Exit code 1 if any case ended otherwise; they are listed.
"""

import argparse
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed
MEMORY = 16 * 2**30  # bytes of addresses that a case may take beside what is imported


def main() -> int:
    """Try the cases, print what failed; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500, help="cases (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--started", type=int, default=24, help="of them by the real command line (default: 24)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for a case in a fork (default: 120)")
    parser.add_argument("--only", type=int, help="this case alone")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}  # before torch is imported
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")  # tokenised data
        (root / "here").mkdir()
        os.chdir(root / "here")  # relative names begin there
        return fuzz(root, options)


def fuzz(root: Path, options: argparse.Namespace) -> int:
    """Make the inputs and try the cases; returns the exit code."""
    from transformers.utils import logging

    from tests.e2e.fuzz_cases import FuzzInputs
    from tests.e2e.programs import Tiny, snapshot

    logging.disable_progress_bar()
    inputs = FuzzInputs(root, Tiny(root / "tiny"))
    before, started = snapshot(root / "tiny"), time.monotonic()
    failed, ends = [], Counter()
    unchanged = range(len(inputs.kinds) + 1) if options.only is None else []
    numbers = range(options.count) if options.only is None else [options.only]
    for number, change in [*((number, False) for number in unchanged), *((number, True) for number in numbers)]:
        case = inputs.case(options.seed, number, change)
        by_command = options.only is None and number >= options.count - options.started and change
        result, problem = try_case(case, by_command, options.seconds)
        if not change and problem is None and result.code != 0:
            problem = f"was refused before anything in it was changed: {result.stderr[-300:]!r}"
        ends[case.kind, "failed" if problem else "refused" if result.code else "harmless"] += change
        if problem:
            failed.append(number)
            print(f"FAILED {number} {case}\n    {problem}", flush=True)
        if options.only is not None and result:
            print(case, " ".join(case.words), result.stdout, result.stderr, f"exit code {result.code}", sep="\n")
    if snapshot(root / "tiny") != before:
        failed.append(-1)
        print("FAILED: models or data were changed")
    report(ends, time.monotonic() - started)
    return 1 if failed else 0


def try_case(case, by_command: bool, seconds: float) -> tuple:
    """(the Result or None, what is wrong with it or None)."""
    from tests.e2e.programs import start_words

    try:
        result = start_words(case.step, case.words) if by_command else run_forked(case, seconds)
    except TimeoutError:
        return None, "it did not end"
    return result, case.problem(result)


def run_forked(case, seconds: float):
    """The Result of the case in a fork of this process; raises TimeoutError."""
    from tests.e2e.programs import Result

    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.setsid()
            for number, stream in ((1, stdout), (2, stderr)):
                os.dup2(stream.fileno(), number)
            _in_child(case)
        end = time.monotonic() + seconds
        while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
            time.sleep(0.02)
        if found[0] == 0:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise TimeoutError
        for stream in (stdout, stderr):
            stream.seek(0)
        texts = [stream.read().decode(errors="backslashreplace") for stream in (stdout, stderr)]
        return Result(os.waitstatus_to_exitcode(found[1]), *texts)


def _in_child(case) -> None:
    """Run the program; where models are loaded, up to the first step."""
    from tests.e2e.programs import run_words
    from training.supervised import SupervisedTrainer

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    code = 1
    try:
        with mock.patch("training.step3_rlhf.train", _loaded), mock.patch.object(SupervisedTrainer, "fit", _loaded):
            code = run_words(case.step, case.words)
    except BaseException as error:  # what Python would do with it, were it a process of its own
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _loaded(*_) -> None:
    """In place of the training: all was read, and nothing found wrong."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def report(ends: Counter, seconds: float) -> None:
    """Print how the cases of each kind ended."""
    ways = ("refused", "harmless", "failed")
    print(f"\n{'kind':16}" + "".join(f"{way:>10}" for way in ways))
    for kind in dict.fromkeys(kind for kind, _ in ends):
        print(f"{kind:16}" + "".join(f"{ends[kind, way]:10}" for way in ways))
    total = {way: sum(count for (_, end), count in ends.items() if end == way) for way in ways}
    print(f"{'all':16}" + "".join(f"{total[way]:10}" for way in ways))
    print(
        f"{sum(total.values())} inputs in {seconds:.0f} s: {total['refused']} ended with one message and exit code 2, "
        f"{total['harmless']} changes were harmless, {total['failed']} ended otherwise"
    )


if __name__ == "__main__":
    sys.exit(main())
