"""Computes advantages from rewards and values. The table ESTIMATORS has the estimators that a run may choose.

A new estimator is one function and one line of ESTIMATORS. That line also says what the estimator needs; these needs
are checked when flags are read. docs/extending.md shows how to add an estimator without editing this file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the response positions.

        d_t = r_t + gamma V_{t+1} - V_t,   A_t = d_t + gamma lam A_{t+1},   R_t = A_t + V_t

    V after the last position is 0, because a response that has ended is a terminal state. Callers set `rewards` and
    `values` to zero after the end of each response, so that positions after the end do not change its advantages.

    Args:
        rewards, values: (B, T) float32; position t holds the reward of response token t, and the value of the state
            before token t.
        lam: lambda, one number for all rows, or (B,) float32 with one number for each row.

    Returns: (advantages, returns), each (B, T) float32.

    Source: Schulman et al. 2016, "High-dimensional continuous control using GAE", eq. 16.
    """
    errors = rewards + gamma * F.pad(values[:, 1:], (0, 1)) - values
    advantages = _discounted_sums(errors, gamma * lam)
    return advantages, advantages + values


def _discounted_sums(terms: Tensor, factor: float | Tensor) -> Tensor:
    """From the end of each row, x_t = terms_t + factor x_{t+1}, (B, T) float32. terms: (B, T) float32. factor: one
    number, or (B,) float32.

    An operation on so few numbers costs its call alone. Two calls a position, in place and on the host, take half a
    second for rows of 100,000 tokens; launched on a GPU they would take seconds.
    """
    sums = terms.t().clone(memory_format=torch.contiguous_format).cpu()
    factors = torch.as_tensor(factor, dtype=terms.dtype).cpu()
    following = torch.zeros_like(sums[0])
    for term in reversed(sums.unbind()):
        following = term.add_(following * factors)
    return sums.to(terms.device).t().contiguous()


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Computes the lambda of each response from the response's length l: lam = 1 - 1 / (alpha l), at least 0.

    GAE weights the TD error k positions ahead by lam^k. These weights add up to 1 / (1 - lam) = alpha l, so a TD error
    influences the same fraction of the response's positions at any length. With one lambda for all responses, the score
    at the end of a long response hardly reaches its beginning: 0.95^100 is 0.006.

    Args:
        lengths: (B,), the number of tokens of each response. alpha: greater than 0; VAPO uses 0.05.

    Returns: (B,) float32, 0 for a response without tokens.

    Source: Yue et al. 2025, "VAPO: Efficient and reliable reinforcement learning for advanced reasoning tasks"
    (arXiv 2504.05118), "Length-adaptive GAE".
    """
    return (1 - 1 / (alpha * lengths.clamp(min=1).float())).clamp(min=0.0) * (lengths > 0)


def rloo(rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    """REINFORCE leave-one-out: each response's reward minus the mean reward of the other responses to its prompt.

        A_i = s_i - 1 / (k - 1) * (sum of s_j over the group's j other than i)

    Args:
        rewards: (B,) float32, each response's score minus its KL penalty. The k responses to one prompt are a group;
            they are adjacent rows.
        group_size: k, at least 2.
        valid: (B,) bool, which responses count; by default all do. The mean is taken over the other responses that are
            valid.

    Returns: (B,) float32; 0 for a response that is not valid, and for the only valid response of its group.
    Raises: ValueError if k is less than 2 or B is not a multiple of k.

    Source: Ahmadian et al. 2024, "Back to basics: revisiting REINFORCE style optimization for learning from human
    feedback in LLMs", section 2.3; huggingface/trl v0.11.0, trl/trainer/rloo_trainer.py (where sample j of prompt i is
    row j B + i).
    """
    _, own, counted = _in_groups("RLOO", rewards, group_size, valid)
    others = counted.sum(-1, keepdim=True) - counted
    baseline = (own.sum(-1, keepdim=True) - own) / others.clamp(min=1)
    return torch.where((counted > 0) & (others > 0), own - baseline, torch.zeros_like(own)).view(-1)


def group_means(rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    """For each response, the mean reward of the valid responses in its group: (B,) float32, 0 if the group has no valid
    response.

    Arguments and errors: as for `rloo`. Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2.
    """
    largest, own, counted = _in_groups("GRPO", rewards, group_size, valid)
    return (largest + _means(own, counted)).expand_as(own).reshape(-1)


def group_advantages(rewards: Tensor, group_size: int, valid: Tensor | None = None) -> Tensor:
    """Each response's reward minus the mean reward of its group, (B,) float32. It is 0 for a response that is not
    valid, or is the only valid one in its group.

    If all rewards of a group are equal, the result is exactly 0. If the mean were rounded, this difference and the
    group's standard deviation would be rounding errors of similar size, and their quotient could be any number up to 1.

    GRPO divides the result by the group's standard deviation, Dr. GRPO does not. The result is (k - 1) / k times that
    of `rloo`. Arguments and errors: as for `rloo`. Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2; Liu et al.
    2025, "Understanding R1-Zero-like training", section 3.2.
    """
    _, own, counted = _in_groups("GRPO", rewards, group_size, valid)
    return ((own - _means(own, counted)) * counted).reshape(-1)


def group_deviations(rewards: Tensor, group_size: int, valid: Tensor | None = None, *, unbiased: bool = True) -> Tensor:
    """For each response, the standard deviation of the rewards of the valid responses in its group: (B,) float32.

    The result is 0 for a group with fewer than two valid responses. Arguments and errors: as for `rloo`. unbiased:
    divide the squared deviations by n - 1 instead of n.
    """
    _, _, counted = _in_groups("GRPO", rewards, group_size, valid)
    apart = group_advantages(rewards, group_size, valid).view(-1, group_size)
    number = counted.sum(-1, keepdim=True) - int(unbiased)
    return (apart.square().sum(-1, keepdim=True) / number.clamp(min=1)).sqrt().expand_as(apart).reshape(-1)


def _means(own: Tensor, counted: Tensor) -> Tensor:
    """The group means of the rewards that `_in_groups` returns: (groups, 1) float32, 0 for a group without a valid
    response."""
    return own.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)


def _in_groups(name: str, rewards: Tensor, group_size: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns three float32 tensors. (groups, 1): the largest valid reward of each group, 0 if no response of the group
    is valid. (groups, k): the rewards minus the largest one of their group, 0 for responses that are not valid.
    (groups, k): 1 for a valid response, else 0. With the largest reward subtracted, equal rewards become 0, so that
    sums of them are exact.

    Raises: ValueError, as `rloo` does.
    """
    if group_size < 2 or len(rewards) % group_size:
        raise ValueError(
            f"{name} of {len(rewards)} responses in groups of {group_size}: groups are of 2 or more, and "
            "the responses a multiple of that"
        )
    counted = (torch.ones_like(rewards) if valid is None else valid.to(rewards.dtype)).view(-1, group_size)
    groups, is_valid = rewards.view(-1, group_size), counted.bool()
    largest = groups.masked_fill(~is_valid, -torch.inf).amax(-1, keepdim=True)
    largest = largest.masked_fill(~is_valid.any(-1, keepdim=True), 0.0)
    return largest, (groups - largest).masked_fill(~is_valid, 0.0), counted


