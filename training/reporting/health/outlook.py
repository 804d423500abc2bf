"""Where a run that is well stands when it ends: still on its way, or settled between score and KL penalty."""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import SETTLED_FROM, at_end, at_start, course
from training.reporting.health.policy import KL_MOVED, reference_moved

LAST_PART = 2 / 3
"""A run is on its way if it moved over its last third."""
GAIN = 0.05
"""Share of the whole rise in score, between the halves of the last third: with less, a longer run brings little."""
LITTLE = 0.1
"""The same, between the middle and the last third: with less, the score has settled."""


def outlook(rows: Sequence[Mapping]) -> str | None:
    """What a longer run or another coefficient would bring, if the curves show it; of a run in which nothing is ill."""
    return _under_way(rows) or (None if reference_moved(rows) else _settled(rows))


def _under_way(rows: Sequence[Mapping]) -> str | None:
    """The score still rises: with KL, along the run's line of score against KL; or without it, across that line."""
    score, kl = (course(rows, f"objective/{name}", LAST_PART) for name in ("scores", "kl"))
    first, last = at_start(rows, "objective/scores"), at_end(rows, "objective/scores")
    if score is None or kl is None or not score.rose or score.after - score.before < GAIN * (last - first):
        return None
    rise = f"(score {score.before:.3g} to {score.after:.3g}"
    if reference_moved(rows):
        return (
            f"The score still rose over the last third {rise}): a longer run (--max_steps) goes further. The reference "
            "has moved, so that KL does not tell how far the policy is from the model that training started from; "
            "`python -m training.merge` measures that."
        )
    if kl.fell or kl.steady:
        return (
            f"The score still rose over the last third {rise}) and KL did not (at {kl.after:.3g} nats a response): a "
            "longer run (--max_steps) reaches more at the same KL."
        )
    if not kl.rose:
        return None
    return (
        f"Score and KL still rose together over the last third {rise}, KL {kl.before:.3g} to {kl.after:.3g} nats a "
        "response): a longer run (--max_steps) goes further along this line."
    )


def _settled(rows: Sequence[Mapping]) -> str | None:
    """The score has not moved for long, and KL not up: the penalty weighs as much as the score gains, or more."""
    score, kl = (course(rows, f"objective/{name}", SETTLED_FROM) for name in ("scores", "kl"))
    first, last = at_start(rows, "objective/scores"), at_end(rows, "objective/scores")
    if score is None or kl is None or not (kl.steady or kl.fell) or kl.after <= KL_MOVED:
        return None
    if abs(score.after - score.before) > max(score.error, LITTLE * (last - first)):
        return None
    if at_end(rows, "objective/kl_coef") == 0.0:  # no penalty holds it
        return None
    if not kl.steady:
        return (
            f"The score has settled (at {score.after:.3g}, over the last two thirds); KL fell from {kl.before:.3g} to "
            f"{kl.after:.3g} nats a response, so that the same score is now reached nearer to the reference: a longer "
            "run brings little."
        )
    return (
        f"Score and KL have settled (score {score.after:.3g}, KL {kl.after:.3g} nats a response, over the last two "
        "thirds): a longer run brings little, a lower --kl_coef goes further; so does a reference that is refreshed "
        "(--reference_refresh_steps), which gives up the hold on the first model."
    )
