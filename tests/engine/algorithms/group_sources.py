"""Critic-free systems in straight lines, by each source's own order of work: in loops, in float64, without masks.

They know nothing of dialects. Each is given all rows of all ranks, those of a group of k side by side, and the numbers
of those that one optimizer step learns from, by micro-batches. It returns the advantages of all rows, each a list of a
number a token, and the step's loss.
"""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Row:
    """A response: what the models say of its tokens, (L,) float64 each; `new` carries the gradient.

    learned: whether its tokens are in the loss. counts: whether it is there at all, to be compared with others.
    """

    score: float
    ended: bool
    old: Tensor
    ref: Tensor
    new: Tensor
    learned: bool = True
    counts: bool = True


Step = list[list[int]]


def chosen(rows: list[Row], advantages: list, step: Step) -> list[tuple]:
    """The step's rows and their advantages."""
    return [(rows[i], advantages[i]) for part in step for i in part]


def groups_of(rows: list[Row], k: int) -> list[list[int]]:
    """The numbers of the rows of each group."""
    return [list(range(start, start + k)) for start in range(0, len(rows), k)]


def compared(rewards: list[float], rows: list[Row], k: int, eps: float | None) -> list[float]:
    """Less the group's mean and, with an eps, over its deviation (n - 1) plus this; 0 for what does not count."""
    found = [0.0] * len(rows)
    for group in groups_of(rows, k):
        counted = [i for i in group if rows[i].counts]
        inside = [rewards[i] for i in counted]
        for i in counted:
            found[i] = rewards[i] - statistics.fmean(inside)
            if eps is not None:
                found[i] /= (statistics.stdev(inside) if len(inside) > 1 else 0.0) + eps
    return found


def surrogate(rho: Tensor, a: float, low: float = 0.2, high: float = 0.2) -> Tensor:
    """The smaller of the two sides, to be made large."""
    return torch.minimum(rho * a, rho.clamp(1 - low, 1 + high) * a)


def k3(row: Row) -> Tensor:
    apart = row.ref - row.new
    return apart.exp() - apart - 1


def deepseek_math(rows: list[Row], k: int, step: Step, beta: float = 0.04) -> tuple[list, Tensor]:
    """Equations 3 and 4 of the paper; a mean over all responses that count."""
    advantages = compared([row.score for row in rows], rows, k, 1e-6)
    objectives = []
    for row, a in chosen(rows, advantages, step):
        if row.counts:
            tokens = surrogate((row.new - row.old).exp(), a) - beta * k3(row)
            objectives.append(tokens.sum() / len(tokens))
    return by_token(rows, advantages), -sum(objectives) / len(objectives)


def trl_grpo(
    rows: list[Row],
    k: int,
    step: Step,
    *,
    scale: str = "group",
    loss_type: str = "dapo",
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    max_length: int = 0,
    temperatures: tuple[float, float] = (1.0, 1.05),
) -> tuple[list, Tensor]:
    """`_generate_and_score_completions` and `_compute_loss` of TRL 1.16.0's GRPO trainer."""
    rewards = [row.score for row in rows]
    advantages = compared(rewards, rows, k, 1e-4 if scale == "group" else None)
    if scale == "batch":
        advantages = [a / (statistics.stdev(rewards) + 1e-4) for a in advantages]
    losses = []
    for row, a in zip(rows, advantages):
        weights = row.new - row.old
        if level == "sequence":
            weights = (weights.sum() / len(weights)).expand_as(weights)
        coef_1 = weights.exp()
        kl = k3(row) * coef_1
        coef_2 = coef_1.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
        if delta is not None:
            coef_1 = coef_1.clamp(max=delta)
        if loss_type == "cispo":  # its epsilon_high is the bound itself
            terms = coef_1.detach().clamp(max=epsilon_high) * a * row.new
        elif loss_type == "sapo":
            tau = temperatures[0] if a > 0 else temperatures[1]
            terms = a * 4 / (tau * (1 + (tau * (1 - coef_1)).exp()))
        else:
            terms = torch.minimum(coef_1 * a, coef_2 * a)
        losses.append((beta * kl - terms) * row.learned)
    tokens = [len(row.new) * row.learned for row in rows]
    if loss_type in ("dapo", "cispo"):
        inside = [i for part in step for i in part]
        return by_token(rows, advantages), sum(losses[i].sum() for i in inside) / sum(tokens[i] for i in inside)
    parts = []
    for part in step:
        if loss_type in ("grpo", "sapo"):
            parts.append(sum(losses[i].sum() / max(tokens[i], 1) for i in part) / len(part))
        elif loss_type == "bnpo":
            parts.append(sum(losses[i].sum() for i in part) / sum(tokens[i] for i in part))
        else:
            parts.append(sum(losses[i].sum() for i in part) / (len(part) * max_length))
    return by_token(rows, advantages), sum(parts) / len(parts)


