"""The reward function's source is known by its file, and a class's by the file that it is written in too."""

from training.restarts.inputs import source_fingerprint


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
