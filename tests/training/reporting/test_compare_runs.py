"""Several runs side by side."""

import json

import pytest

from training.reporting.compare_runs import evaluations, main, named, table

BEFORE = {
    "step": 0,
    "samples": 0,
    "eval/score": -0.5,
    "eval/kl": 0.0,
    "eval/response_length": 20.0,
    "eval/distinct_bigrams": 800.0,
}
BETWEEN = {"step": 1, "samples": 64, "objective/scores": 0.0}
AFTER = {
    "step": 2,
    "samples": 128,
    "eval/score": 1.25,
    "eval/kl": 2.5,
    "eval/response_length": 24.5,
    "eval/distinct_bigrams": 600.0,
}


def _run(folder, *rows):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_table_exactly(tmp_path):
    runs = {
        "a": evaluations(_run(tmp_path / "a", BEFORE, BETWEEN, AFTER)),
        "a name of some length, longer": evaluations(_run(tmp_path / "b", BEFORE, {**AFTER, "samples": 1234567})),
    }
    assert (
        table(runs)
        == """\
run                             responses            score   rise      KL          length  bigrams kept
a                                     128   -0.50 ->  1.25  +1.75    2.50   20.0 ->  24.5          0.75
a name of some length, longer     1234567   -0.50 ->  1.25  +1.75    2.50   20.0 ->  24.5          0.75"""
    )


def test_a_rise_has_its_paired_error(tmp_path, capsys):
    errors = {"eval/score_se": 0.25, "eval/kl_se": 0.1, "eval/score_change": 1.75, "eval/score_change_se": 0.125}
    folders = [_run(tmp_path / "a", BEFORE, {**AFTER, **errors}), _run(tmp_path / "b", BEFORE, AFTER)]
    assert main([*map(str, folders), "--output", str(tmp_path / "picture.png")]) == 0
    assert (
        "\n".join(capsys.readouterr().out.splitlines()[:3])
        == """\
run                      responses            score          rise      KL          length  bigrams kept
a                              128   -0.50 ->  1.25  +1.75 ± 0.12    2.50   20.0 ->  24.5          0.75
b                              128   -0.50 ->  1.25         +1.75    2.50   20.0 ->  24.5          0.75"""
    )
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_one_name_are_told_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [_run(tmp_path / name, BEFORE, AFTER).relative_to(tmp_path) for name in ("x/ppo", "y/ppo", "z")]
    assert list(named(folders)) == ["x/ppo", "y/ppo", "z"]
    assert main([*map(str, folders), "--output", "picture.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "x/ppo", "y/ppo", "z", "picture:"]
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rows, said", [([BEFORE, BETWEEN], "holds 1 evaluations"), (None, "no such file")])
def test_what_cannot_be_compared_is_the_users_mistake(tmp_path, capsys, rows, said):
    if rows:
        _run(tmp_path / "run", *rows)
    assert main([str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