def returns_to_go(rewards: Tensor, gamma: float) -> Tensor:
    """The discounted sum of rewards from each position to the end, G_t = r_t + gamma G_{t+1}. These are the advantages
    of REINFORCE without a baseline.

    Args: rewards: (B, T) float32, zeros after a row's end. Returns: (B, T) float32.

    Source: OpenRLHF 0.11.2, openrlhf/trainer/ppo_utils/experience_maker.py, `get_cumulative_returns`; Hu et al. 2025,
    "REINFORCE++", section 3.
    """
    return _discounted_sums(rewards, gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The arguments of an estimator, for B responses of one rank with T positions. The responses to one prompt are a
    group; they are adjacent rows. In a conversation, tokens that an environment inserted are left out: the drawn tokens
    of all turns come one after the other.

    rewards, values: (B, T) float32, zeros after a response's end. Without a critic all values are zeros.
    policy_mask: (B, T) bool, the positions that the policy's loss is summed over.
    valid: (B,) bool, the responses that count.
    group_size: the number of responses to each prompt.
    gamma, lam: the discount and the lambda of GAE.
    value_lam: the lambda of the returns that the critic learns; None for the lambda of the advantages.
    length_adaptive_alpha: if given, the advantages of each response are estimated with the lambda that
        `length_adaptive_lambda` returns for it, in place of `lam`.
    """

    rewards: Tensor
    values: Tensor
    policy_mask: Tensor
    valid: Tensor
    group_size: int
    gamma: float
    lam: float
    value_lam: float | None = None
    length_adaptive_alpha: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An advantage estimator, with what it needs and what it returns.

    compute: the function that returns (advantages, returns), each (B, T) float32. If it computes one number per
        response, each is (B,), and the returns are the rewards that were compared.
    needs_critic: whether the estimator reads values; if it does not, no critic is built.
    needs_groups: whether the estimator compares the responses to one prompt; each prompt then needs 2 or more
    responses. per_response: whether the estimator returns one number per response.
    discounts: whether the estimator reads gamma. An estimator with a critic may read gamma in any case.
    """

    compute: Callable[[AdvantageInputs], tuple[Tensor, Tensor]]
    needs_critic: bool = False
    needs_groups: bool = False
    per_response: bool = False
    discounts: bool = False


def _gae(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """GAE. If the lambdas are decoupled, advantages and returns are estimated with different lambdas.

    Source: Yuan et al. 2025, "What's behind PPO's collapse in long-CoT? Value optimization holds the secret"
    (VC-PPO, arXiv 2503.01491), "Decoupled-GAE": lambda 0.95 for the policy and 1 for the critic, whose targets then
    have no bias from its own values.
    """
    lam: float | Tensor = given.lam
    if given.length_adaptive_alpha is not None:
        lam = length_adaptive_lambda(given.policy_mask.sum(-1), given.length_adaptive_alpha)
    advantages, returns = gae(given.rewards, given.values, given.gamma, lam)
    if given.value_lam is not None or given.length_adaptive_alpha is not None:
        value_lam = given.lam if given.value_lam is None else given.value_lam
        returns = gae(given.rewards, given.values, given.gamma, value_lam)[1]
    return advantages, returns


def _rloo(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    totals = given.rewards.sum(-1)
    return rloo(totals, given.group_size, given.valid), totals


def _grpo(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    totals = given.rewards.sum(-1)
    return group_advantages(totals, given.group_size, given.valid), totals


def _reinforce(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    returns = returns_to_go(given.rewards, given.gamma)
    return returns, returns


def _reinforce_baseline(given: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """The rewards to go minus the mean total reward of the response's group. The source uses gamma 1 here."""
    returns = returns_to_go(given.rewards, 1.0)
    return returns - group_means(given.rewards.sum(-1), given.group_size, given.valid).unsqueeze(-1), returns


ESTIMATORS = {
    "gae": AdvantageEstimator(compute=_gae, needs_critic=True, discounts=True),
    "rloo": AdvantageEstimator(compute=_rloo, needs_groups=True, per_response=True),
    "grpo": AdvantageEstimator(compute=_grpo, needs_groups=True, per_response=True),
    "reinforce": AdvantageEstimator(compute=_reinforce, discounts=True),
    "reinforce_baseline": AdvantageEstimator(compute=_reinforce_baseline, needs_groups=True),
}
