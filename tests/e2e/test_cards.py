"""Model cards beside what the programs save: renewed after the last evaluation, kept where a user has edited them."""

import json
import re
import shutil

import pytest
import yaml

from scripts.harness.models import make_causal_lm
from scripts.harness.programs import command_line, run_caught, run_here
from training.checkpoints.export import main as export
from training.runtime import hub, output_folder
from training.runtime.hub import CARD, is_edited, known_names, signed


@pytest.fixture(scope="module")
def out(tiny, tmp_path_factory):
    """A run of step 3 with a checkpoint."""
    folder = tmp_path_factory.mktemp("cards") / "out"
    flags = tiny.flags(3, output_dir=folder, save_steps=1, enable_ema=True, eval_steps=1)
    result = run_caught(3, command_line(flags))
    assert result.code == 0, result.stderr
    return folder


def card(folder) -> str:
    return (folder / CARD).read_text()


def test_each_model_has_a_card_with_the_last_evaluation(out, tiny):
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    files = json.loads((out / "written.json").read_text())["models"]
    for name in ("actor", "actor_ema", "critic"):
        text = card(out / name)
        assert yaml.safe_load(text.split("---\n")[1])["library_name"] == "transformers"
        assert str(tiny.folder) not in text and CARD in files[name] and not is_edited(out / name / CARD)
    score = re.search(r"\| score \| \S+ ± \S+ \| (\S+) ±", card(out / "actor"))
    assert float(score[1]) == pytest.approx(last["eval/score"], abs=5e-4)
    assert f"| {last['eval/ema_score']:.3f} ±" in card(out / "actor_ema")


def test_what_is_exported_has_the_card_of_its_step(out, tmp_path, capsys):
    point = out / "checkpoints" / "step_000001"
    assert export([str(point), str(tmp_path / "first"), "--ema"]) == 0
    assert "| steps | 1 |" in card(tmp_path / "first") and "moving average" in card(tmp_path / "first")
    shutil.copytree(point, tmp_path / "moved" / "checkpoints" / "step_000001")
    assert export([str(tmp_path / "moved"), str(tmp_path / "second")]) == 0
    assert "no model card: " in capsys.readouterr().err and not (tmp_path / "second" / CARD).exists()


@pytest.mark.parametrize("step", [1, 3])
def test_an_edited_card_is_kept(step, tiny, tmp_path, capfd):
    folder = tmp_path / "out"
    place = folder / ("actor" if step == 3 else ".")
    flags = tiny.flags(step, output_dir=folder, save_steps=1, num_train_epochs=1)
    assert run_here(step, flags, capfd).code == 0
    first = card(place)
    (place / CARD).write_text(first + "mine\n")
    (place / f"{CARD}.kept").write_text("an older one\n")
    assert run_here(step, {**flags, "resume": folder}, capfd).code == 0
    assert not is_edited(place / CARD)
    assert {path.read_text() for path in place.glob(f"{CARD}.kept*")} == {"an older one\n", first + "mine\n"}


def test_a_card_that_fails_costs_no_model(tiny, tmp_path, capfd, monkeypatch):
    def broken(run, name):
        raise KeyError("flags")

    monkeypatch.setattr(hub, "model_card", broken)
    result = run_here(1, tiny.flags(1, output_dir=tmp_path / "out"), capfd)
    assert (tmp_path / "out" / "model.safetensors").is_file() and not (tmp_path / "out" / CARD).exists()
    assert result.code == 1 and "README.md cannot be written" in result.stderr
    assert output_folder.COMPLETE not in {path.name for path in (tmp_path / "out").iterdir()}


def test_an_edited_file_is_known(tmp_path):
    text = "# A card\n"
    for content, edited in ((signed(text), False), (signed(text) + "\n", True), ("# mine\n", True)):
        (tmp_path / CARD).write_text(content)
        assert is_edited(tmp_path / CARD) is edited
    (tmp_path / CARD).write_text(signed(text).replace("A card", "My card"))
    assert is_edited(tmp_path / CARD)
    assert not is_edited(tmp_path / "none.md")


def test_a_local_model_is_known_by_its_own_card_alone(tmp_path):
    folder = make_causal_lm(tmp_path / "lm")
    assert known_names([folder, None, "org/name"]) == {}
    text = "---\nbase_model: org/base\n---\n# x\n"
    (tmp_path / "lm" / CARD).write_text(text)  # somebody else's, where the word means what they like
    assert known_names([folder]) == {}
    (tmp_path / "lm" / CARD).write_text(signed(text))
    assert known_names([folder]) == {folder: "org/base"}
