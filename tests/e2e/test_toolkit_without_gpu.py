"""A machine with the CUDA toolkit and no GPU, as login nodes are: torch warns of it, and the programs stay quiet.

The toolkit is a stand-in `nvcc`, first on the PATH; that torch was built for CUDA and finds no GPU is a stand-in, too.
"""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.harness.programs import command_line, start_words
from training.runtime.launch import quiet_libraries

TORCH_FOR_CUDA = """
import sys, torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: sys._getframe(1).f_globals["__name__"] == "torch.utils.cpp_extension"
torch.cuda.is_available = lambda: False
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Path:
    """The stand-in toolkit's folder; every process that is started from now on finds it."""
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(TORCH_FOR_CUDA)
    monkeypatch.setenv("PATH", f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return nvcc.parents[1]


def test_torch_warns_there(toolkit):
    """Otherwise the next test would show nothing."""
    words = [sys.executable, "-c", "import torch.utils.cpp_extension"]
    warned = subprocess.run(words, capture_output=True, text=True, check=True).stderr
    assert f"No CUDA runtime is found, using CUDA_HOME='{toolkit}'" in warned


def test_a_program_says_nothing_but_the_mistake(toolkit, tiny, tmp_path):
    absent = tmp_path / "absent.jsonl"
    result = start_words(2, command_line(tiny.flags(2, output_dir=tmp_path / "out", data_path=absent)))
    assert result.code == 2, result.stdout + result.stderr
    assert result.stderr.startswith(f"error: {absent}: cannot be read") and result.stderr.count("\n") == 1, (
        result.stderr
    )


def test_other_warnings_of_torchs_builds_are_heard():
    quiet_libraries()
    logger, heard = logging.getLogger("torch.utils.cpp_extension"), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logger.addHandler(handler)
    try:
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
        logger.warning("Your compiler (%s) may be ABI-incompatible with PyTorch!", "cc")
    finally:
        logger.removeHandler(handler)
    assert heard == ["Your compiler (cc) may be ABI-incompatible with PyTorch!"]
