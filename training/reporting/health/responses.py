"""What the responses have become: their length, their end, their variety."""

from collections.abc import Mapping, Sequence

from training.reporting.health.curves import LOOK, Finding, at_end, at_start, column, having

LONGER, SHORTER = 1.5, 0.67
"""Response length, end over start. Reward models like length (or its absence) for its own sake."""
FEW_ENDED = 0.1
"""Share of responses that end by themselves; below it nearly all are cut off at the limit, and scored unfinished."""
DEGENERATE = 0.01
"""Share of responses masked out for being too short: a few are accidents, one in a hundred is a habit."""
ALIKE = 0.5
"""Distinct bigrams a token of the held-out responses, end over start: below it, they have become one response."""


def length_drifted(rows: Sequence[Mapping]) -> Finding | None:
    """Length, as the reward model's back door."""
    # The held-out prompts are the same each time, and their first answers come from before any training.
    name = "eval/response_length" if len(having(rows, "eval/response_length")) > 1 else "rollout/response_length"
    first, last = at_start(rows, name), at_end(rows, name)
    if first is None or SHORTER * first <= last <= LONGER * first:
        return None
    direction = "grew" if last > first else "shrank"
    return Finding(
        LOOK,
        f"responses {direction} from {first:.3g} to {last:.3g} tokens: see in samples/ whether the "
        "reward model pays for length alone. If so, balance lengths among its training pairs, or "
        "raise --kl_coef.",
    )


def few_ended(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that the limit cuts off."""
    first, last = at_start(rows, "rollout/eos_rate"), at_end(rows, "rollout/eos_rate")
    if last is None or last >= FEW_ENDED:
        return None
    remedy = (
        "They did not from the start: raise --max_answer_seq_len, and see that the SFT data ends with EOS."
        if first < FEW_ENDED
        else f"At the start {first:.0%} did: see in samples/ whether the reward model pays "
        "for going on; raise --max_answer_seq_len."
    )
    return Finding(LOOK, f"{last:.0%} of responses ended by themselves at the end, the others hit the limit. {remedy}")


def degenerate(rows: Sequence[Mapping]) -> Finding | None:
    """Responses that were masked out."""
    count, seen = sum(column(rows, "rollout/degenerate")), rows[-1]["samples"]
    if count == 0 or count < DEGENERATE * seen:
        return None
    return Finding(
        LOOK,
        f"{count:.0f} responses ({count / seen:.1%}) were degenerate, too short to learn from. See in "
        "samples/ whether the reward model pays for silence; with pad equal to EOS, look at the "
        "dialect's length_rule.",
    )


def answers_alike(rows: Sequence[Mapping]) -> Finding | None:
    """Held-out responses, first and last: how many different pairs of words they hold, for their length."""
    evaluations = [row for row in having(rows, "eval/distinct_bigrams") if row.get("eval/response_length", 0.0) > 0]
    if len(evaluations) < 2:
        return None
    first, last = (evaluations[place]["eval/distinct_bigrams"] for place in (0, -1))
    kept = last / max(first, 1.0) * evaluations[0]["eval/response_length"] / evaluations[-1]["eval/response_length"]
    if kept >= ALIKE:
        return None
    return Finding(
        LOOK,
        f"held-out responses became alike: {first:.0f} distinct bigrams before, {last:.0f} after, "
        f"{kept:.0%} for their length. Read samples/; raise --kl_coef or stop earlier.",
    )
