"""scripts/compare_dialects.py: its arithmetic, what it runs, and a comparison of the smallest size from end to end."""

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.algorithms import DIALECTS, get_dialect
from scripts import compare_dialects
from scripts.comparison import judge, page, runs
from scripts.comparison.entries import Entry, settings, step3_words
from scripts.comparison.frontier import (
    Band,
    Point,
    band,
    best_place_under,
    best_score_under,
    curve,
    place_of,
    read_at,
    score_at,
)
from scripts.comparison.judge import policy_measures
from scripts.comparison.results import Compared, Search, choose
from scripts.comparison.runs import LINE_SCALES, Ended, Result
from scripts.comparison.tasks import TASKS, known_words
from scripts.harness.programs import run_words
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.runtime.launch import run

TASK = TASKS["quickstart"]


def test_the_search_takes_the_best_score_and_of_equal_ones_the_lower_rate():
    assert choose({1e-3: 1.0, 2e-3: 1.0, 5e-4: 0.5, 5e-3: None}) == 1e-3
    assert choose({1e-3: None}) is None


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("task", TASKS)
def test_a_dialect_keeps_its_choices_but_for_what_is_the_tasks(name, task, tmp_path):
    words = step3_words(Entry.parsed(name), TASKS[task], tmp_path, rate=1e-3, seed=1, steps=30)
    args = parse_flags(RLHFFlags, [*words[1:], "--output_dir", "out"], "")
    dialect = args.resolved.dialect
    texts = {"query_start", "query_end", "truncate_token", "truncate_after", "pad_token", "temperature"}
    assert set(get_dialect(name).differences(dialect)) <= {
        "actor_lr",
        "critic_lr",
        "warmup_steps",
        "samples_per_prompt",
        *texts,
    }
    assert (dialect.temperature, dialect.actor_lr, dialect.pad_token) == (1.0, 1e-3, "tokenizer")
    assert args.rows_per_rank == TASKS[task].responses, "all learn from equally many"


def test_what_responses_are_is_the_tasks():
    assert settings(Entry.parsed("openai"), steps=30) == {
        "temperature": "1.0",
        "query_start": "",
        "query_end": "",
        "truncate_token": "eos",
        "truncate_after": "0",
    }
    # 30 steps of 4 epochs with 1 mini-batch: 120 optimizer steps, and default's own 10 are no more than a tenth.
    assert settings(Entry.parsed("default"), steps=30) == {}
    assert settings(Entry.parsed("default"), steps=20) == {"warmup_steps": "8"}
    assert settings(Entry.parsed("trl_rloo:samples_per_prompt=16"), steps=30)["samples_per_prompt"] == "16", "as asked"


def evaluation(kl, score):
    return {"kl": kl, "score": score, "tokens": 20.0, "distinct_bigrams": 0.25, "known_words": 0.9}


def compared(label, *ends):
    line = [evaluation(0.0, 0.0), evaluation(2.0, 1.0) | {"distinct_bigrams": 0.5}, evaluation(4.0, 1.25)]
    results = {
        seed: Result(True, "", 64, 30.0 + seed, 40.0, [evaluation(0.0, 0.0), evaluation(*end)], line)
        for seed, end in enumerate(ends)
    }
    return Compared(label, Search({5e-4: 0.5, 1.5e-3: 1.25, 4.5e-3: None}, 60.0, 1.5e-3), results)


def test_what_is_measured_of_answers(tmp_path):
    (tmp_path / "sft.jsonl").write_text('{"prompt": "a go", "response": "od film ."}\n{"text": "it is"}\n')
    known = known_words([tmp_path / "sft.jsonl"])
    assert known == {"a", "go", "od", "good", "film", ".", "it", "is"}
    rows = [{"response": "good film .", "tokens": 5}, {"response": "good filmest .", "tokens": 3}]
    metrics = dict.fromkeys(("eval/score", "eval/score_se", "eval/kl", "eval/kl_se", "eval/response_length"), 0.0)
    found = policy_measures(metrics, rows, known)
    assert found["distinct_bigrams"] == 4 / 8
    assert found["known_words"] == 5 / 6


