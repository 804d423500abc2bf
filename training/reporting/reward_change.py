"""A reward that is another since a run went on: its scores do not stand beside those of before.

A held-out line that has the KL's change and not the score's was scored by another reward than the first one was: what
is paired with lines from then on (`standard_errors.with_errors`), and stands in restart points, has no scores.
"""

from collections.abc import Collection, Mapping, Sequence

from training.reporting.standard_errors import Units

OF_RESPONSES = ("kl", "response_length", "new_words")
"""What is measured of held-out responses whatever scores them."""
OTHERS = {"score", *OF_RESPONSES}  # than the score's parts


def without_scores(before: Units | None) -> Units | None:
    """What was measured before the first step, without the score and its parts."""
    return before and {name: values for name, values in before.items() if name in OF_RESPONSES}


def paired(before: Units | None, parts: Collection[str]) -> Units | None:
    """`before`, without scores if these were made of other parts: a part's name is the reward's own."""
    same = before is None or set(before) - OTHERS == set(parts)
    return before if same else without_scores(before)


def scored_otherwise(row: Mapping) -> bool:
    """Whether a line of metrics was scored by another reward than the held-out prompts before the first step."""
    return "eval/score" in row and "eval/kl_change" in row and "eval/score_change" not in row


def comparable_scores(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines with held-out scores, from the last change of the reward on that they tell of."""
    scored = [row for row in rows if "eval/score" in row]
    return [row for row in scored if scored_otherwise(row) == scored_otherwise(scored[-1])]


def of_one_reward(rows: Sequence[Mapping]) -> list[Mapping]:
    """The lines of a run, those before the last change of its reward without the scores in training."""
    changes = [place for place, row in enumerate(rows) if "objective/reward_changed" in row]
    before = changes[-1] if changes else 0
    kept = [{name: value for name, value in row.items() if name != "objective/scores"} for row in rows[:before]]
    return [*kept, *rows[before:]]
