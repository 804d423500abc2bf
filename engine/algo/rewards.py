"""From the score of a response to the reward of every token: changes of the score, the positions that count, the sum.

Position t holds response token t, and the log-prob and value read where that token is predicted. So the position after
the last token of a response holds the value of the state in which the response is complete. Systems differ in whether
they count that position, and in which token they take for the last.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algo.masked import mean_and_variance

# How many positions after the response each rule still counts.
POSITIONS_PAST = {"response": 0, "one_past": 1, "two_past": 2}
SCORE_PAST = {"last": -1, "after_last": 0, "two_after": 1}


def counted_tokens(responses: Tensor, response_mask: Tensor, pad_token_id: int, rule: str) -> Tensor:
    """Which response tokens a system takes for real tokens, (B, T) bool.

    Args:
        responses: (B, T) int64.
        response_mask: (B, T) bool, set on every sampled token, or on those that truncation leaves.
        rule: "sampled" counts the tokens in the mask, EOS included; "before_pad" those before the first pad token, so
            without EOS where EOS is also the pad token; "not_pad" all tokens but the pad token, also after one; "row"
            every position, whatever token it holds.

    Source: "before_pad" huggingface/trl f2cd5771, `first_true_indices`; "not_pad" DeepSpeedExamples 83757d9c,
    DeepSpeed-Chat's `action_mask`; "row" openai/lm-human-preferences cbfd210b, whose responses all have one length.
    """
    if rule == "sampled":
        return response_mask
    if rule == "row":
        return torch.ones_like(response_mask)
    real = (responses != pad_token_id) & response_mask
    if rule == "not_pad":
        return real
    if rule == "before_pad":
        return real.long().cumprod(-1).bool()
    raise ValueError(f"length rule {rule!r}: known are sampled, before_pad, not_pad, row")


def valid_responses(policy_mask: Tensor, min_tokens: int) -> Tensor:
    """(B,) bool, the responses that count where each has one number: those with a position in policy_mask, (B, T) bool.

    With min_tokens 0 responses without a token count too: others are compared with their score, and their ratio is 1.
    """
    return policy_mask.any(-1) | (min_tokens == 0)


def score_positions(lengths: Tensor, width: int, rule: str) -> Tensor:
    """The response position that receives each score, (B,) int64.

    Args:
        lengths: (B,) int64, L.
        width: T, the number of response positions. A position past the width becomes the last one.
        rule: "last" is position L - 1, the last real token; "after_last" position L; "two_after" position L + 1.
    """
    if rule not in SCORE_PAST:
        raise ValueError(f"score position {rule!r}: known are {', '.join(SCORE_PAST)}")
    return (lengths + SCORE_PAST[rule]).clamp(0, width - 1)


def first_positions(lengths: Tensor, width: int) -> Tensor:
    """(B, T) bool, set on the first `lengths` positions of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def positions_up_to(lengths: Tensor, width: int, rule: str) -> Tensor:
    """(B, T) bool: the positions of the "response", also one or two after it ("one_past", "two_past"), or "all" of the
    row."""
    if rule == "all":
        return torch.ones(len(lengths), width, dtype=torch.bool, device=lengths.device)
    if rule not in POSITIONS_PAST:
        raise ValueError(f"positions {rule!r}: known are {', '.join(POSITIONS_PAST)}, all")
    return first_positions(lengths + POSITIONS_PAST[rule], width)


def positions_after_tokens(counted: Tensor) -> Tensor:
    """(B, T) bool: the first position, and each position after a token that counts. A pad token inside a response
    leaves a hole.

    Args: counted: (B, T) bool.

    Source: CarperAI/trlx 3340c2f3, accelerate_ppo_trainer.py, `make_experience`: `log_ratio * attention_mask[:, :-1]`.
    """
    return F.pad(counted[:, :-1], (1, 0), value=True)


