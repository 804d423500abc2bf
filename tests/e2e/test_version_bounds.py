"""scripts/test_versions.sh installs the bounds of setup.py, one for each package, with a stand-in of Python."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "{log}"
case "$*" in
    "-m venv"*) mkdir -p "{venv}/bin" && cp "$0" "{venv}/bin/python" ;;
    *gpu_support*) echo 0 ;;
    *"pip list"*) echo "torch  2.9.0" ;;
esac
"""


@pytest.mark.parametrize("which", ["lowest", "newest"])
def test_one_bound_for_each_package_is_installed(which, tmp_path):
    log, venv, python = tmp_path / "log", tmp_path / "venv", tmp_path / "stand_in"
    python.write_text(STAND_IN.format(log=log, venv=venv))
    python.chmod(0o755)
    subprocess.run(
        ["bash", ROOT / "scripts" / "test_versions.sh", which, "-k", "some"],
        env=os.environ | {"PYTHON": str(python), "VENV": str(venv)},
        check=True,
    )
    lines = log.read_text().splitlines()
    installed = next(line for line in lines if " pip install " in line)
    bounds = re.findall(r"\b(torch|deepspeed|transformers)([=<>]\S+)", installed)
    required = dict(
        re.findall(r'^        "(torch|deepspeed|transformers)(>=[^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)
    )
    assert len(required) == 3
    if which == "lowest":
        required = {name: "==" + re.match(r">=([\d.]+)", bound)[1] for name, bound in required.items()}
    assert sorted(bounds) == sorted(required.items())
    assert lines[-1] == "-m pytest -k some"
