"""When an update is not to be trusted: ratios that explode, and PPO epochs that have gone far enough."""


def ratio_exploded(ratio_sum: float, count: float, limit: float | None) -> bool:
    """Whether the mean ratio over all masked tokens (or responses) of a mini-batch is over `limit`: drop its losses.

    Sums are those of all ranks, so that all decide alike; a mean that is not finite is over any limit. None: never.

    Source: huggingface/trl v0.11.0, trl/trainer/ppo_trainer.py, `loss` (its `ratio_threshold` is 10).
    """
    return limit is not None and not ratio_sum <= limit * max(count, 1)


def went_too_far(approxkl_sum: float, count: float, limit: float | None) -> bool:
    """Whether the policy is further than `limit` from the rollout's: leave out the remaining PPO epochs.

    approxkl_sum: of (log ratio)^2 / 2 over the `count` masked tokens of the latest pass, over all ranks. None: never.

    Source: huggingface/trl v0.11.0, trl/trainer/ppo_trainer.py, `_early_stop` (which measures the mean of
    minus the log ratio, and whose limit is 1.5 x `target_kl`).
    """
    return limit is not None and not approxkl_sum <= limit * max(count, 1)
