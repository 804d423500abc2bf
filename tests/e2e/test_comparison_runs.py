"""What a comparison that was cut off left, and one that goes on makes of it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.comparison.entries import Entry
from scripts.comparison.runs import POLICIES, Run, keep_policies
from scripts.comparison.tasks import TASKS


def test_what_a_cut_off_comparison_left_of_a_policy_is_none(tmp_path):
    run = Run(TASKS["quickstart"], Entry.parsed("default"), tmp_path / "models", tmp_path, 1e-3, 1)
    for name in ("step_000001", "step_000002.4321.partial"):
        (run.folder / POLICIES / name).mkdir(parents=True)
    keep_policies(run)
    assert [path.name for path in (run.folder / POLICIES).iterdir()] == ["step_000001"]


COMPARISON = """
import sys
from pathlib import Path
from scripts.comparison import runs
with runs.ended_with_us():
    runs.run_program([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"],
                          Path(sys.argv[1]))
"""


def test_what_it_runs_ends_with_it(tmp_path):
    log = tmp_path / "log.txt"
    process = subprocess.Popen([sys.executable, "-c", COMPARISON, str(log)], cwd=Path(__file__).parents[2])
    until = time.monotonic() + 120
    while not (log.is_file() and log.read_text().endswith("\n")):
        assert time.monotonic() < until, "the program has not begun"
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 128 + signal.SIGTERM
    status = Path(f"/proc/{int(log.read_text())}/status")
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < until, "the program still runs"
        time.sleep(0.1)