def test_what_a_judge_says_is_in_standard_deviations_of_the_sft_models():
    names = ("score", "score_se", "kl", "kl_se", "response_length", "reward_right", "reward_right_se")
    metrics = {f"eval/{name}": 0.25 for name in names}
    rows = [{"response": "a", "tokens": 1, "reward_right": value} for value in (0.0, 0.0, 0.0, 1.0)]
    first = policy_measures(metrics, rows, {"a"}, "right")
    assert (first["judge"], first["judge_std"]) == (0.25, math.sqrt(3) / 4)
    later = first | {"kl": 2.0, "judge": 0.25 + math.sqrt(3) / 2}
    result = Result(True, "", 64, 30.0, 40.0, [first, later], [first])
    assert result.course(False, "judge") == [Point(0.0, 0.0), Point(2.0, pytest.approx(2.0))]


def test_a_judged_tasks_table_reads_the_reward_model_where_the_judge_is_best():
    def row(kl, score, judge):
        return evaluation(kl, score) | {"judge": judge, "judge_std": 1.0}

    # At KL 4 twice: with a judge's value of 0.5 on its way out, and -0.25 on its way back.
    course = [row(0.0, 0.0, 0.0), row(8.0, 2.0, 1.0), row(0.0, 6.0, -1.5)]
    result = Result(True, "", 64, 30.0, 40.0, course, course)
    entry = Compared("default", Search({}, 0.0, 1e-3), {1: result}, "judge")
    task = dataclasses.replace(TASKS["judged_quickstart"], kls=(4.0, 9.0))
    assert page.judged_table(task, [entry]).splitlines()[2:] == [
        "| `default` | 0.001 | 0.50 (1.00) | - | 1.00 (2.00) | 8.0 | 0.25 |",
    ]


def test_a_policy_on_the_line_is_between_the_sft_model_and_the_last(monkeypatch):
    last = torch.nn.Linear(1, 2, bias=False)
    last.load_state_dict({"weight": torch.tensor([[3.0], [6.0]])})
    monkeypatch.setattr(judge, "load_policy", lambda *args, **kwargs: last)
    actor = SimpleNamespace(module=torch.nn.Linear(1, 2, bias=False), version=0)
    sft = {"weight": torch.tensor([[1.0], [2.0]])}
    judge.put_weights(SimpleNamespace(actor=actor), sft, "folder", 0.25)
    assert actor.module.weight.tolist() == [[1.5], [3.0]]
    judge.put_weights(SimpleNamespace(actor=actor), sft, "folder", 1.0)
    assert (actor.module.weight.tolist(), actor.version) == ([[3.0], [6.0]], 2), "copies of the weights are stale"


