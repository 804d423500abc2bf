"""scripts/environment.sh: what it has pip install, with a stand-in for Python that notes pip's words."""

import subprocess
from pathlib import Path

import pytest

from scripts.harness import ROOT

PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") shift 2 && echo "$@" >> "{noted}" ;;
"-m engine.zero.gpu_support") echo 0 ;;
esac
"""


def installed(folder: Path, **settings: str) -> tuple[list[str], str]:
    """Each call of pip, and which torch is pinned in it."""
    noted = folder / "noted"
    (folder / "python").write_text(PYTHON.format(noted=noted))
    (folder / "python").chmod(0o755)
    environment = {
        "PATH": "/usr/bin:/bin",
        "CXX": "c++",
        "PYTHON": str(folder / "python"),
        "VENV": str(folder / "venv"),
    }
    words = ["bash", "-c", "set -euo pipefail; source scripts/environment.sh"]
    ended = subprocess.run(words, env=environment | settings, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    pinned = (folder / "venv" / "constraints.txt").read_text().splitlines()
    (torch,) = [line for line in pinned if line.startswith("torch==")]
    return noted.read_text().splitlines(), torch


@pytest.mark.parametrize("asked, pinned", [({}, "torch==2.13.0"), ({"TORCH": "2.10.0"}, "torch==2.10.0")])
def test_the_torch_that_is_asked_for(asked, pinned, tmp_path):
    (call,), torch = installed(tmp_path, **asked)
    assert torch == pinned and call.endswith(f"-c {tmp_path}/venv/constraints.txt -e {ROOT}[dev]")


def test_another_index_stands_beside_pypi(tmp_path):
    """What torch needs is pinned in versions that only PyPI has."""
    (first, second), _ = installed(tmp_path, TORCH_INDEX="https://index/cu126")
    assert first.endswith("--upgrade torch --extra-index-url https://index/cu126")
    assert " --index-url" not in first and second.endswith(f"-e {ROOT}[dev]")
