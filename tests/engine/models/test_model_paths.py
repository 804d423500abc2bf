"""Which names may be asked for on the Hub: one rule for models and for data sets."""

import pytest

from engine.errors import UserError
from engine.models.model_paths import can_be_hub_name, require_model
from training.data.sources import open_source


@pytest.mark.parametrize(
    "name, possible",
    [
        ("gpt2", True),
        ("facebook/opt-1.3b", True),
        ("owner/name", True),
        ("here/name", False),  # there is a folder of that name, so a path was meant
        ("./name", False),
        ("/owner/name", False),
        ("owner/name/more", False),
        ("two words", False),
        ("", False),
    ],
)
def test_names_that_the_hub_could_have(tmp_path, monkeypatch, name, possible):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert can_be_hub_name(name) == possible


def test_what_stands_in_a_folder_of_this_machine_is_not_asked_for(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    asked = lambda *_, **__: pytest.fail("asked the Hub")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", asked)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", asked)
    with pytest.raises(UserError, match="--actor: there is no folder here/name"):
        require_model("here/name", "--actor")
    with pytest.raises(UserError, match="here/name: cannot be read"):
        open_source("here/name")


@pytest.mark.parametrize("inner, file", [("actor", "config.json"), ("actor_adapter", "adapter_config.json")])
def test_of_a_runs_folder_the_model_within_is_named(inner, file, tmp_path):
    (tmp_path / inner).mkdir()
    (tmp_path / inner / file).write_text("{}")
    with pytest.raises(UserError, match=f"holds no config.json.*{tmp_path / inner} for instance"):
        require_model(str(tmp_path), "--actor")
