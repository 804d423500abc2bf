"""Restart points that versions before this one wrote: what they say, in today's words."""

from collections.abc import Mapping, Sequence

WEIGHTS, _OLD_WEIGHT = "--reward_weights", "--reward_function_weight"
OVERLONG, _OLD_OVERLONG, TRUNCATE = "--overlong", "--overlong_prompts", "truncate"


def weights_identity(weights: Sequence[float]) -> list[float] | None:
    """The weights of reward functions; None where all are 1, given or not."""
    return list(weights) if any(weight != 1.0 for weight in weights) else None


def in_todays_words(identity: Mapping) -> dict:
    """What must be equal in a run that goes on, with the flags that there are now."""
    return _with_weights(_with_overlong(identity))


def _with_overlong(identity: Mapping) -> dict:
    """The identity with --overlong, also of points from before all steps had that flag.

    Steps 1 and 2 then did as cut_answer does; step 3 had a flag of another name, and as its default a way of its own.
    """
    if OVERLONG in identity or not {_OLD_OVERLONG, "--max_seq_len"} & set(identity):
        return dict(identity)
    return {**identity, OVERLONG: identity.get(_OLD_OVERLONG, "cut_answer")}


def _with_weights(identity: Mapping) -> dict:
    """The identity with the functions' weights, also of points from when there was one function, with a flag of its
    own."""
    kept = dict(identity)
    if _OLD_WEIGHT in kept:
        kept[WEIGHTS] = weights_identity([kept.pop(_OLD_WEIGHT)])
    return kept
