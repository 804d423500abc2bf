"""The launchers' runs, on the data that they take by default: how many steps they have, and what outlives their end."""

import pytest

from engine import distributed
from tests.e2e.test_launcher_plans import rows, words_of
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.config.supervised import RewardFlags, SFTFlags
from training.runtime.first_lines import POINTS, RunSchedule, supervised_schedule
from training.runtime.plan import count_steps

FLAGS = {1: SFTFlags, 2: RewardFlags, 3: RLHFFlags}
RM_STATIC = 76_256
"""Rows of Dahoas/rm-static's training split, by the card of the data set."""


def course_of(launcher: str, step: int, hardware: str, folder, monkeypatch) -> RunSchedule:
    """The course of a launcher's step, on this hardware."""
    words = words_of(launcher, step, hardware, folder)
    args = parse_flags(FLAGS[step], words, "")
    monkeypatch.setattr(distributed, "world_size", lambda: int(hardware.partition("x")[0]))
    two, four = (RM_STATIC * part // 10 for part in (2, 4))  # --data_split 2,4,4
    assert words[words.index("--data_split") + 1] == "2,4,4"
    if step < 3:
        share = two if step == 1 else four
        return supervised_schedule(args, share - int(share * args.held_out))
    steps = count_steps(args, four)
    return RunSchedule(steps, 1.0, args.schedule())


@pytest.mark.parametrize("launcher, hardware", sorted(rows()))
def test_a_run_that_dies_late_loses_little(launcher, hardware, tmp_path, monkeypatch):
    for step in FLAGS:
        course = course_of(launcher, step, hardware, tmp_path, monkeypatch)
        told = f"{launcher} {step} on {hardware}: {course.lines()}"
        assert course.points >= POINTS and not any("warning" in line for line in course.lines()), told
        assert course.schedule.steps <= course.steps / 4, told  # the most that is trained twice
        assert course.schedule.keep, told  # they are large


def test_a_large_model_on_many_gpus_has_few_steps(tmp_path, monkeypatch):
    course = course_of("llama2_70b", 3, "64xa100-80g", tmp_path, monkeypatch)
    assert course.steps == 30_502 // (8 * 64) == 59
    assert course.points == 5  # after steps 10, 20, 30, 40, 50
