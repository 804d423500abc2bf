"""Values of wrong kinds in JSON, and panics of libraries written in Rust."""

import json

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import UserError
from engine.files import misfit, rust_panics
from training.checkpoints.files import MANIFEST, Damage, Manifest
from training.data.tokens import _encode
from training.reporting.run_record import read_run_record

HARD = Regex(r"^(([a-z0-9])+.?)+[?]$")  # gives up at long texts


def test_a_number_that_numpy_does_not_take_is_a_misfit():
    assert misfit({"a": 2**63 - 1}, {"a": int}) is None
    assert misfit({"a": 2**63}, {"a": int}).startswith("it.a is")


def test_a_tokenizer_that_gives_up_names_the_text_of_a_batch():
    words = Tokenizer(models.WordLevel({"a": 0, "w28": 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(HARD, "isolated"), pre_tokenizers.WhitespaceSplit()]
    )
    words.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(HARD, "x")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(UserError, match="text 'w28 w28"):
        _encode(tokenizer, ["a", "w28 " * 40])
    with pytest.raises(UserError, match="a tokenizer fails"), rust_panics():
        tokenizer.decode([1] * 60)


@pytest.mark.parametrize("starts", [3, [3], [{"flags": []}], [{"command": 1}], [{"models": "x"}]])
def test_a_record_of_a_run_of_wrong_types_is_refused(tmp_path, starts):
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    with pytest.raises(UserError, match="no record of a run"):
        read_run_record(tmp_path / "run.json")


@pytest.mark.parametrize("content", [[], {"files": []}, {"format": 1, "step": "1", "files": {}, "digest": ""}])
def test_a_manifest_of_wrong_types_is_damage(tmp_path, content):
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(Damage):
        Manifest.read(tmp_path)