def test_programs_side_by_side_share_no_port(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    words = "import os, sys; print(os.environ.get('MASTER_PORT'), sys.path[1]); print('stopped: so'); sys.exit(3)"
    ended = runs.run_program([sys.executable, "-c", words], tmp_path / "log")
    assert (ended.code, ended.cpu_seconds > 0) == (3, True)
    assert (tmp_path / "log").read_text() == f"None {runs.ROOT}\nstopped: so\n"
    assert runs.reason(tmp_path / "log") == "stopped: so"


@pytest.fixture
def tiny_task(tiny, tmp_path):
    """A task's folder of models and data."""
    models = tmp_path / "models"
    for name in ("sft", "reward"):
        shutil.copytree(tiny.folder / name, models / name)
    (models / "data").mkdir()
    shutil.copy(tiny.folder / "sft.jsonl", models / "data")
    lines = (tiny.folder / "prompts.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("prompts", lines[:-8]), ("eval_prompts", lines[-8:])):
        (models / "data" / f"{name}.jsonl").write_text("".join(part))
    return models


@pytest.fixture
def in_this_process(monkeypatch, capfd):
    """Programs run in here; what was started."""
    started = []

    def run_program(command, log):
        started.append(command)
        if command[1] == "-m":
            job = json.loads(Path(command[3]).read_text())
            run(lambda args: judge.main(args, job), RLHFFlags, "", command[4:])
            return Ended(0, 1.0, 1.0)
        return Ended(run_words(3, command[2:]), 1.0, 1.0)

    monkeypatch.setattr(runs, "run_program", run_program)
    monkeypatch.setattr("engine.distributed.shutdown", lambda: None)
    return started


def test_a_comparison_of_the_smallest_size(tiny_task, tmp_path, monkeypatch, in_this_process):
    monkeypatch.setitem(TASKS, "quickstart", dataclasses.replace(TASK, least_rise=-9.0))
    out = tmp_path / "out"
    words = ["default", "--tasks", "quickstart", "--models", f"quickstart={tiny_task}", "--output", str(out)]
    words += ["--steps", "2", "--responses", "4", "--rates", "1e-3", "2e-3"]

    assert compare_dialects.main([*words, "--seeds", "1"]) == 0
    assert len(in_this_process) == 5, "the search's runs and the seed's, each judged"
    assert compare_dialects.main([*words, "--seeds", "1", "2"]) == 0
    assert len(in_this_process) == 7, "the second seed's run alone, and its judge"
    (entry,) = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert (entry["task"], entry["label"]) == ("quickstart", "default")
    chosen = entry["search"]["chosen"]
    assert chosen == choose({float(rate): score for rate, score in entry["search"]["scores"].items()})
    assert [len(result["evaluations"]) for result in entry["runs"].values()] == [3, 3]
    for result in entry["runs"].values():
        assert result["responses"] == 8
        assert [row["responses"] for row in result["evaluations"]] == [0, 4, 8]
        assert result["evaluations"][0]["kl"] == pytest.approx(0.0, abs=1e-5)
        assert result["evaluations"][2]["kl"] > 1e-4
        assert [row["scale"] for row in result["line"]] == [0.0, *LINE_SCALES]
        assert len({row["kl"] for row in result["line"]}) == 1 + len(LINE_SCALES), "each is another model"
        assert {"scale": 1.0} | result["evaluations"][2] == result["line"][-1] | {"step": 2, "responses": 8}
    assert (out / "quickstart.png").is_file()
    assert f"| `default` | {chosen:g} |" in (out / "comparison.md").read_text()
    assert not list(out.rglob("*.safetensors")), "the policies are judged and gone"

    words[0] = "default+line"
    assert compare_dialects.main([*words, "--seeds", "1", "2"]) == 0
    assert len(in_this_process) == 7, "the same runs, read again"
    course, line = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    assert line["label"] == "default+line" and line["runs"] == course["runs"]


def course(*pairs):
    return [Point(*pair) for pair in pairs]


def test_a_course_is_read_where_it_is_best_at_a_kl():
    straight, back = course((0, 0), (2, 1), (6, 2)), course((0, 0), (4, 1), (2, 2), (6, 1))
    assert [score_at(straight, kl) for kl in (0, 1, 2, 4, 6)] == [0, 0.5, 1, 1.5, 2]
    assert score_at(straight, 6.1) is None
    assert score_at(back, 3) == 1.75, "0.75 on its way out, 1.5 on its way back, 1.75 on its way out again"
    assert score_at(back, 1) == 0.25
    assert score_at([], 1) is None
    assert place_of(back, 3) == 2.25, "a quarter of the last line"
    assert (read_at([8, 4, 2, 1], 1.5), read_at([8, 4, 2, 1], 3.0)) == (3, 1)
    assert place_of(straight, 7) is None


def test_the_best_score_under_a_kl():
    assert best_score_under(course((0, 0), (4, 1), (2, 2), (6, 1)), 3) == 2, "an evaluation"
    assert best_score_under(course((0, 0), (8, 4)), 2) == 1, "what a run that went too far had on its way"
    assert best_score_under(course((0, 0.5), (8, -4)), 2) == 0.5
    assert best_score_under(course((3, 1)), 2) is None
    assert best_place_under(course((0, 0), (4, 1), (2, 2), (6, 1)), 3) == 2
    assert best_place_under(course((0, 0), (8, 4)), 2) == 0.25
    assert best_place_under(course((3, 1)), 2) is None


def test_bands_are_over_the_seeds_that_came_so_far():
    found = band([1.0, None, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert band([5.0]) == Band(5.0, None, 1)
    assert band([None, None]) is None


def test_a_curve_ends_where_the_first_seed_does():
    found = curve([course((0, 0), (4, 4)), course((0, 2), (2, 2))], points=2)
    assert [(kl, values.mean) for kl, values in found] == [(0, 1), (1, 1.5), (2, 2)]
    assert [values.error for _, values in found] == [1, 0.5, 0]  # stdev of a pair / sqrt 2: half its difference
    assert curve([course((0, 1))]) == []
