"""A process goes on, and ends with its own exit code, where what it prints cannot be written."""

import os
import subprocess
import sys

import pytest

from scripts.harness import ROOT

PRINTS = """
import sys
from training.program.terminal import flush_all, keep_printing
keep_printing()
for number in range(1000):
    print("x" * 100, flush=number % 2 == 0)
    print("y" * 100, file=sys.stderr)
open(sys.argv[1], "w").write("went on")
flush_all(0)
sys.exit(0)
"""


def end_of(tmp_path, **streams) -> int:
    command = [sys.executable, "-c", PRINTS, str(tmp_path / "result")]
    return subprocess.run(command, cwd=ROOT, timeout=120, check=False, **streams).returncode


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("place", ["a full disk", "a pipe that nobody reads"])
def test_what_cannot_be_printed_is_lost(tmp_path, name, place):
    other = {"stdout": "stderr", "stderr": "stdout"}[name]
    if place == "a full disk":
        writing = os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        os.close(reading)
    try:
        assert end_of(tmp_path, **{name: writing, other: subprocess.DEVNULL}) == 0
    finally:
        os.close(writing)
    assert (tmp_path / "result").read_text() == "went on"


def test_streams_that_were_closed_before(tmp_path):
    script = f'exec "{sys.executable}" -c "$0" "$1" >&- 2>&-'
    command = ["sh", "-c", script, PRINTS, str(tmp_path / "result")]
    assert subprocess.run(command, cwd=ROOT, timeout=120, check=False).returncode == 0
    assert (tmp_path / "result").read_text() == "went on"
