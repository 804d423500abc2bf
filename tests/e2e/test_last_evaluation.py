"""What goes wrong after the last step costs neither the models nor a line of metrics, and is told with their places."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from scripts.harness.programs import Result, Tiny, forked, metric_lines, run_here

# The 8 held-out prompts are scored by fours before the first step and after the last, and 4 responses in both steps.
REWARD = """
import math
import sys

calls = 0

def score(prompts, responses):
    global calls
    calls += 1
    if calls == {call}:
        {last}
    return [0.5 + 0.1 * calls] * len(responses)
"""
FAILURES = {
    "raises": ('raise ValueError("the judge is away")', "ValueError: the judge is away"),
    "nan": ("return [math.nan] * len(responses)", "evaluation: "),
    "exits": ("sys.exit(0)", "SystemExit"),
}


def write_reward(folder, last: str, ranks: int = 1) -> str:
    """A reward function that does this when the last evaluation begins."""
    (folder / f"{folder.name}_judge.py").write_text(REWARD.format(last=last, call=8 // 4 // ranks + 2 + 1))
    return f"{folder / f'{folder.name}_judge.py'}:score"


def check_kept(out, result: Result, expected: str, evaluated: bool = False) -> None:
    assert result.code == 1, result.stdout + result.stderr
    assert expected in result.stderr and "Traceback" not in result.stderr
    assert f"its models are saved: {out / 'actor'}, {out / 'critic'}" in result.stderr
    AutoModelForCausalLM.from_pretrained(out / "actor")
    AutoModelForSequenceClassification.from_pretrained(out / "critic")
    lines = metric_lines(out)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "objective/scores" in lines[2] and ("eval/score" in lines[2]) == evaluated
    models = json.loads((out / "run.json").read_text())["starts"][-1]["models"]
    assert models == {"step": 2, "actor": str(out / "actor"), "critic": str(out / "critic")}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_last_evaluation_that_fails(failure, tiny: Tiny, tmp_path, capfd):
    last, expected = FAILURES[failure]
    out = tmp_path / "out"
    reward = write_reward(tmp_path, last)
    check_kept(out, run_here(3, tiny.flags(3, output_dir=out, reward_function=reward), capfd), expected)


def test_samples_that_cannot_be_written(tiny: Tiny, tmp_path, capfd):
    out = tmp_path / "out"
    reward = write_reward(tmp_path, f"__import__('pathlib').Path({str(out / 'samples' / 'after.jsonl')!r}).mkdir()")
    result = run_here(3, tiny.flags(3, output_dir=out, reward_function=reward), capfd)
    check_kept(out, result, f"not all of it is on the disk: {out / 'samples' / 'after.jsonl'} (Is a directory)", True)
    assert f"WARNING: {out / 'samples' / 'after.jsonl'} cannot be written (Is a directory). The run goes on." in (
        result.stderr
    )
    assert (out / "curves.png").is_file() and "held-out prompts" in result.stdout


def test_two_ranks(tiny: Tiny, tmp_path):
    out = tmp_path / "out"
    reward = write_reward(tmp_path, FAILURES["nan"][0], ranks=2)
    flags = tiny.flags(3, output_dir=out, reward_function=reward, actor_zero_stage=3, critic_zero_stage=3)
    check_kept(out, forked(3, flags), FAILURES["nan"][1])


def test_a_reward_function_that_changes_the_working_directory(tiny: Tiny, tmp_path, capfd, monkeypatch):
    """All that the run reads and writes is named from where it began; the function goes elsewhere as it is imported."""
    (tmp_path / "begin").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "begin")
    for name in ("sft", "reward", "prompts.jsonl"):
        (tmp_path / "begin" / name).symlink_to(tiny.folder / name)
    text = f"import os\nos.chdir({str(tmp_path / 'elsewhere')!r})\n" + REWARD.format(last="pass", call=5)
    (tmp_path / "begin" / "moving_judge.py").write_text(text)
    flags = tiny.flags(3, output_dir="out", reward_function="moving_judge.py:score", save_steps=1)
    flags |= {"actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward", "data_path": "prompts.jsonl"}
    result = run_here(3, flags, capfd)
    assert result.code == 0, result.stderr
    out = tmp_path / "begin" / "out"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [line["step"] for line in metric_lines(out)] == [0, 1, 2]
    for name in ("actor/config.json", "samples/after.jsonl", "curves.png", "checkpoints/step_000002/manifest.json"):
        assert (out / name).is_file(), name
