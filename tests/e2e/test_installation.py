"""What is installed: the environment of scripts/environment.sh, versions, the wheel, and docs/library.md's example."""

import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.models.loading import new_scorer
from engine.models.saving import save_model
from scripts.harness import ROOT
from scripts.harness.programs import command_line
from scripts.harness.ranks import ForkedProgram
from scripts.harness.weights import full_state
from training.tools.toy import model as builtin_model
from training.tools.toy import reviews as builtin_reviews

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


STAND_IN = """#!/usr/bin/env bash
echo "$@" >> "{log}"
case "$*" in
    "-m venv"*) mkdir -p "{venv}/bin" && cp "$0" "{venv}/bin/python" ;;
    *gpu_support*) echo 0 ;;
    *"pip list"*) echo "torch  2.9.0" ;;
esac
"""


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
    folders = {"ds": "engine/zero/configs", "response_templates": "engine/rollout/response_templates"}
    configs = {path: Path(folders[path.parent.name], path.name) for path in (ROOT / "configs").glob("*/*.json")}
    expected |= {*configs.values()}
    expected |= {Path("training/config/pages", path.name) for path in (ROOT / "docs").glob("from_*.md")}
    for pattern in ("tools/pages/*.css", "tools/pages/*.js", "tools/serve/*.html"):
        expected |= {path.relative_to(ROOT) for path in (ROOT / "training").glob(pattern)}
    found = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    assert {path for path in found if not path.parts[0].endswith(".dist-info")} == expected
    for path, place in configs.items():
        assert (wheel / place).read_bytes() == path.read_bytes()


def test_it_says_what_it_is(wheel):
    (info,) = wheel.glob("*.dist-info")
    metadata = message_from_string((info / "METADATA").read_text(encoding="utf-8"))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert (info / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    extras = {"wandb", "math", "v100", "vllm", "vllm-cpu", "test", "lint", "dev"}
    assert set(metadata.get_all("Provides-Extra")) == extras
    required = metadata.get_all("Requires-Dist")
    assert any(line.startswith("deepspeed") and "extra" not in line for line in required)
    assert any(line.startswith("wandb") and "extra" in line for line in required)
    entries = (info / "entry_points.txt").read_text(encoding="utf-8")
    assert entries.splitlines()[1] == "four-engine-rlhf = training.commands:main"


def test_step_3_tries_itself_from_another_folder(wheel, tiny, tmp_path):
    flags = tiny.flags(3, output_dir=tmp_path / "out", actor_zero_stage=3, offload=True, critic_zero_stage=2)
    done = subprocess.run(
        [sys.executable, "-m", "training.commands", "ppo", *command_line(flags), "--dry_run"],
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


@pytest.fixture
def reviews(tmp_path, monkeypatch) -> Path:
    """The working folder: data/, sft/ and reward/ as the quickstart makes them, but tiny."""
    monkeypatch.chdir(tmp_path)
    sizes = ("--sft", "50", "--pairs", "20", "--prompts", "20", "--eval_prompts", "20")
    assert builtin_reviews.main(["make", "--output_dir", "data", *sizes]) == 0
    assert builtin_model.main(["--data", "data/sft.jsonl", "--output_dir", "sft", "--hidden_size", "32"]) == 0
    scorer = new_scorer("sft", torch.float32, pad_token_id=0, seed=0)
    save_model(scorer, full_state(scorer.model), AutoTokenizer.from_pretrained("sft"), "reward")
    return tmp_path


def example(page: str) -> str:
    """The first Python code of a page."""
    return re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL).group(1)


SAVED_WRONGLY = """
try:
    models.actor.module.model.save_pretrained("wrong")
except Exception as error:
    print("refused:", error)
"""


def test_the_librarys_page_saves_and_resumes_at_zero_3_on_two_ranks(reviews):
    """The page's script, with all weights partitioned. The run that goes on from step 2 ends as the one that made all
    steps, byte by byte; and its actor has learned."""
    config = json.loads((ROOT / "configs" / "ds" / "zero3.json").read_text())
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    Path("zero3.json").write_text(json.dumps(config))
    script = example("docs/library.md")
    assert len(script.splitlines()) <= 40
    script = re.sub(r'(EngineConfig\("\w+", 3)\)', r'\1, path="zero3.json")', script)
    Path("train.py").write_text(script + SAVED_WRONGLY)

    def run() -> list[str]:
        code = ForkedProgram("train.py", [], stdout=reviews / "stdout", stderr=reviews / "stderr").wait()
        assert code == 0, Path("stderr").read_text()
        return Path("stdout").read_text().splitlines()

    whole = run()
    Path("out").rename("straight")
    for step in (1, 2):
        shutil.copytree(f"straight/checkpoints/step_00000{step}", f"out/checkpoints/step_00000{step}")
    resumed = run()[len(whole) :]

    steps = [line for line in whole if re.match(r"\d [-\d.]+$", line)]
    assert sum(line.startswith("refused: state_dict(), which save_pretrained calls") for line in whole) == 2
    assert len(steps) == 4 and [line for line in resumed if line in steps] == steps[2:]
    assert resumed[0].endswith("out/checkpoints/step_000002, after step 2")
    files = {path.relative_to("straight") for path in Path("straight").rglob("*") if path.is_file()}
    assert files == {path.relative_to("out") for path in Path("out").rglob("*") if path.is_file()}
    assert [str(path) for path in files if not filecmp.cmp("straight" / path, "out" / path, shallow=False)] == []
    assert not filecmp.cmp("out/actor/model.safetensors", "sft/model.safetensors", shallow=False)
