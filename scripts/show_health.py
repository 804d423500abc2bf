"""The summary and health report of runs of step 3, finished or not; or of made-up runs that have one illness each.

python scripts/show_health.py out/ppo
python scripts/show_health.py            # the made-up ones
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for tests/, which is not installed

from engine.errors import UserError
from tests.training.reporting.made_runs import RUNS, made_run
from training.reporting.metrics_file import METRICS_FILE, read_metrics
from training.reporting.summary import RunSummary, summary_text


def main() -> int:
    """Print each run's name and summary; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="output folders of step 3")
    folders = parser.parse_args().folders
    try:
        runs = {str(folder): read_metrics(folder / METRICS_FILE) for folder in folders}
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, rows in (runs or {name: made_run(name) for name in RUNS}).items():
        print(f"== {name}\n\n{summary_text(RunSummary.from_metrics(rows))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
