"""Names and places of models."""

import json
from pathlib import Path

import pytest

from engine.errors import UserError
from training.tools.models import config_of, located, named


def make(folder: Path, file: str = "config.json") -> Path:
    """A folder with such a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps({}))
    return folder


def test_a_model_is_called_as_is_said_or_as_its_folder(tmp_path, monkeypatch):
    sft, odd = make(tmp_path / "sft"), make(tmp_path / "lr=3")
    monkeypatch.chdir(tmp_path)
    given = ["one=sft", "sft/", "owner/hub-name", str(odd), "of=a=b", f"far={odd}"]
    assert named(given) == {
        "one": str(sft),
        "sft": str(sft),
        "hub-name": "owner/hub-name",
        "lr=3": str(odd),
        "of": "a=b",
        "far": str(odd),
    }
    monkeypatch.chdir(sft)
    assert named(["."]) == {"sft": str(sft)}


@pytest.mark.parametrize("bad", ["=sft", "one=", " ", "one= "])
def test_an_entry_without_name_or_path_is_refused(bad):
    with pytest.raises(UserError, match="give NAME=PATH, or a path"):
        named([bad])


def test_a_folder_of_a_user_that_is_none_is_refused():
    with pytest.raises(UserError, match="--models ~no_such_user/actor: no home folder of ~no_such_user"):
        named(["one=~no_such_user/actor"])


def test_two_of_one_name_are_refused():
    with pytest.raises(UserError, match=r"two models are called actor \(a/actor and b/actor\)\. Give them names"):
        named(["a/actor", "b/actor"])


def test_where_the_model_of_a_run_stands(tmp_path):
    def found(path: Path) -> tuple[str, bool]:
        model = located("it", str(path))
        return model.path, model.is_checkpoint

    sft, run, adapters = make(tmp_path / "sft"), tmp_path / "run", tmp_path / "adapters"
    assert found(sft) == (str(sft), False)
    make(run / "actor"), make(run / "critic"), make(run / "checkpoints" / "step_000004", "manifest.json")
    assert found(run) == (str(run / "actor"), False)
    point = run / "checkpoints" / "step_000004"
    assert found(point) == (str(point), True)
    with pytest.raises(UserError, match="--models it .*this checkpoint has no policy"):
        config_of(located("it", str(point)))
    make(point / "config" / "actor")
    assert config_of(located("it", str(point))) == str(point / "config" / "actor")
    make(adapters / "actor_adapter", "adapter_config.json")
    assert found(adapters) == (str(adapters / "actor_adapter"), False)
    unfinished = tmp_path / "unfinished"
    for step in (3, 11):
        make(unfinished / "checkpoints" / f"step_{step:06d}" / "config" / "model")
    assert found(unfinished) == (str(unfinished), True)
    assert "step_000011" in config_of(located("it", str(unfinished)))
    assert found(tmp_path / "nowhere") == (str(tmp_path / "nowhere"), False)