def compute_rewards(kl: Tensor, kl_coef: float, kl_mask: Tensor, scores: Tensor, positions: Tensor) -> Tensor:
    """r_t = -kl_coef * KL_t where `kl_mask` is set, plus the score on one position.

    Args:
        kl: (B, T) float32, the estimate for each token.
        kl_coef: the controller's value; 0 where the penalty is part of the loss.
        kl_mask: (B, T) bool.
        scores: (B,) float32, already clipped and scaled.
        positions: (B,) int64, from `score_positions`.

    Returns: (B, T) float32. Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2.
    """
    rewards = torch.where(kl_mask, -kl_coef * kl, torch.zeros_like(kl))
    return rewards.scatter_add(1, positions.unsqueeze(-1), scores.unsqueeze(-1))


def apply_missing_end(scores: Tensor, ended: Tensor, rule: str, value: float) -> Tensor:
    """The scores, where those of responses that did not end are replaced by `value` or lowered by it.

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


def overlong_penalties(lengths: Tensor, longest: int, buffer: float, most: float) -> Tensor:
    """What the scores of long responses lose: nothing up to a certain length, then more with each token, up to `most`.

        R(y) = 0                                        where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache      up to L_max, where it is -1; times `most`

    Args:
        lengths: (B,) int64, |y|, tokens of each response, EOS included.
        longest: L_max, the most tokens that a response may have.
        buffer: L_cache / L_max, the share of L_max in which the penalty grows; over 0.
        most: the penalty of a response of L_max tokens; 1 in the paper.

    Returns: (B,) float32, between -most and 0, to be added to the scores.
    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", eq. 13, where L_max is
    20480 and L_cache 4096; volcengine/verl 003364bc, verl/workers/reward_manager/dapo.py (`overlong_buffer`), whose
    `penalty_factor` is `most`.
    """
    cache = buffer * longest
    return most * ((longest - cache - lengths) / cache).clamp(-1, 0).float()


def groups_alike(scores: Tensor, group_size: int) -> Tensor:
    """Which groups have equal scores, (B / group_size,) bool. All responses of such a group have the advantage 0.

    A group with a NaN or infinite score is not among them; such scores are refused elsewhere.

    Args:
        scores: (B,) float32; the responses to one prompt stand side by side.

    Source: volcengine/verl 53971be5, recipe/dapo/dapo_ray_trainer.py, `fit`: the deviation of a prompt's scores is 0.
    """
    groups = scores.view(-1, group_size)
    return (groups == groups[:, :1]).all(-1) & groups.isfinite().all(-1)


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """The scores clipped to plus and minus `limit`; unchanged for None."""
    return scores if limit is None else scores.clamp(-limit, limit)


class ScoreScale:
    """The standard deviation that scores are divided by; their mean is not subtracted.

    kind: "none" divides by 1; "running" by the deviation of all scores so far, the present ones included; "first_batch"
    by that of the first batch of scores. Deviations divide by n - 1.

        scale.update(distributed.data_parallel_sum(moments(scores, everywhere)))
        scores = scores / scale.value

    Statistics are given as sums (`masked.moments`), so that a caller can first add them up over ranks; then all ranks
    divide by the same number. Source: CarperAI/trlx 3340c2f3, trlx/utils/modeling.py, `RunningMoments` (whose deviation
    after any number of updates is that of all scores together), and `make_experience`, whose first-batch deviation is
    each rank's own.
    """

    def __init__(self, kind: str = "none"):
        if kind not in ("none", "running", "first_batch"):
            raise ValueError(f"score scaling {kind!r}: known are none, running, first_batch")
        self.kind = kind
        self._totals = torch.zeros(3, dtype=torch.float64)

    def update(self, totals: Tensor) -> None:
        """Take in a batch. totals: (3,) float64, count, sum and sum of squares of its scores over all ranks."""
        if self.kind == "running" or (self.kind == "first_batch" and not self._totals[0]):
            self._totals = self._totals + totals.double().cpu()

    @property
    def value(self) -> float:
        """The divisor; 1 until two different scores have been seen."""
        _, variance = mean_and_variance(self._totals, unbiased=True)
        return variance.sqrt().item() or 1.0

    def state_dict(self) -> dict:
        """The sums, for a checkpoint."""
        return {"totals": self._totals.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from `state_dict`."""
        self._totals = torch.tensor(state["totals"], dtype=torch.float64)
