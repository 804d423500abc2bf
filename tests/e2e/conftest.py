"""What the tests of whole programs share."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.zero.communication import init
from scripts.harness.programs import Tiny

ROW = {"prompt": "w04", "response": "w05", "chosen": "w06", "rejected": "w07"}
LINE = json.dumps(ROW) + "\n"
BAD_FILES = {
    "broken.jsonl": LINE * 2 + "prompt: 3\n" + LINE * 24,
    "other_column.jsonl": LINE + json.dumps({"question": "w04", "answer": "w05"}) + "\n" + LINE * 24,
    "three.jsonl": LINE * 3,
    "stage2.json": '{"zero_optimization": {"stage": 2}}',
    "state_alone/trainer_state.json": "{}",
}


@pytest.fixture(scope="session", autouse=True)
def process_group() -> None:
    """What DeepSpeed prints when it starts belongs to no test's output."""
    init()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> None:
    """Tokenised data of tests do not go into the user's cache."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Tiny:
    """Models and data of a few kilobytes."""
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def bad(tiny, tmp_path_factory) -> Path:
    """A folder of data, models and configurations that do not work."""
    folder = tmp_path_factory.mktemp("bad")
    for name, text in BAD_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "loop.jsonl").symlink_to("loop.jsonl")

    def copied(role: str, name: str, **config) -> Path:
        """A copy of one of tiny's models, with these values in config.json."""
        model = Path(shutil.copytree(tiny.folder / role, folder / f"{role}_{name}"))
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        return model

    few = copied("reward", "few_words", vocab_size=48)
    weights = load_file(few / "model.safetensors")
    weights["transformer.wte.weight"] = weights["transformer.wte.weight"][:48].clone()
    save_file(weights, few / "model.safetensors", metadata={"format": "pt"})
    return folder
