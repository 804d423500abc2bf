"""Which values the fields of a dialect may have, alone and together."""

import dataclasses
import math

from engine.algo.advantages import ESTIMATORS
from engine.algo.corrections import CORRECTIONS
from engine.errors import UserError

# What a field may say; what it means stands beside the field, or in the function of engine/algo that is told it.
VALUES = {
    "kl_estimator": ("k1", "k2", "k3"),
    "kl_in": ("reward", "loss"),
    "kl_controller": ("fixed", "adaptive"),
    "kl_measure": ("k1", "exp_delta"),
    "kl_update": ("step", "epoch"),
    "sampling": ("until_eos", "fixed", "without_eos"),
    "old_logprobs": ("auto", "forward", "sampler"),
    "pad_token": ("tokenizer", "never_eos", "padding", "eos", "eos_unless_llama"),
    "length_rule": ("sampled", "before_pad", "not_pad", "row"),
    "reward_slots": ("response", "one_past", "after_tokens", "all"),
    "score_slot": ("last", "after_last", "two_after"),
    "value_slots": ("response", "one_past", "two_past", "all"),
    "value_loss_slots": ("response", "one_past"),
    "missing_end": ("none", "replace", "subtract"),
    "score_scaling": ("none", "running", "first_batch"),
    "score_order": ("scale_clip", "clip_scale"),
    "advantage_estimator": ESTIMATORS,
    "advantage_scale": ("none", "group", "batch"),
    "scale_variance": ("unbiased", "biased"),
    "advantages_at": ("rollout", "mini_batch", "micro_batch"),
    "whiten_slots": ("response", "row"),
    "whiten_over": ("all_ranks", "rank"),
    "whiten_variance": ("biased", "unbiased", "unbiased_alone"),
    "ratio": ("token", "response", "response_mean"),
    "correction": ("none", *CORRECTIONS),
    "loss_scope": ("optimizer_step", "micro_batch", "micro_batch_sum", "response", "fixed_length"),
    "lr_schedule": ("linear", "cosine", "constant", "constant_with_warmup", "cosine_with_restarts"),
    "lr_per": ("optimizer_step", "step"),
    "optimizer": ("adamw", "tf_adam"),
    "decay": ("matrices", "all", "deepspeed_chat"),
    "critic_start": ("reward_model", "zero_head", "none"),
}
RANGES = (  # fields, what they must be, the test of it; None is not tested
    (
        (
            "kl_target",
            "kl_horizon",
            "temperature",
            "samples_per_prompt",
            "dynamic_sampling",
            "overlong_penalty",
            "score_clip",
            "clip_range",
            "clip_range_high",
            "dual_clip",
            "scale_eps",
            "value_clip_range",
            "length_adaptive_alpha",
            "early_stop_kl",
            "ratio_limit",
            "ppo_epochs",
            "mini_batches",
            "critic_epochs",
            "critic_mini_batches",
            "eps",
        ),
        "greater than 0",
        lambda value: value > 0,
    ),
    (
        (
            "kl_coef",
            "gamma",
            "lam",
            "value_lam",
            "ema_decay",
            "truncate_after",
            "min_response_tokens",
            "value_factor",
            "actor_lr",
            "critic_lr",
            "warmup_steps",
            "actor_weight_decay",
            "critic_weight_decay",
            "max_grad_norm",
            "hydra_layers",
            "correction_min",
            "overlong_buffer",
        ),
        "at least 0",
        lambda value: value >= 0,
    ),
    (
        ("gamma", "lam", "value_lam", "ema_decay", "correction_min", "overlong_buffer"),
        "at most 1",
        lambda value: value <= 1,
    ),
    (("correction_max",), "at least 1", lambda value: value >= 1),
)


class FieldError(UserError):
    """A field of a dialect with a value that it cannot have; `reason` says why, and what to do."""

    def __init__(self, field: str, value: object, reason: str):
        super().__init__(f"{field} {value!r}: {reason}")
        self.field, self.reason = field, reason


