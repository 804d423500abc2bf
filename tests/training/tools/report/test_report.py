"""four-engine-rlhf report: what a page says of run folders that are made by hand."""

import json
import re

import pytest

from engine.algorithms import get_dialect
from tests.training.tools.pages.test_page import HOSTILE, block
from training.tools.report.__main__ import main
from training.tools.report.page import POINTS, departures, thinned

PROMPTS = ("Review : a", "Review : b")
DEEP = b"[" * 100_000


def sample(prompt, response, score):
    return {"prompt": prompt, "response": response, "score": score, "kl": 1.5, "tokens": 7}


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def a_run(folder, after=1.25, **changes):
    """Three steps of step 3, evaluated before the first and after the last one."""
    training = {"objective/scores": 0.1, "objective/kl": 0.2, "time/step": 1.0}
    held_out = {"eval/score": after, "eval/score_se": 0.125, "eval/score_change": after - 0.25}
    lines(
        folder / "metrics.jsonl",
        [
            {"step": 0, "samples": 0, "eval/score": 0.25, "eval/score_se": 0.0625, "eval/kl": 0.0},
            *({"step": step, "samples": 8 * step, **training} for step in (1, 2)),
            {"step": 3, "samples": 24, **training, **held_out, "eval/score_change_se": 0.1, "eval/kl": 3.5},
        ],
    )
    lines(folder / "samples" / "before.jsonl", [sample(prompt, "dull", 0.25) for prompt in PROMPTS])
    lines(folder / "samples" / "step_000002.jsonl", [sample(prompt, "fine", 0.5) for prompt in PROMPTS])
    lines(folder / "samples" / "after.jsonl", [sample(PROMPTS[1], HOSTILE, 2.0), sample(PROMPTS[0], "fun", 0.5)])
    lines(folder / "samples" / "after_ema.jsonl", [sample(prompt, "mean", 0.5) for prompt in PROMPTS])
    dialect = json.loads(json.dumps({"name": "default", "kl_coef": 0.1, "betas": [0.9, 0.95]} | changes))
    start = {
        "started": "2026-01-02T03:04:05+00:00",
        "command": "deepspeed training/step3_rlhf.py --seed <7>",
        "versions": {"torch": "2.13.0", "vllm": None},
        "git": {"commit": "abc123", "dirty": True},
        "machine": {"host": "secret", "world_size": 2, "accelerator": "cpu"},
        "flags": {"seed": 7, "stop": []},
        "dialect": dialect,
    }
    (folder / "run.json").write_text(json.dumps({"starts": [start]}))
    return folder


def report(*arguments) -> str:
    *runs, output = arguments
    assert main([*map(str, runs), "--output", str(output)]) == 0
    return output.read_text(encoding="utf-8")


def test_the_numbers_of_a_run(tmp_path):
    text = report(a_run(tmp_path / "ppo", kl_coef=0.3), tmp_path / "report.html")
    assert "<td>0.250 ± 0.062</td><td>1.250 ± 0.125</td><td>+1.000 ± 0.100</td><td>3</td>" in text
    charts = {chart["title"]: chart["lines"] for chart in block(text, "curves")}
    assert charts["score, held out"][0]["points"] == [[0, 0.25, 0.0625], [3, 1.25, 0.125]]
    assert charts["KL to the reference, nats a response"][0]["points"] == [
        [1, 0.2, None],
        [2, 0.2, None],
        [3, 0.2, None],
    ]
    assert "entropy, nats a token" not in charts, "which the run has not"
    assert len(re.findall(r'id="chart-\d+"', text)) == len(charts)
    assert '<th scope="row">kl_coef</th><td>0.1</td><td>0.3</td>' in text and ">betas</th><td>[" not in text
    assert "--seed &lt;7&gt;" in text and "abc123 with changes of its own" in text and "torch 2.13.0" in text
    assert "secret" not in text, "hosts are nobody's business"


def test_the_samples_of_a_run_stand_side_by_side_by_prompt(tmp_path):
    text = report(a_run(tmp_path / "ppo"), tmp_path / "report.html")
    samples = block(text, "samples")
    assert samples["names"] == ["before", "step 2", "after"]
    assert [row["prompt"] for row in samples["rows"]] == list(PROMPTS)
    assert [each[0] for each in samples["rows"][1]["responses"]] == ["dull", "fine", HOSTILE]
    assert [each[5] for each in samples["rows"][1]["responses"]] == [[0.0], [0.25], [1.75]], "changes since before"


