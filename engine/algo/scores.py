"""What becomes of a score before it is a reward: scaling, the rule for missing ends, clipping."""

import torch
from torch import Tensor

from engine.algo.masked import mean_and_variance


def apply_missing_end(scores: Tensor, ended: Tensor, rule: str, value: float) -> Tensor:
    """The scores of responses that did not end: replaced by `value`, or lowered by it; others stay.

    Args:
        scores: (B,) float32.
        ended: (B,) bool.
        rule: "none", "replace" or "subtract".

    Source: "replace" openai/lm-human-preferences cbfd210b, train_policy.py, `make_score_fn`; "subtract"
    huggingface/trl f2cd5771, `missing_eos_penalty`.
    """
    if rule == "none":
        return scores
    if rule == "replace":
        return torch.where(ended, scores, torch.full_like(scores, value))
    if rule == "subtract":
        return torch.where(ended, scores, scores - value)
    raise ValueError(f"rule for missing ends {rule!r}: known are none, replace, subtract")


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """The scores within plus and minus `limit`; as they are for None."""
    return scores if limit is None else scores.clamp(-limit, limit)


class ScoreScale:
    """The standard deviation that scores are divided by; their mean is not taken off.

    kind: "none" divides by 1; "running" by the deviation of all scores so far, the present ones among them;
    "first_batch" by that of the first scores that were ever seen. Deviations are those with n - 1.

        scale.update(distributed.all_reduce_sum(moments(scores, everywhere)))
        scores = scores / scale.value

    Statistics come as sums (`masked.moments`), so that a caller can add them up over ranks first: then no two ranks
    differ. Source: CarperAI/trlx 3340c2f3, trlx/utils/modeling.py, `RunningMoments` (whose deviation after any number
    of updates is that of all scores together), and `make_experience`, whose first-batch deviation is each rank's own.
    """

    def __init__(self, kind: str = "none"):
        if kind not in ("none", "running", "first_batch"):
            raise ValueError(f"score scaling {kind!r}: known are none, running, first_batch")
        self.kind = kind
        self._totals = torch.zeros(3, dtype=torch.float64)

    def update(self, totals: Tensor) -> None:
        """Take note of a batch: (3,) float64 count, sum and sum of squares of its scores over all ranks."""
        if self.kind == "running" or (self.kind == "first_batch" and not self._totals[0]):
            self._totals = self._totals + totals.double().cpu()

    @property
    def value(self) -> float:
        """The divisor; 1 as long as fewer than two scores, or only equal ones, have been seen."""
        _, variance = mean_and_variance(self._totals, unbiased=True)
        return variance.sqrt().item() or 1.0

    def state_dict(self) -> dict:
        """The sums."""
        return {"totals": self._totals.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self._totals = torch.tensor(state["totals"], dtype=torch.float64)
