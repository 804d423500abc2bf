"""A report of one run, or of several side by side, as one HTML file that needs no other file.

    four-engine-rlhf report out/ppo                                    # writes out/ppo/report.html
    four-engine-rlhf report out/ppo out/other --output both.html

It reads metrics.jsonl, samples/ and run.json. The run may have failed, or may still go on. An existing file is only
replaced with --overwrite.
"""

import argparse
import sys
from pathlib import Path

from engine.errors import UserError
from training.runtime.environment import program

PAGE = "report.html"


@program
def main(arguments: list[str] | None = None) -> int:
    """Write the report that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="four-engine-rlhf report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders of step 1, 2 or 3")
    parser.add_argument("--output", type=Path, help=f"file to write; by default {PAGE} in the folder of a single run")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    args = parser.parse_args(arguments)
    from engine.atomic_files import write_whole  # these imports take seconds; a mistyped command line is reported first
    from training.tools.report.page import page, read_runs

    try:
        output = _output(args)
        made = page(read_runs(args.runs))
        write_whole(output, made)
    except OSError as error:
        raise UserError(f"{error.filename or args.output}: {error.strerror or error}") from None
    print(f"{output}: {len(made.encode()) / 1e6:.2f} MB")
    return 0


def _output(args: argparse.Namespace) -> Path:
    """The file to write. Raises: UserError if several runs are given without --output, or if the file exists."""
    if args.output is None and len(args.runs) > 1:
        raise UserError(f"several runs have no folder in common. Give the file to write: --output {PAGE}.")
    output = args.output or args.runs[0] / PAGE
    if output.is_dir():
        raise UserError(f"--output {output}: is a folder. Give a file, {output / PAGE}.")
    if args.output and not output.parent.is_dir():
        raise UserError(f"--output {output}: there is no folder {output.parent}. Make it, or give another file.")
    if output.exists() and not args.overwrite:
        raise UserError(f"{output}: exists already. Give --overwrite to replace it, or another --output.")
    return output


if __name__ == "__main__":
    sys.exit(main())
