"""The course of a run, told before it starts: epochs, steps, and when it evaluates and writes restart points."""

from collections.abc import Callable
from dataclasses import dataclass

from training.checkpoints.files import Schedule

POINTS = 3
"""Restart points that a run should have before its end: what a warning's advice comes to."""
NO_POINTS = "no restart points: a run that dies begins anew (--save_steps, --save_minutes)"


@dataclass(frozen=True, slots=True)
class Course:
    """The steps of a run, counted from 1, of which no model has to be there to know them.

    steps: how many. epochs: passes over the rows that they come to. schedule: of restart points. evaluates: whether
    held-out rows are looked at after a step; None where there are none. Before the first step they are in any case.
    """

    steps: int
    epochs: float
    schedule: Schedule
    evaluates: Callable[[int], bool] | None = None

    @property
    def evaluations(self) -> int:
        """How many, with the one before the first step."""
        return 0 if self.evaluates is None else 1 + sum(map(self.evaluates, range(1, self.steps + 1)))

    @property
    def points(self) -> int:
        """Restart points that are due by number, before the last step: what a run that dies goes on from."""
        return (self.steps - 1) // self.schedule.steps if self.schedule.steps else 0

    def lines(self) -> list[str]:
        """All of it in one line; and a warning where restart points are asked for and none comes before the end."""
        schedule = self.schedule
        when = [f"{_counted(self.points, 'restart point')} before the end, {_every(schedule.steps)}"]
        when = when if schedule.steps else []
        if schedule.minutes:
            when.append(f"a restart point every {schedule.minutes:g} minutes")
        if schedule.keep_best:
            when.append("one wherever an evaluation finds a better score")
        said = f"{_counted(self.evaluations, 'evaluation')}; {' and '.join(when) or NO_POINTS}"
        told = [f"the run: {_counted(self.steps, 'step')}, {_epochs(self.epochs)}; {said}"]
        if self.points or schedule.minutes or schedule.keep_best or not schedule.steps:
            return told
        why = f"--save_steps {schedule.steps}, and the run has {self.steps}"
        often = max(1, self.steps // (POINTS + 1))
        advice = f"Give --save_steps {often}, or --save_minutes" if self.steps > 1 else "Give --save_minutes"
        return [
            *told,
            f"warning: no restart point before the last step ({why}): a run that dies begins anew. {advice}.",
        ]


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _epochs(epochs: float) -> str:
    """ "1 epoch", "0.37 epochs"; a run's last rows that are too few for a step do not count against it."""
    told = f"{epochs:.2f}".rstrip("0").rstrip(".")
    return f"{told} epoch{'' if told == '1' else 's'}"
