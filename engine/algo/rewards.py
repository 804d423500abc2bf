"""The reward of every token: a KL penalty, and the score on one of them; which slots count for what.

Slot t holds response token t, and the log-prob and value read where that token is predicted. The slot after the last
token of a response therefore holds the value of the state in which the response is complete. Systems differ in whether
they count that slot, and in what they take for the end.
"""

import torch
from torch import Tensor

# How many slots past the response each rule still counts.
SLOTS_PAST = {"response": 0, "one_past": 1, "two_past": 2}
SCORE_PAST = {"last": -1, "after_last": 0, "two_after": 1}


def counted_tokens(responses: Tensor, response_mask: Tensor, pad_token_id: int, rule: str) -> Tensor:
    """Which response tokens a system takes for real, (B, T) bool.

    Args:
        responses: (B, T) int64.
        response_mask: (B, T) bool, set on every sampled token, or on those that a truncation leaves.
        rule: "sampled" counts those in the mask, EOS included; "before_pad" those before the first pad token, which
            leaves EOS out where it doubles as the pad token; "not_pad" all that are not the pad token, also behind one;
            "row" every slot, whatever stands there.

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


def counted_lengths(responses: Tensor, response_mask: Tensor, pad_token_id: int, rule: str) -> Tensor:
    """L, how many response tokens a system takes for real, (B,) int64; arguments as of `counted_tokens`."""
    return counted_tokens(responses, response_mask, pad_token_id, rule).sum(-1)


def score_slots(lengths: Tensor, width: int, rule: str) -> Tensor:
    """The response slot that receives each score, (B,) int64.

    Args:
        lengths: (B,) int64, L.
        width: T, the number of response slots. The row's width is part of the rule: a slot past it becomes the last.
        rule: "last" is slot L - 1, the last real token; "after_last" slot L; "two_after" slot L + 1.
    """
    if rule not in SCORE_PAST:
        raise ValueError(f"score slot {rule!r}: known are {', '.join(SCORE_PAST)}")
    return (lengths + SCORE_PAST[rule]).clamp(0, width - 1)


def first_slots(lengths: Tensor, width: int) -> Tensor:
    """(B, T) bool, set on the first `lengths` slots of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def slots_up_to(lengths: Tensor, width: int, rule: str) -> Tensor:
    """(B, T) bool: the slots of the "response", those and "one_past" or "two_past" it, or "all" of the row."""
    if rule == "all":
        return torch.ones(len(lengths), width, dtype=torch.bool, device=lengths.device)
    if rule not in SLOTS_PAST:
        raise ValueError(f"slots {rule!r}: known are {', '.join(SLOTS_PAST)}, all")
    return first_slots(lengths + SLOTS_PAST[rule], width)


def compute_rewards(kl: Tensor, kl_coef: float, kl_mask: Tensor, scores: Tensor, slots: Tensor) -> Tensor:
    """r_t = -kl_coef * KL_t where `kl_mask` is set, plus the score on one slot.

    Args:
        kl: (B, T) float32, the estimate of each token.
        kl_coef: the controller's value; 0 where the penalty stands in the loss.
        kl_mask: (B, T) bool.
        scores: (B,) float32, already clipped and scaled.
        slots: (B,) int64, from `score_slots`.

    Returns: (B, T) float32. Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2.
    """
    rewards = torch.where(kl_mask, -kl_coef * kl, torch.zeros_like(kl))
    return rewards.scatter_add(1, slots.unsqueeze(-1), scores.unsqueeze(-1))