def check_values(dialect) -> None:
    """Raises: FieldError for a value that a field cannot have, and for values that contradict each other."""
    for field, known in VALUES.items():
        if getattr(dialect, field) not in known:
            raise FieldError(field, getattr(dialect, field), f"known are {', '.join(known)}.")
    for fields, bound, met in RANGES:
        for field in fields:
            if getattr(dialect, field) is not None and not met(getattr(dialect, field)):
                raise FieldError(field, getattr(dialect, field), f"must be {bound}.")
    if not all(0 <= beta < 1 for beta in dialect.betas):
        raise FieldError("betas", dialect.betas, "each must be at least 0 and less than 1.")
    for spec in dataclasses.fields(dialect):
        value = getattr(dialect, spec.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise FieldError(spec.name, value, "must be finite.")
    for wrong, field, why in [*_contradictions(dialect), *_of_responses(dialect)]:
        if wrong:
            raise FieldError(field, getattr(dialect, field), why)


def _contradictions(dialect) -> list[tuple[bool, str, str]]:
    """(whether it is there, the field to change, why and how) of all that cannot go together."""
    estimator, critic = ESTIMATORS[dialect.advantage_estimator], dialect.has_critic
    its_name = dialect.advantage_estimator.upper()
    critic_free = " or ".join(repr(name) for name, other in ESTIMATORS.items() if not other.needs_critic)
    decays = bool(dialect.actor_weight_decay or dialect.critic_weight_decay)
    endless = dialect.sampling == "without_eos"
    return [
        (
            dialect.sampling_temperature <= 0,
            "temperature_offset",
            f"logits would be divided by {dialect.sampling_temperature}. The sum with temperature should be over 0.",
        ),
        (
            estimator.needs_groups and dialect.samples_per_prompt < 2,
            "samples_per_prompt",
            f"{its_name} compares the responses to one prompt with each other. Give 2 or more.",
        ),
        (
            dialect.dynamic_sampling > 1 and dialect.samples_per_prompt < 2,
            "dynamic_sampling",
            "it draws until the scores of the responses to one prompt differ, and samples_per_prompt is 1. Give 2 or "
            "more of those, or set it to 1.",
        ),
        (critic and not estimator.needs_critic, "critic_start", f"{its_name} has no critic. Set it to 'none'."),
        (
            estimator.needs_groups and dialect.advantages_at != "rollout",
            "advantages_at",
            f"{its_name} needs all responses to a prompt together, which a mini-batch need not have. Set it to "
            "'rollout'.",
        ),
        (
            estimator.per_response and dialect.whiten_rewards,
            "whiten_rewards",
            f"{its_name} has one reward a response. Set it to False.",
        ),
        (
            estimator.needs_critic and not critic,
            "critic_start",
            f"{its_name} needs a critic. Set advantage_estimator to {critic_free}, or give the critic a start.",
        ),
        (
            dialect.correction != "none" and dialect.old_logprobs == "sampler",
            "correction",
            "it makes up for the difference between old log-probs and the sampler's, and here they are one. Set "
            "old_logprobs to 'forward'.",
        ),
        (not critic and dialect.critic_lr > 0, "critic_lr", "there is no critic that could be trained. Set it to 0."),
        (
            not critic and dialect.critic_weight_decay > 0,
            "critic_weight_decay",
            "there is no critic that could be trained. Set it to 0.",
        ),
        (
            dialect.optimizer == "tf_adam" and decays,
            "optimizer",
            "it has no weight decay. Set actor_weight_decay and critic_weight_decay to 0.",
        ),
        (
            dialect.kl_controller == "adaptive" and not dialect.kl_coef,
            "kl_coef",
            "an adaptive coefficient is multiplied, and stays 0. Start at more, or set kl_controller to 'fixed'.",
        ),
        (
            dialect.truncate_after > 0 and not dialect.truncate_token,
            "truncate_after",
            "it says from where on truncate_token counts, and there is none.",
        ),
        (endless and dialect.truncate_token == "eos", "truncate_token", "sampling 'without_eos' never gives that."),
        (
            dialect.old_logprobs == "sampler" and dialect._counts_past_end,
            "old_logprobs",
            "the sampler knows the log-probs of what it drew, and other positions count too here. Set it to 'forward'.",
        ),
        (
            dialect.old_logprobs == "sampler" and dialect.length_rule == "not_pad",
            "old_logprobs",
            "length_rule 'not_pad' hides pad tokens, which the sampler did not. Set it to 'forward'.",
        ),
        (
            dialect.old_logprobs == "sampler" and dialect.measures_prompts,
            "old_logprobs",
            "the sampler has no log-probs of the prompt, which kl_measure 'exp_delta' sums too. Set it to 'forward'.",
        ),
        (
            endless and dialect.missing_end != "none" and not dialect.truncate_token,
            "missing_end",
            "with sampling 'without_eos' every end would be missing. Give a truncate_token, or set missing_end to "
            "'none'.",
        ),
        (
            endless and dialect.mask_truncated and not dialect.truncate_token,
            "mask_truncated",
            "with sampling 'without_eos' no response has an end, and nothing would be learned. Give a truncate_token, "
            "or set it to False.",
        ),
    ]


def _of_responses(dialect) -> list[tuple[bool, str, str]]:
    """The same of what groups and ratios of whole responses, and clipping, ask for."""
    estimator, its_name = ESTIMATORS[dialect.advantage_estimator], dialect.advantage_estimator.upper()
    one_ratio = dialect.ratio != "token"
    highest = 1 + (dialect.clip_range if dialect.clip_range_high is None else dialect.clip_range_high)
    return [
        (
            one_ratio and not estimator.per_response,
            "ratio",
            f"{its_name} has one advantage a token, which needs one ratio a token. Set it to 'token'.",
        ),
        (
            one_ratio and dialect.correction.startswith("token"),
            "correction",
            "with one ratio a response there is one loss a response. Set it to 'sequence_truncate' or 'sequence_mask'.",
        ),
        (
            one_ratio and dialect.loss_scope in ("response", "fixed_length"),
            "loss_scope",
            "one ratio a response gives one loss a response, and 'optimizer_step' is their mean. Set it to that.",
        ),
        (
            dialect.advantage_scale != "none" and not (estimator.needs_groups and estimator.per_response),
            "advantage_scale",
            f"{its_name} has no difference of rewards within a group that could be divided. Set it to 'none'; "
            "whiten_advantages scales any advantages.",
        ),
        (
            dialect.dual_clip is not None and dialect.dual_clip <= highest,
            "dual_clip",
            f"it is for ratios that clipping leaves alone, over {highest:g}. Give more than that, or none.",
        ),
        (
            dialect.kl_times_ratio and dialect.kl_in == "reward",
            "kl_times_ratio",
            "it is for a penalty in the loss. Set kl_in to 'loss', or this to False.",
        ),
    ]
