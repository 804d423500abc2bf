"""The best checkpoint by a number that PPO does not see, with a bound on KL: on two ranks, and over a restart."""

import math

import pytest

from scripts.harness.programs import assert_one_message, differences, forked, metric_lines, run_here
from training.checkpoints.files import checkpoints_in, step_of

pytestmark = pytest.mark.slow

STEPS, STOPPED_AFTER, MAX_KL, BY = 6, 4, 8.0, "eval/reward_judge"


def flags_of(tiny, folder, **changes) -> dict:
    """Flags of a run that moves fast, with a judge beside its reward model, and an evaluation after each step."""
    judge = folder.parent / "judge.py"
    judge.write_text(
        "def judge(prompts, responses): return [float(len(set(response.split()))) for response in responses]\n"
    )
    changes = {"keep_best_by": BY, **changes}
    best = {"save_steps": 1, "keep_checkpoints": 1, "keep_best_checkpoint": True}
    rewards = {"reward_model_name_or_path": tiny.folder / "reward", "reward_function": f"{judge}:judge"}
    moves = {"max_steps": STEPS, "eval_steps": 1, "actor_learning_rate": 1e-2, "kl_coef": 0.0}
    return tiny.flags(3, output_dir=folder, reward_weights=0, **best, **rewards, **moves, **changes)


def steps_kept(folder) -> list[int]:
    """The steps of the checkpoints that are there."""
    return [step_of(checkpoint) for checkpoint in checkpoints_in(folder)]


def best_of(lines: list[dict], name: str, max_kl: float) -> int:
    """The step with the largest value of a metric among those within the bound."""
    within = [line for line in lines if line["step"] > 0 and line["eval/kl"] <= max_kl]
    return max(within, key=lambda line: line[name])["step"]


def test_the_best_is_kept_over_a_restart_and_training_is_the_same(tiny, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    result = forked(3, flags_of(tiny, whole))
    assert result.code == 0, result.stderr
    lines = metric_lines(whole)
    by_judge, by_score = best_of(lines, BY, math.inf), best_of(lines, "eval/score", MAX_KL)
    assert by_judge < by_score < STOPPED_AFTER < best_of(lines, "eval/score", math.inf), "else nothing is shown"
    assert steps_kept(whole) == [by_judge, STEPS]
    assert f"step_{by_judge:06d} FOLDER" in result.stdout, "the run's end names the best one"

    by = {"keep_best_by": "eval/score", "keep_best_max_kl": MAX_KL}
    stopped = {"enable_test_mode": True, "test_stop_step": STOPPED_AFTER}
    for more, newest in ((stopped, STOPPED_AFTER), ({"resume": "auto"}, STEPS)):
        result = forked(3, flags_of(tiny, resumed, **by, **more))
        assert result.code == 0, result.stderr
        assert steps_kept(resumed) == [by_score, newest]
    assert differences(whole, resumed) == []


@pytest.mark.parametrize("name", ["eval/reward_juge", "eval/likelihood", "eval/turn_limit"])
def test_a_number_that_is_not_there_is_named_before_models_load(tiny, tmp_path, capfd, name):
    result = run_here(3, flags_of(tiny, tmp_path / "out", keep_best_by=name), capfd)
    known = "Of scores there are eval/score, eval/reward_model, eval/reward_judge;"
    assert_one_message(result, [f"--keep_best_by {name}: no held-out number here has this name. {known}"])