def test_turns_come_to_the_page_as_they_are_in_the_files(tmp_path):
    run = a_run(tmp_path / "ppo")
    turns = [{"by": "policy", "text": "call"}, {"by": "environment", "text": HOSTILE}, {"by": "policy", "text": "so"}]
    turns[2]["reward"] = 1.5
    before = [sample(prompt, "dull", 0.25) for prompt in PROMPTS]
    lines(run / "samples" / "before.jsonl", [before[0] | {"turns": turns}, before[1]])
    text = report(run, tmp_path / "report.html")
    assert "alert(1)</script>" not in text
    (one, _, _), (two, _, _) = (row["responses"] for row in block(text, "samples")["rows"])
    assert one[6:] == [turns] and len(two) == 6, "a response alone has no turns"


def test_a_prompt_that_the_data_hold_twice_has_two_rows(tmp_path):
    run = a_run(tmp_path / "ppo")
    for name, scores in (("before", (1.0, 2.0, 3.0)), ("step_000002", (4.0, 5.0)), ("after", (7.0, 8.0, 9.0))):
        rows = [sample(PROMPTS[0], f"{name} {place}", score) for place, score in enumerate(scores)]
        lines(run / "samples" / f"{name}.jsonl", rows)
    rows = block(report(run, tmp_path / "report.html"), "samples")["rows"]
    assert [[each[0] for each in row["responses"]] for row in rows] == [
        ["before 0", "step_000002 0", "after 0"],
        ["before 1", "step_000002 1", "after 1"],
    ], "the third stands in two of the files alone"


def test_samples_that_are_being_written_are_shown_as_far_as_they_are_there(tmp_path):
    run = a_run(tmp_path / "ppo")
    after = run / "samples" / "after.jsonl"
    after.write_bytes(after.read_bytes()[:-9])
    (run / "samples" / "step_of_mine.jsonl").write_text("notes")
    samples = block(report(run, tmp_path / "report.html"), "samples")
    assert samples["names"] == ["before", "step 2", "after"]
    assert [row["prompt"] for row in samples["rows"]] == [PROMPTS[1]], "the first line of after.jsonl"


def test_two_runs_have_a_colour_each_and_what_differs(tmp_path):
    runs = [a_run(tmp_path / "one"), a_run(tmp_path / "two", after=2.0, kl_coef=0.3)]
    text = report(*runs, tmp_path / "both.html")
    (score,) = [chart["lines"] for chart in block(text, "curves") if chart["title"] == "score, held out"]
    assert [(line["label"], line["points"][-1][1]) for line in score] == [("one", 1.25), ("two", 2.0)]
    assert len({line["color"] for line in score}) == 2
    assert '<th scope="row">dialect/kl_coef</th><td>0.1</td><td>0.3</td>' in text
    assert block(text, "samples")["names"] == ["before", "one", "two"]


def test_changes_are_from_what_the_run_itself_began_with(tmp_path):
    one, two = a_run(tmp_path / "one"), a_run(tmp_path / "before", after=2.0)
    lines(two / "samples" / "before.jsonl", [sample(prompt, "other", -29.0) for prompt in PROMPTS])
    samples = block(report(one, two, tmp_path / "both.html"), "samples")
    assert samples["names"] == ["before training", "one", "before"]
    assert [each[0] for each in samples["rows"][0]["responses"]] == ["dull", "fun", "fun"]
    assert [each[5] for each in samples["rows"][0]["responses"]] == [[0.0], [0.25], [29.5]], "0.5 less 0.25, less -29"


def test_scores_of_another_reward_are_no_change(tmp_path):
    run = a_run(tmp_path / "ppo")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows[2] |= {"eval/score": 1.0, "eval/score_change": 0.75, "eval/kl_change": 1.0}
    del rows[3]["eval/score_change"]
    lines(run / "metrics.jsonl", [*rows[:3], rows[3] | {"eval/kl_change": 3.5}])
    samples = block(report(run, tmp_path / "report.html"), "samples")
    assert [each[5] for each in samples["rows"][0]["responses"]] == [[0.0], [0.25], [None]]


def test_runs_of_one_name_are_told_apart_by_the_folders_above(tmp_path):
    runs = [a_run(tmp_path / folder / "out" / "ppo") for folder in ("one", "two")]
    text = report(*runs, tmp_path / "both.html")
    assert block(text, "samples")["names"] == ["before", "one/out/ppo", "two/out/ppo"]
    assert str(tmp_path) not in text.split("Configuration")[0]


def test_a_run_that_broke_off_says_what_is_missing(tmp_path):
    folder = a_run(tmp_path / "ppo")
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:3]))
    for name in ("run.json", "samples/after.jsonl", "samples/step_000002.jsonl"):
        (folder / name).unlink()
    text = report(folder, tmp_path / "report.html")
    assert "missing: run.json" in text and "missing: samples/after.jsonl" in text
    assert "<td>0.250 ± 0.062</td><td></td><td></td><td>0</td>" in text and 'id="samples"' not in text


