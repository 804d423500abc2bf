"""Runs that end badly: numbers that are not finite, a last evaluation that fails, models that training has broken."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from scripts.harness.programs import Result, Tiny, forked, metric_lines, run_here, snapshot

WHAT_TO_LOOK_AT = ("reward model's score", "learning rates", "gradient norms", "checkpoint")


@pytest.fixture(scope="module")
def poisoned(tiny, tmp_path_factory) -> Path:
    """A reward model whose weights are numbers, and whose scores overflow: sums of infinities of both signs."""
    folder = tmp_path_factory.mktemp("poisoned") / "reward"
    shutil.copytree(tiny.folder / "reward", folder)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name == "score.weight" or name.endswith("ln_f.weight"):
            weights[name] *= 1e30
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_stopped(result, *parts: str) -> None:
    assert result.code == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert (result.stdout + result.stderr).count("stopped: ") == 1
    for part in parts:
        assert part in result.stderr, f"{part!r} is missing in {result.stderr!r}"


def test_a_reward_model_that_scores_nan_leaves_the_restart_points(tiny, poisoned, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(
        "training.checkpoints.conditions.fingerprint", lambda path, what: what
    )  # it passes for the same
    out = tmp_path / "out"
    flags = tiny.flags(3, output_dir=out, save_steps=1, max_steps=2, reward_model_name_or_path=tiny.folder / "reward")
    assert run_here(3, flags, capfd).code == 0
    points, lines = snapshot(out / "checkpoints"), metric_lines(out)

    broken = {**flags, "max_steps": 4, "resume": out, "reward_model_name_or_path": poisoned}
    result = run_here(3, broken, capfd)
    assert_stopped(
        result,
        "step 3: a number is NaN or infinite, and nothing was learned from it",
        "rank 0: not finite: score (4)",
        "score nan, prompt 'w",
        "response '",
        *WHAT_TO_LOOK_AT,
        f"The last good checkpoint is {out / 'checkpoints' / 'step_000002'}: go on from it with --resume {out}",
    )
    prompts = {json.loads(row)["prompt"] for row in (tiny.folder / "prompts.jsonl").read_text().splitlines()}
    assert any(f"prompt '{prompt}'" in result.stderr for prompt in prompts)
    assert snapshot(out / "checkpoints") == points
    # Step 2 is the last no more: its evaluation is not one of the longer run's, whose line has times of its own.
    *before, last = lines
    *same, logged_again = metric_lines(out)
    assert same == before
    logged_again = {name: value for name, value in logged_again.items() if not name.startswith("time/")}
    assert logged_again == {name: value for name, value in last.items() if not name.startswith(("eval/", "time/"))}

    mended = run_here(3, {**flags, "max_steps": 3, "resume": out}, capfd)
    assert mended.code == 0, mended.stderr
    assert [line["step"] for line in metric_lines(out)] == [0, 1, 2, 3]


def test_a_critic_with_a_nan_weight(tiny, poisoned, tmp_path, capfd):
    flags = tiny.flags(
        3,
        output_dir=tmp_path / "out",
        critic_model_name_or_path=poisoned,
        reward_model_name_or_path=tiny.folder / "reward",
        num_eval_prompts=0,
    )
    result = run_here(3, flags, capfd)
    assert_stopped(result, "step 1: ", "rank 0: not finite: values (4)", *WHAT_TO_LOOK_AT)
    assert re.search(r"score -?\d", result.stderr), "the scores themselves are good"
    assert not (tmp_path / "out" / "actor").exists()


def test_the_steps_before_are_in_the_curves(tiny, tmp_path, capfd):
    """A learning rate that breaks the actor: TensorBoard has what led there, as metrics.jsonl has."""
    flags = tiny.flags(
        3,
        output_dir=tmp_path / "out",
        actor_learning_rate=1e30,
        num_warmup_steps=0,
        ppo_epochs=1,
        num_eval_prompts=0,
        max_steps=4,
    )
    assert_stopped(
        run_here(3, flags, capfd),
        "step 2: ",
        "logprobs (4)",
        *WHAT_TO_LOOK_AT,
        f"There is no checkpoint of a sound step in {tmp_path / 'out'}",
    )
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("policy/grad_norm")] == [1]
    assert [line["step"] for line in metric_lines(tmp_path / "out")] == [1]


def test_max_kl_names_the_last_restart_point_within_it(tiny, tmp_path, capfd):
    """Responses of a step are over the limit because of the update before: its checkpoint is not a good one."""
    out = tmp_path / "out"
    flags = tiny.flags(
        3,
        actor_learning_rate=1e-2,
        lr_scheduler_type="constant",
        num_warmup_steps=0,
        ppo_epochs=1,
        num_eval_prompts=0,
        max_steps=4,
        save_steps=1,
    )
    assert run_here(3, {**flags, "output_dir": tmp_path / "free"}, capfd).code == 0
    kl = [line["objective/kl"] for line in metric_lines(tmp_path / "free")]
    further = next(step for step in range(3, 5) if kl[step - 1] > max(kl[: step - 1]) + 0.1)
    limit = (max(kl[: further - 1]) + kl[further - 1]) / 2
    result = run_here(3, {**flags, "output_dir": out, "max_kl": limit}, capfd)
    points = out / "checkpoints"
    assert_stopped(
        result,
        f"step {further}: objective/kl is {kl[further - 1]:.4g} nats a response, over --max_kl {limit:g}",
        f"The last good checkpoint is {points / f'step_{further - 2:06d}'}: go on",
        f"step_{further - 1:06d} came after it: do not go on from there.",
    )
    assert [line["step"] for line in metric_lines(out)] == list(range(1, further))
    assert not (out / "actor").exists()


@pytest.mark.parametrize("step", (1, 2))
def test_steps_1_and_2_stop_too(step, tiny, tmp_path, capfd):
    flags = tiny.flags(step, output_dir=tmp_path / "out", learning_rate=1e30, save_steps=1)
    assert_stopped(
        run_here(step, flags, capfd),
        "step 2: the loss is NaN or infinite, so no weight was changed",
        "Look at the learning rate",
        f"There is no checkpoint of a sound step in {tmp_path / 'out'}",
        "step_000001 came after it: do not go on from there.",
    )
    assert not (tmp_path / "out" / "config.json").exists()
    assert [line["step"] for line in metric_lines(tmp_path / "out")] == [0, 1]


def test_two_ranks_stop_together_and_say_it_once(tiny, poisoned, tmp_path):
    result = forked(
        3,
        tiny.flags(
            3,
            output_dir=tmp_path / "out",
            reward_model_name_or_path=poisoned,
            num_eval_prompts=0,
            actor_zero_stage=3,
            critic_zero_stage=3,
        ),
    )
    assert_stopped(
        result,
        "step 1: ",
        "rank 0: not finite: score (4)",
        "rank 1: not finite: score (4)",
        "score nan, prompt 'w",
        *WHAT_TO_LOOK_AT,
    )
    assert result.stderr.count("rank 0: ") == 1


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


def ended(result, code: int, *parts: str) -> None:
    assert result.code == code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "done: " not in result.stdout
    for part in parts:
        assert part in result.stdout + result.stderr, f"{part!r} is missing in {result.stdout + result.stderr!r}"


def test_step_1_that_is_worse_than_a_uniform_guess(tiny, tmp_path, capfd):
    flags = tiny.flags(1, output_dir=tmp_path / "out", learning_rate=30.0)
    result = run_here(1, flags, capfd)
    ended(result, 1, "stopped: training has broken the model. Do not use it; it is saved in", "a uniform guess", "Try")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_step_1_that_learned_says_done(tiny, tmp_path, capfd):
    """Records of one text are learned by heart; the trainer's loss falls, on those held out, too."""
    Tiny.write(tiny, "same", [{"prompt": "w05 w06", "response": "w07 w08 w09"}] * 40)
    flags = tiny.flags(1, data_path=tiny.folder / "same.jsonl", output_dir=tmp_path / "out", learning_rate=1e-3)
    result = run_here(1, flags, capfd)
    assert result.code == 0
    assert result.stdout.splitlines()[-1] == f"done: saved in {tmp_path / 'out'}"


