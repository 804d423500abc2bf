"""What a step's experience tells, as metrics; and the stop when it is no longer finite."""

import torch
from torch import Tensor

from engine import distributed
from engine.algorithms import Dialect
from engine.errors import RunStopped
from engine.experience import Experience
from engine.learnable import counted_responses
from training.reporting.metrics import Accumulator


def add_experience(metrics: Accumulator, experience: Experience, dialect: Dialect) -> None:
    """The metrics of objective, advantages, returns, value and rollout; sums over responses or over their tokens."""
    rollout, count = experience.rollout, len(experience)
    mask, tokens = rollout.response_mask, rollout.response_mask.sum()
    learned = experience.policy_mask
    total_rewards = experience.rewards.sum()
    metrics.add("objective/kl", experience.kl.sum(), count)
    metrics.add("objective/kl_per_token", experience.kl.sum(), tokens)
    metrics.add_max("objective/kl_coef", experience.kl_coef)
    metrics.add("objective/entropy", (experience.entropy * mask).sum(), tokens)
    metrics.add("objective/scores", experience.scores.sum(), count)
    metrics.add("objective/rlhf_reward", total_rewards, count)
    metrics.add("objective/non_score_reward", total_rewards - experience.shaped_scores.sum(), count)
    _add_advantages(metrics, experience, dialect)
    metrics.add("rollout/response_length", tokens, count)
    metrics.add("rollout/eos_rate", rollout.ended.sum(), count)
    metrics.add_sum("rollout/degenerate", (~learned.any(-1)).sum())


def _add_advantages(metrics: Accumulator, experience: Experience, dialect: Dialect) -> None:
    returns = experience.returns
    if dialect.advantage_estimator == "rloo":  # one a response, the same in all its slots
        responses = counted_responses(experience.policy_mask, dialect)
        metrics.add_moments(experience.advantages[:, 0], responses, mean="advantages/mean", std="advantages/std")
        metrics.add_moments(returns[:, 0], responses, mean="returns/mean", variance="returns/var")
        return
    # Before whitening, after which they would always be 0 and 1.
    metrics.add_moments(
        returns - experience.values, experience.policy_mask, mean="advantages/mean", std="advantages/std"
    )
    metrics.add_moments(returns, experience.policy_mask, mean="returns/mean", variance="returns/var")
    metrics.add_explained_variance("value/explained_variance", experience.values, returns, experience.value_mask)


def distributions(experience: Experience) -> dict[str, Tensor]:
    """All ranks' scores and response lengths, for histograms: tag -> (N,) float32 on the CPU (all ranks call this)."""
    own = {
        "objective/scores_histogram": experience.scores.float().cpu(),
        "rollout/length_histogram": experience.rollout.response_mask.sum(-1).float().cpu(),
    }
    gathered = distributed.all_gather_objects(own)
    return {tag: torch.cat([part[tag] for part in gathered]) for tag in own}


def stop_if_not_finite(step: int, experience: Experience, tokenizer, losses: dict[str, Tensor] | None = None) -> None:
    """Stop on all ranks when a score, log-prob, value or given loss is NaN or infinite on any (all ranks call this).

    Raises: RunStopped, naming the step, what was not finite, and the first such samples of each rank.
    """
    mask = experience.rollout.response_mask
    by_row = {"score": ~experience.scores.isfinite()}
    for name in ("logprobs", "ref_logprobs", "values"):
        by_row[name] = (~getattr(experience, name).isfinite() & mask).any(-1)
    bad_losses = {name: float(value) for name, value in (losses or {}).items() if not torch.isfinite(value).all()}
    if not distributed.any_rank(bool(bad_losses) or any(bool(rows.any()) for rows in by_row.values())):
        return
    rows = torch.stack(list(by_row.values())).any(0)
    shown = (rows.nonzero().flatten() if rows.any() else torch.arange(len(experience)))[:2].tolist()
    report = [
        (
            f"rank {distributed.rank()}",
            {**bad_losses, **{k: int(v.sum()) for k, v in by_row.items() if v.any()}},
            [_described(experience, tokenizer, row) for row in shown],
        )
    ]
    lines = [
        f"{where}: not finite: {', '.join(f'{name} ({value})' for name, value in what.items())}\n" + "\n".join(samples)
        for part in distributed.all_gather_objects(report)
        for where, what, samples in part
        if what
    ]
    raise RunStopped(
        f"step {step}: a number is NaN or infinite, so no weight was changed.\n"
        + "\n".join(lines)
        + "\nLook at: the reward model's score of these texts, the learning rates and gradient norms of "
        "the steps before, objective/kl, and in fp16 the range of the model (bf16 has a wider one). "
        "Restart points written before this step are untouched; go on from one with --resume."
    )


def _described(experience: Experience, tokenizer, row: int) -> str:
    rollout = experience.rollout
    prompt = tokenizer.decode(rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()])
    response = tokenizer.decode(rollout.responses[row][rollout.response_mask[row]])
    return f"  score {experience.scores[row].item():.4g}, prompt {prompt[-200:]!r}, response {response[:300]!r}"
