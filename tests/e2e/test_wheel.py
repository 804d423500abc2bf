"""The wheel: built from a copy of the checkout, without a network, it holds what the programs need, and no more."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from scripts.harness import ROOT
from scripts.harness.programs import command_line

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
CACHES = shutil.ignore_patterns("__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel's files, unpacked."""
    copy, built = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
    for name in ("engine", "training", "configs", "docs", "tests", "scripts"):
        shutil.copytree(ROOT / name, copy / name, ignore=CACHES)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    done = subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = built.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(built / "site")
    return built / "site"


def test_it_holds_the_packages_and_the_engines_configurations(wheel):
    expected = {path.relative_to(ROOT) for name in ("engine", "training") for path in (ROOT / name).rglob("*.py")}
    configs = sorted((ROOT / "configs" / "ds").glob("*.json"))
    expected |= {Path("engine/zero/configs", path.name) for path in configs}
    expected |= {Path("training/config/pages", path.name) for path in (ROOT / "docs").glob("from_*.md")}
    for pattern in ("pages/*.css", "pages/*.js", "serve/*.html"):
        expected |= {path.relative_to(ROOT) for path in (ROOT / "training").glob(pattern)}
    found = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    assert {path for path in found if not path.parts[0].endswith(".dist-info")} == expected
    for path in configs:
        assert (wheel / "engine/zero/configs" / path.name).read_bytes() == path.read_bytes()


def test_it_says_what_it_is(wheel):
    (info,) = wheel.glob("*.dist-info")
    metadata = message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    extras = {"wandb", "math", "serve", "v100", "vllm", "vllm-cpu", "test", "lint", "dev"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    required = metadata.get_all("Requires-Dist")
    assert any(line.startswith("deepspeed") and "extra" not in line for line in required)
    assert any(line.startswith("wandb") and "extra" in line for line in required)


def test_step_3_tries_itself_from_another_folder(wheel, tiny, tmp_path):
    flags = tiny.flags(3, output_dir=tmp_path / "out", actor_zero_stage=3, offload=True, critic_zero_stage=2)
    done = subprocess.run(
        [sys.executable, "-m", "training.step3_rlhf", *command_line(flags), "--dry_run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(wheel / "training" / "step3_rlhf.py") in done.stdout, "the checkout ran, and not the wheel"
    assert not (tmp_path / "out").exists()
    actor = done.stdout.partition("engine actor: ")[2].partition("\nengine ")[0]
    shipped = json.loads((ROOT / "configs" / "ds" / "zero3_offload.json").read_text())
    assert json.loads(actor)["zero_optimization"] == shipped["zero_optimization"]
