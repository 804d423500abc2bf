"""The reward of every token: a KL penalty, and the score on one of them."""
import torch
from torch import Tensor


def counted_lengths(responses: Tensor, response_mask: Tensor, pad_token_id: int, rule: str) -> Tensor:
    """How many response tokens a system takes for real, (B,) int64.

    Args:
        responses: (B, T) int64.
        response_mask: (B, T) bool, set on every sampled token.
        rule: "sampled" counts every sampled token, EOS included; "before_pad" counts those before the first pad
            token, which leaves EOS out where it doubles as the pad token (as DeepSpeed-Chat, trlX and TRL do).
    """
    sampled = response_mask.sum(-1)
    if rule == "sampled":
        return sampled
    if rule == "before_pad":
        is_pad = (responses == pad_token_id) | ~response_mask
        return torch.where(is_pad.any(-1), is_pad.long().argmax(-1), sampled)
    raise ValueError(f"length rule {rule!r}: known are sampled, before_pad")


def score_slots(lengths: Tensor, width: int, rule: str) -> Tensor:
    """The response slot that receives each score, (B,) int64.

    Args:
        lengths: (B,) int64, L.
        width: T, the number of response slots.
        rule: "last" is slot L - 1, the last real token; "after_last" is slot L, or the last slot where L fills the row.
    """
    if rule == "last":
        return (lengths - 1).clamp(min=0)
    if rule == "after_last":
        return lengths.clamp(max=width - 1)
    raise ValueError(f"score slot {rule!r}: known are last, after_last")


def first_slots(lengths: Tensor, width: int) -> Tensor:
    """(B, T) bool, set on the first `lengths` slots of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def compute_rewards(kl: Tensor, kl_coef: float, kl_mask: Tensor, scores: Tensor, slots: Tensor) -> Tensor:
    """r_t = -kl_coef * KL_t where `kl_mask` is set, plus the score on one slot.

    Args:
        kl: (B, T) float32, the estimate of each token.
        kl_coef: the controller's value.
        kl_mask: (B, T) bool.
        scores: (B,) float32, already clipped and scaled.
        slots: (B,) int64, from `score_slots`.

    Returns: (B, T) float32. Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2.
    """
    rewards = torch.where(kl_mask, -kl_coef * kl, torch.zeros_like(kl))
    return rewards.scatter_add(1, slots.unsqueeze(-1), scores.unsqueeze(-1))