def oat_dr_grpo(rows: list[Row], k: int, step: Step, generate_max_length: int) -> tuple[list, Tensor]:
    """`ZeroMathActor.step`, `compute_monte_carlo_advantages` and `learning_step`."""
    advantages = compared([row.score if row.ended else 0.0 for row in rows], rows, k, None)
    inside = chosen(rows, advantages, step)
    losses = [-surrogate((row.new - row.old).exp(), a).sum() / generate_max_length for row, a in inside]
    return by_token(rows, advantages), sum(losses) / len(losses)


def verl_dapo(rows: list[Row], k: int, step: Step) -> tuple[list, Tensor]:
    """`compute_grpo_outcome_advantage`, and equation 8 of the paper over all groups."""
    advantages = compared([row.score for row in rows], rows, k, 1e-6)
    inside = chosen(rows, advantages, step)
    losses = [-surrogate((row.new - row.old).exp(), a, high=0.28).sum() for row, a in inside]
    return by_token(rows, advantages), sum(losses) / sum(len(row.new) for row, _ in inside)


def openrlhf(rows: list[Row], k: int, step: Step, *, baseline: bool, kl_coef: float) -> tuple[list, Tensor]:
    """`compute_advantages_and_returns`, `compute_reward`, `PolicyLoss`; with a baseline the KL is k2 in the loss."""
    shaped = compared([row.score for row in rows], rows, k, None) if baseline else [row.score for row in rows]
    advantages = []
    for row, r in zip(rows, shaped):
        kl = [0.0] * len(row.old) if baseline else (row.old - row.ref).tolist()
        rewards = [-kl_coef * x for x in kl]
        rewards[-1] += max(-10.0, min(10.0, r))
        advantages.append([math.fsum(rewards[t:]) for t in range(len(rewards))])
    tokens = [x for own in advantages for x in own]
    mean, rstd = statistics.fmean(tokens), max(statistics.pvariance(tokens), 1e-8) ** -0.5
    advantages = [[(x - mean) * rstd for x in own] for own in advantages]
    losses = []
    for row, own in chosen(rows, advantages, step):
        rho = (row.new - row.old).exp()
        for t, a in enumerate(own):
            penalty = kl_coef * (row.new[t] - row.ref[t]) ** 2 / 2 if baseline else 0.0
            losses.append(-surrogate(rho[t], a) + penalty)
    return advantages, sum(losses) / len(losses)


def trl_rloo(rows: list[Row], k: int, step: Step, beta: float = 0.05) -> tuple[list, Tensor]:
    """`_generate_and_score_completions` and `_compute_loss` of TRL 1.16.0's RLOO trainer."""
    rewards = [row.score - beta * (row.old - row.ref).sum().item() for row in rows]
    advantages, losses = [0.0] * len(rows), []
    for group in groups_of(rows, k):
        scorable = [i for i in group if rows[i].counts]
        for i in scorable if len(scorable) > 1 else []:
            others = math.fsum(rewards[j] for j in scorable) - rewards[i]
            advantages[i] = rewards[i] - others / (len(scorable) - 1)
    for row, a in chosen(rows, advantages, step):
        if row.counts:
            losses.append(-surrogate((row.new - row.old).sum().exp(), a))
    return by_token(rows, advantages), sum(losses) / len(losses)


def by_token(rows: list[Row], advantages: list[float]) -> list[list[float]]:
    return [[a] * len(row.new) for row, a in zip(rows, advantages)]