def test_step_2_on_two_ranks(tiny, tmp_path):
    """Both ranks end alike, with the loss over that of a coin."""
    result = forked(2, tiny.flags(2, output_dir=tmp_path / "out", learning_rate=1e3, max_steps=3, zero_stage=3))
    lines = metric_lines(tmp_path / "out")
    assert lines[-1]["eval/pair_loss"] > 100 > lines[0]["eval/pair_loss"]
    words = ["WARNING: "] if result.code == 0 else ["broken the model"]  # as the eight pairs fall
    if "nothing can be normalised" not in result.stderr:
        ended(result, int(lines[-1]["eval/accuracy"] <= lines[0]["eval/accuracy"]), *words, "a coin: 0.6931")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_step_3_whose_responses_became_all_the_same(tiny, tmp_path, capfd):
    """A reward for one token alone, and a learning rate that makes the actor say nothing else."""
    (tmp_path / "rules.py").write_text("def score(prompts, responses):\n    return [-len(set(r)) for r in responses]\n")
    flags = tiny.flags(
        3,
        output_dir=tmp_path / "out",
        reward_function=f"{tmp_path / 'rules.py'}:score",
        reward_model_name_or_path=None,
        actor_learning_rate=0.3,
        num_warmup_steps=0,
        max_steps=2,
    )
    result = run_here(3, flags, capfd)
    after = [json.loads(row) for row in (tmp_path / "out" / "samples" / "after.jsonl").read_text().splitlines()]
    assert len({row["response"] for row in after}) == 1
    ended(
        result, result.code, "all the same" if after[0]["tokens"] > 1 else "are empty", "Try a lower --actor_learning"
    )
    assert (tmp_path / "out" / "actor" / "model.safetensors").is_file()
