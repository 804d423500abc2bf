"""What becomes of a score before it enters the rewards: scaled, changed where an end is missing, clipped, and less the
penalty of a long response. The rules are a dialect's, looked up once; the math is in engine/algo/rewards.py."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine.algo.masked import moments
from engine.algo.rewards import ScoreScale, apply_missing_end, clip_scores, overlong_penalties
from engine.algorithms.dialect import Dialect

SCALINGS = {
    "none": "",
    "running": "divided by the standard deviation of all scores so far",
    "first_batch": "divided by the standard deviation of the first batch's scores",
}
ENDS = {
    "none": "",
    "replace": "replaced by {:g} where a response has no end",
    "subtract": "less {:g} where a response has no end",
}


class ScoreRules:
    """A dialect's rules for scores; `scale` is the one part that changes during a run.

    missing_end_penalty: what a response without end loses, where it loses something.
    in_words: what `process` does, in its order: "clipped at 5".
    overlong: (lengths (B,) int64, in tokens) -> (B,) float32, 0 or negative, what is added to scores of long responses;
        None in a dialect without an `overlong_buffer`.

    Args:
        response_slots: how many slots a response may have; needed in dialects with an `overlong_buffer`.
        reduce: adds a float64 tensor up over all ranks; None for one rank's own.
    """

    def __init__(self, dialect: Dialect, response_slots: int | None, reduce: Callable[[Tensor], Tensor] | None):
        self.dialect, self.reduce = dialect, reduce
        self.scale = ScoreScale(dialect.score_scaling)
        self.missing_end_penalty = dialect.missing_end_value if dialect.missing_end == "subtract" else 0.0
        self.overlong = None
        if dialect.overlong_buffer:
            assert response_slots is not None, "an overlong_buffer without the responses' slots"
            buffer, most = dialect.overlong_buffer, dialect.overlong_penalty
            self.overlong = partial(overlong_penalties, longest=response_slots, buffer=buffer, most=most)
        limit = dialect.score_clip
        scaled = self._scaled, SCALINGS[dialect.score_scaling]
        completed = self._with_missing_ends, ENDS[dialect.missing_end].format(dialect.missing_end_value)
        clipped = self._within_clip, "" if limit is None else f"clipped at {limit:g}"
        order = {"scale_clip": (scaled, completed, clipped), "clip_scale": (clipped, scaled, completed)}
        self._changes = [(change, words) for change, words in order[dialect.score_order] if words]
        self.in_words = [words for _, words in self._changes]
        if self.overlong is not None:
            self.in_words.append(f"less up to {most:g} in the last {buffer:.0%} of {response_slots} tokens")

    def process(self, scores: Tensor, ended: Tensor, response_mask: Tensor | None = None) -> Tensor:
        """The scores as they enter the rewards: scaled, changed where an end is missing, clipped, and at last less the
        penalty of a long response; (B,) float32.

        The scale takes note of these scores before they are divided by it (all ranks call this together).

        Args:
            scores: (B,) float32, as the reward source gave them. ended: (B,) bool.
            response_mask: (B, T) bool; needed in dialects with an `overlong_buffer`.
        """
        for change, _ in self._changes:
            scores = change(scores, ended)
        if self.overlong is None:
            return scores
        assert response_mask is not None, "an overlong_buffer without the responses' lengths"
        return scores + self.overlong(response_mask.sum(-1))

    def clipped(self, scores: Tensor) -> Tensor | None:
        """Which scores, as the reward source gave them, are beyond the clip at the present scale: (B,) bool; None in a
        dialect without a clip."""
        limit = self.dialect.score_clip
        if limit is None:
            return None
        scale = self.scale.value if self.dialect.score_order == "scale_clip" else 1.0
        return (scores / scale).abs() > limit

    def _scaled(self, scores: Tensor, ended: Tensor) -> Tensor:
        totals = moments(scores, torch.ones_like(scores, dtype=torch.bool))
        self.scale.update(self.reduce(totals) if self.reduce else totals)
        return scores / self.scale.value

    def _within_clip(self, scores: Tensor, ended: Tensor) -> Tensor:
        return clip_scores(scores, self.dialect.score_clip)

    def _with_missing_ends(self, scores: Tensor, ended: Tensor) -> Tensor:
        return apply_missing_end(scores, ended, self.dialect.missing_end, self.dialect.missing_end_value)
