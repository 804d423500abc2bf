"""The reward function's source is known by its file, and a class's by the file that it is written in too."""

import hashlib
import sys

import pytest

from training.checkpoints.conditions import source_fingerprint


def test_it_is_the_source_of_the_file_and_of_where_the_class_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = "class Score:\n    def __call__(self, prompts, responses):\n        return [{}] * len(prompts)\n"
    (tmp_path / "fp_written.py").write_text(base.format(1))
    (tmp_path / "fp_named.py").write_text("from fp_written import Score\nscore = Score()\n")
    (tmp_path / "fp_plain.py").write_text("def score(prompts, responses):\n    return [0] * len(prompts)\n")
    named, plain = source_fingerprint("fp_named.py:score"), source_fingerprint("fp_plain.py:score")
    assert len({named, plain}) == 2
    assert source_fingerprint("fp_plain:score") == plain  # by the module's name
    (tmp_path / "fp_written.py").write_text(base.format(2))
    assert source_fingerprint("fp_named.py:score") != named
    assert source_fingerprint("fp_plain.py:score") == plain
    (tmp_path / "fp_plain.py").write_text("def score(prompts, responses):\n    return [1] * len(prompts)\n")
    assert source_fingerprint("fp_plain.py:score") != plain


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("name", ["rules.v2.py", "my-rules.py", "rules", "rules.txt", "rules.d/score.py", "rules.d/v2"])
def test_a_file_of_any_name_and_a_link_are_known_by_their_content(tmp_path, monkeypatch, name, link):
    source = b"import beside_it\n\ndef score(prompts, responses):\n    return [0] * len(prompts)\n"
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    written = tmp_path / "store" / "content" if link else file
    written.parent.mkdir(exist_ok=True)
    written.write_bytes(source)
    (written.parent / "beside_it.py").write_text("")
    if link:
        file.symlink_to(written)
    assert source_fingerprint(f"{name}:score") == hashlib.sha256(source).hexdigest()
    assert source_fingerprint(f"{file}:score") == hashlib.sha256(source).hexdigest()
