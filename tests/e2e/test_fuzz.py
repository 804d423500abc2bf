"""A part of scripts/fuzz_inputs.py; the whole takes minutes."""

import subprocess
import sys

import pytest

from scripts.harness import ROOT


@pytest.mark.slow
def test_inputs_that_are_changed_at_random_get_one_message_or_do_no_harm():
    command = [sys.executable, ROOT / "scripts/fuzz_inputs.py", "--count", "40", "--seed", "1", "--started", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("40 inputs in ")