def test_a_run_of_step_2(tmp_path):
    measured = {"train/pair_loss": 0.6, "eval/accuracy": 0.75, "eval/accuracy_se": 0.05}
    lines(tmp_path / "reward" / "metrics.jsonl", [{"step": step, "samples": step, **measured} for step in (0, 5)])
    text = report(tmp_path / "reward", tmp_path / "report.html")
    assert "<td>0.750 ± 0.050</td><td>0.750 ± 0.050</td>" in text and "Health" not in text


def refused(capsys, *arguments) -> str:
    assert main([str(each) for each in arguments]) == 2
    return capsys.readouterr().err


def test_refusals(tmp_path, capsys):
    run = a_run(tmp_path / "ppo")
    lines(tmp_path / "sft" / "metrics.jsonl", [{"step": 1, "samples": 1, "train/loss": 1.0}])
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.html").write_text("mine")
    assert "holds no metrics.jsonl" in refused(capsys, tmp_path / "empty")
    assert "ppo of step 3, sft of step 1" in refused(capsys, run, tmp_path / "sft", "--output", tmp_path / "x.html")
    assert "is given twice" in refused(capsys, run, run, "--output", tmp_path / "x.html")
    assert "Give the file to write" in refused(capsys, run, tmp_path / "sft")
    assert "Give --overwrite" in refused(capsys, run, "--output", tmp_path / "there.html")
    assert (tmp_path / "there.html").read_text() == "mine"
    assert "is a folder" in refused(capsys, run, "--output", tmp_path / "empty")
    assert f"there is no folder {tmp_path / 'no'}." in refused(capsys, run, "--output", tmp_path / "no" / "x.html")
    (run / "samples" / "after.jsonl").write_text('{"prompt": "a"}\n')
    assert "after.jsonl, line 1: is no sample" in refused(capsys, run)
    assert not (run / "report.html").exists() and not (tmp_path / "x.html").exists()


TURNED = b'{"prompt": "a", "response": "b", "score": 1, "kl": 0, "tokens": 1, "turns": 3}\n'


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("samples/after.jsonl", b'{"prompt": "a", "response": "b", "score": null, "kl": 0, "tokens": 1}\n', "line 1"),
        ("samples/after.jsonl", b"\xff\n", "line 1: is no sample"),
        ("samples/after.jsonl", TURNED, "line 1: is no sample"),
        ("metrics.jsonl", b'{"step": 1, "samples": 1, "train/loss": "low"}\n', "train/loss is 'low', no number"),
        ("metrics.jsonl", b'{"step": 1}\n', "step 1 does not say after how many samples"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl: no text"),
        ("run.json", b"\xff", "run.json: no record of a run"),
        ("run.json", DEEP, "run.json: no record of a run (brackets within brackets, too deep)"),
        ("samples/after.jsonl", DEEP + b"\n", "line 1: is no sample"),
        ("metrics.jsonl", DEEP + b"\n", "line 1: no JSON (brackets within brackets, too deep)"),
        ("metrics.jsonl", b"1" * 5000 + b"\n", "line 1: no JSON"),
        ("run.json", b'{"starts": 3}', "starts is 3"),
        ("run.json", b'{"starts": [{"flags": [1]}]}', "flags is [1]"),
    ],
)
def test_broken_files_are_named(tmp_path, capsys, file, content, message):
    run = a_run(tmp_path / "ppo")
    (run / file).write_bytes(content)
    said = refused(capsys, run)
    assert str(run / file) in said and message in said


def test_starts_that_say_little_have_a_page(tmp_path):
    run = a_run(tmp_path / "ppo")
    (run / "run.json").write_text('{"starts": [{"flags": null, "command": null, "git": {}, "dialect": {}}]}')
    assert "not known" in report(run, tmp_path / "report.html")


def test_a_link_to_itself_is_no_run(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    assert main([str(tmp_path / "loop")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_departures_are_of_fields_that_the_dialect_has():
    usual = get_dialect("default")
    resolved = {"name": "default", "lam": usual.lam, "gamma": 0.5, "betas": list(usual.betas), "gone": 1}
    assert departures(resolved) == [("gamma", usual.gamma, 0.5)]
    assert departures({"name": "of my own", "gamma": 0.5}) == []


def test_long_curves_are_thinned_and_keep_their_ends():
    assert POINTS == 1500
    points = [(step, 0.0, None) for step in range(15_001)]
    kept = thinned(points)
    assert len(kept) == 1364 + 1, "each eleventh, and the last one"
    assert (kept[0], kept[1], kept[-1]) == (points[0], points[11], points[-1])
    assert thinned(points[:5]) == points[:5]


@pytest.mark.parametrize("flag", [[], ["--overwrite"]])
def test_the_page_of_one_run_stands_in_its_folder(tmp_path, flag):
    run = a_run(tmp_path / "ppo")
    assert main([str(run)]) == 0
    assert main([str(run), *flag]) == (0 if flag else 2)
