"""Contradictions between a dialect and a run's sizes and models, found before any model is loaded."""

from collections.abc import Collection

from engine.algo.advantages import ESTIMATORS
from engine.algorithms.dialect import Dialect
from engine.errors import UserError

# Fields that say something of a critic alone.
CRITIC_FIELDS = (
    *("critic_lr", "critic_weight_decay", "value_clip_range", "value_factor", "lam", "value_lam"),
    *("length_adaptive_alpha", "critic_epochs", "critic_mini_batches"),
)
# Those of the adaptive controller alone.
CONTROLLER_FIELDS = ("kl_target", "kl_horizon", "kl_measure", "kl_update")
# Those of whitening.
WHITENING_FIELDS = ("whiten_slots", "whiten_over", "whiten_variance")
ONE_UPDATE = (
    "there is one optimizer step a rollout, in which every ratio is 1 and none is clipped. Give ppo_epochs or "
    "mini_batches, or leave it out."
)


def check(
    dialect: Dialect,
    *,
    rows_per_rank: int | None = None,
    mini_batches: int = 1,
    micro_batch_size: int | None = None,
    ranks: int = 1,
    layers: int | None = None,
    given: Collection[str] = (),
) -> None:
    """Refuse what the dialect alone cannot know; None leaves a check out.

    Args:
        rows_per_rank: responses that each rank makes in a step.
        mini_batches: optimizer steps in a pass over them.
        micro_batch_size: responses in a forward and backward pass.
        ranks: how many there are.
        layers: how many the actor has.
        given: dialect fields that the user gave a value.

    Raises: UserError with the reason.
    """
    for fields, idle, why in _without_effect(dialect):
        for field in fields:
            if idle and field in given:
                raise UserError(f"{field} is given, but {why}")
    if layers is not None and dialect.hydra_layers > layers:
        raise UserError(f"hydra_layers {dialect.hydra_layers}: the actor has {layers} layers. Give at most that many.")
    if rows_per_rank is None:
        return
    if dialect.score_scaling != "none" and rows_per_rank * ranks < 2:
        raise UserError(
            f"score_scaling {dialect.score_scaling!r} with 1 response a step: one score has no deviation. "
            "Make 2 or more."
        )
    pool = _whitened_together(dialect, rows_per_rank, mini_batches, micro_batch_size, ranks)
    if pool == 1 and (dialect.whiten_advantages or dialect.whiten_rewards):
        field = "whiten_advantages" if dialect.whiten_advantages else "whiten_rewards"
        raise UserError(
            f"{field} over a batch of one response (advantages_at {dialect.advantages_at!r}, whiten_over "
            f"{dialect.whiten_over!r}): its tokens would be compared with each other alone. Make the batch "
            f"larger, or set {field} to False."
        )


def _without_effect(dialect: Dialect) -> list[tuple[Collection[str], bool, str]]:
    """(fields, whether they have no effect here, why and what to do)."""
    unscaled, whitens = dialect.score_scaling == "none", dialect.whiten_advantages or dialect.whiten_rewards
    discounts = dialect.has_critic or ESTIMATORS[dialect.advantage_estimator].discounts
    one_update = dialect.ppo_epochs * dialect.mini_batches == 1 and dialect.old_logprobs != "sampler"
    return [
        (CRITIC_FIELDS, not dialect.has_critic, f"the dialect {dialect.name} has no critic. Leave it out."),
        (("gamma",), not discounts, f"the dialect {dialect.name} has no critic, nor a discount. Leave it out."),
        (
            ("scale_variance", "scale_eps"),
            dialect.advantage_scale == "none",
            "advantage_scale is 'none'. Set it to 'group' or 'batch', or leave it out.",
        ),
        (
            ("clip_range_high",),
            dialect.clip_range_high == dialect.clip_range,
            "clip_range is the same, upwards and downwards. Give another value, or leave it out.",
        ),
        (
            ("clip_range_high",),
            dialect.clip_range_high is not None and one_update,
            ONE_UPDATE,
        ),
        (("dual_clip",), dialect.dual_clip is not None and one_update, ONE_UPDATE),
        (
            ("lam",),
            dialect.value_lam is not None and dialect.length_adaptive_alpha is not None,
            "value_lam and length_adaptive_alpha say both lambdas. Leave it out, or one of these.",
        ),
        (
            ("correction_min", "correction_max"),
            dialect.correction == "none",
            "correction is 'none', and no ratio would be cut. Give correction, or leave it out.",
        ),
        (
            ("whiten_slots",),
            ESTIMATORS[dialect.advantage_estimator].per_response and not dialect.whiten_rewards,
            f"the dialect {dialect.name} has one advantage a response, and whitens no positions. Leave it out.",
        ),
        (
            CONTROLLER_FIELDS,
            dialect.kl_controller == "fixed",
            "kl_controller is 'fixed', and the coefficient would not change. Set kl_controller to 'adaptive', or leave "
            "it out.",
        ),
        (
            ("missing_end_value",),
            dialect.missing_end == "none",
            "missing_end is 'none', and no score would change. Set missing_end to 'replace' or 'subtract', or leave it "
            "out.",
        ),
        (
            ("overlong_penalty",),
            dialect.overlong_buffer == 0,
            "overlong_buffer is 0, and no score would change. Give overlong_buffer, or leave it out.",
        ),
        (
            ("score_order",),
            unscaled or dialect.score_clip is None,
            "scores are not both scaled and clipped. Set score_scaling and score_clip, or leave it out.",
        ),
        (
            WHITENING_FIELDS,
            not whitens,
            "nothing is whitened. Set whiten_advantages or whiten_rewards to true, or leave it out.",
        ),
        (
            ("decay",),
            not (dialect.actor_weight_decay or dialect.critic_weight_decay),
            "there is no weight decay. Give actor_weight_decay or critic_weight_decay, or leave it out.",
        ),
        (
            ("warmup_from_zero",),
            dialect.warmup_steps == 0,
            "warmup_steps is 0. Give warmup_steps, or leave it out.",
        ),
        (
            ("temperature_in_logprobs",),
            dialect.sampling_temperature == 1.0,
            "the temperature is 1, which changes no logits. Give another temperature, or leave it out.",
        ),
        (
            ("early_stop_kl",),
            dialect.early_stop_kl is not None and dialect.ppo_epochs == 1,
            "ppo_epochs is 1, and no later epoch could be left out. Give ppo_epochs, or leave it out.",
        ),
    ]


def _whitened_together(dialect: Dialect, rows: int, mini_batches: int, micro_batch_size: int | None, ranks: int) -> int:
    """How many responses share their statistics, at least."""
    if dialect.advantages_at != "rollout":
        rows = rows // mini_batches
    if dialect.advantages_at == "micro_batch" and micro_batch_size is not None:
        rows = rows % micro_batch_size or micro_batch_size if rows > micro_batch_size else rows  # the last has the rest
    return rows * (ranks if dialect.whiten_over == "all_ranks" else 1)
