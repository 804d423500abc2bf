"""A number that is NaN ends a run: exit code 1, a message to work with, and what was saved before stays."""

import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts.harness.programs import launch, metric_lines, run_here, snapshot

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


def test_a_reward_model_that_scores_nan_leaves_the_restart_points(tiny, poisoned, tmp_path, capfd):
    out = tmp_path / "out"
    flags = tiny.flags(3, output_dir=out, save_steps=1, max_steps=2)
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
    result = launch(
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
