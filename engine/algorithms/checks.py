"""Checks that a dialect's fields agree with each other and with a run's sizes and models. All checks run before a model
is loaded.

The definition of a field (dialect.py) gives the values that it may have, and the fields without which it has no effect.
This file has the checks that involve several fields; they run when a Dialect is made (`check_relations`). It also has
the checks of the fields that a user set (`check_effect`), of conversations (`check_conversations`) and of a run's sizes
(`check_sizes`).
"""

import dataclasses
from collections.abc import Collection
from functools import partial

from engine.algo.advantages import ESTIMATORS
from engine.algo.corrections import CORRECTIONS
from engine.errors import UserError
from engine.options import unmet


class FieldError(UserError):
    """A dialect's field has an impossible value. reason: why it is impossible, and what to do."""

    def __init__(self, field: str, value: object, reason: str):
        super().__init__(f"{field} {value!r}: {reason}")
        self.field, self.reason = field, reason


def _refuse(dialect, field: str, reason: str) -> None:
    raise FieldError(field, getattr(dialect, field), reason)


def check_relations(dialect) -> None:
    """Raise FieldError for fields that contradict each other."""
    refuse = partial(_refuse, dialect)
    estimator, critic = ESTIMATORS[dialect.advantage_estimator], dialect.has_critic
    its_name = dialect.advantage_estimator.upper()
    grouped, in_groups = estimator.needs_groups, dialect.samples_per_prompt > 1
    one_ratio, endless = dialect.ratio != "token", dialect.sampling == "without_eos"
    correction = CORRECTIONS.get(dialect.correction)
    sampler = dialect.old_logprobs == "sampler"

    # which models the dialect has, and how they learn
    if estimator.needs_critic and not critic:
        others = " or ".join(repr(name) for name, other in ESTIMATORS.items() if not other.needs_critic)
        refuse(
            "critic_start",
            f"{its_name} needs a critic. Set advantage_estimator to {others}, or give the critic a start.",
        )
    if critic and not estimator.needs_critic:
        refuse("critic_start", f"{its_name} has no critic. Set it to none and critic_lr to 0, or take another dialect.")
    for field in ("critic_lr", "critic_weight_decay"):  # no only_with: a user may have to set them to 0
        if not critic and getattr(dialect, field) > 0:
            refuse(field, "there is no critic that could be trained. Set it to 0.")
    if dialect.optimizer == "tf_adam" and (dialect.actor_weight_decay or dialect.critic_weight_decay):
        refuse("optimizer", "it has no weight decay. Set actor_weight_decay and critic_weight_decay to 0.")

    # sampling, and the ends of responses
    if dialect.sampling_temperature <= 0:
        divisor = dialect.sampling_temperature
        refuse(
            "temperature_offset", f"logits would be divided by {divisor}. The sum with temperature should be over 0."
        )
    if dialect.truncate_after > 0 and not dialect.truncate_token:
        refuse("truncate_after", "it says from where on truncate_token counts, and there is none.")
    if dialect.cut_responses == "closed" and dialect.truncate_token not in ("", "eos"):
        refuse(
            "cut_responses", f"responses end with {dialect.truncate_token!r} (truncate_token) here. Set it to 'open'."
        )
    if endless and dialect.truncate_token == "eos":
        refuse("truncate_token", "sampling 'without_eos' never gives that.")
    if endless and dialect.missing_end != "none" and not dialect.truncate_token:
        refuse(
            "missing_end",
            "with sampling 'without_eos' every end would be missing. Give a truncate_token, or set missing_end to "
            "'none'.",
        )
    if endless and dialect.mask_truncated and not dialect.truncate_token:
        refuse(
            "mask_truncated",
            "with sampling 'without_eos' no response has an end, and nothing would be learned. Give a truncate_token, "
            "or set it to False.",
        )
    if sampler and dialect._counts_past_end:
        refuse(
            "old_logprobs",
            "the sampler knows the log-probs of what it drew, and other positions count too here. Set it to 'forward'.",
        )
    if sampler and dialect.length_rule == "not_pad":
        refuse(
            "old_logprobs", "length_rule 'not_pad' hides pad tokens, which the sampler did not. Set it to 'forward'."
        )
    if sampler and dialect.measures_prompts:
        refuse(
            "old_logprobs",
            "the sampler has no log-probs of the prompt, which kl_measure 'exp_delta' sums too. Set it to 'forward'.",
        )

    # groups of responses to one prompt
    if grouped and not in_groups:
        refuse(
            "samples_per_prompt", f"{its_name} compares the responses to one prompt with each other. Give 2 or more."
        )
    if dialect.dynamic_sampling > 1 and not in_groups:
        refuse(
            "dynamic_sampling",
            "it draws until the scores of the responses to one prompt differ, and samples_per_prompt is 1. Give 2 or "
            "more of those, or set it to 1.",
        )
    if grouped and dialect.advantages_at != "rollout":
        refuse(
            "advantages_at",
            f"{its_name} needs all responses to a prompt together, which a mini-batch need not have. Set it to "
            "'rollout'.",
        )
    if dialect.advantage_scale != "none" and not (grouped and estimator.per_response):
        refuse(
            "advantage_scale",
            f"{its_name} has no difference of rewards within a group that could be divided. Set it to 'none'; "
            "whiten_advantages scales any advantages.",
        )
    if estimator.per_response and dialect.whiten_rewards:
        refuse("whiten_rewards", f"{its_name} has one reward a response. Set it to False.")

    # KL, ratios, clipping and corrections
    if dialect.kl_controller == "adaptive" and not dialect.kl_coef:
        refuse(
            "kl_coef",
            "an adaptive coefficient is multiplied, and stays 0. Start at more, or set kl_controller to 'fixed'.",
        )
    if dialect.kl_times_ratio and dialect.kl_in == "reward":
        refuse("kl_times_ratio", "it is for a penalty in the loss. Set kl_in to 'loss', or this to False.")
    if one_ratio and not estimator.per_response:
        refuse("ratio", f"{its_name} has one advantage a token, which needs one ratio a token. Set it to 'token'.")
    if one_ratio and dialect.loss_scope in ("response", "fixed_length"):
        refuse(
            "loss_scope",
            "one ratio a response gives one loss a response, and 'optimizer_step' is their mean. Set it to that.",
        )
    if one_ratio and dialect.surrogate != "clip":
        refuse("surrogate", "it has one ratio a token. Set ratio to 'token', or surrogate to 'clip'.")
    highest = 1 + (dialect.clip_range if dialect.clip_range_high is None else dialect.clip_range_high)
    if dialect.dual_clip is not None and dialect.dual_clip <= highest:
        refuse(
            "dual_clip", f"it is for ratios that clipping leaves alone, over {highest:g}. Give more than that, or none."
        )
    if correction and sampler:
        refuse(
            "correction",
            "it makes up for the difference between old log-probs and the sampler's, and here they are one. Set "
            "old_logprobs to 'forward'.",
        )
    if correction and correction.divergence and dialect.correction_max >= 1:
        refuse(
            "correction_max",
            f"with correction {dialect.correction!r} it is the largest divergence of two probabilities. Give less than "
            "1, such as 0.05.",
        )
    if not (correction and correction.divergence) and dialect.correction_max < 1:
        refuse("correction_max", "as the upper bound of a ratio it must be at least 1.")
    if one_ratio and correction and not correction.of_responses:
        refuse(
            "correction",
            "with one ratio a response there is one loss a response. Set it to 'sequence_truncate' or 'sequence_mask'.",
        )


def check_effect(dialect, given: Collection[str]) -> None:
    """Raise FieldError if one of the fields that the user set, `given`, has no effect in this dialect."""
    refuse = partial(_refuse, dialect)
    for spec in dataclasses.fields(dialect):
        missing = unmet(dialect, spec) if spec.name in given else []
        if missing and [name for name, _ in missing] == ["critic_start"]:
            refuse(spec.name, f"the dialect {dialect.name} has no critic. Leave it out.")
        elif missing:
            cause = " and ".join(f"{name} is {getattr(dialect, name)!r}" for name, _ in missing)
            refuse(spec.name, f"it has no effect where {cause}. Change that, or leave it out.")
    estimator = ESTIMATORS[dialect.advantage_estimator]
    if "gamma" in given and not (dialect.has_critic or estimator.discounts):
        refuse("gamma", f"the dialect {dialect.name} has no critic, nor a discount. Leave it out.")
    if "lam" in given and dialect.value_lam is not None and dialect.length_adaptive_alpha is not None:
        refuse("lam", "value_lam and length_adaptive_alpha say both lambdas. Leave it out, or one of these.")
    if "whiten_positions" in given and estimator.per_response and not dialect.whiten_rewards:
        refuse(
            "whiten_positions",
            f"the dialect {dialect.name} has one advantage a response, and whitens no positions. Leave it out.",
        )
    if "score_order" in given and (dialect.score_scaling == "none" or dialect.score_clip is None):
        refuse(
            "score_order", "scores are not both scaled and clipped. Set score_scaling and score_clip, or leave it out."
        )
    if "clip_range_high" in given and dialect.clip_range_high == dialect.clip_range:
        refuse("clip_range_high", "clip_range is the same, upwards and downwards. Give another value, or leave it out.")
    if dialect.ppo_epochs * dialect.mini_batches == 1 and dialect.old_logprobs != "sampler":
        for field in ("surrogate", "gate_temperatures", "clip_range_high", "dual_clip"):
            if field in given and getattr(dialect, field) is not None:
                refuse(
                    field,
                    "there is one optimizer step a rollout, in which every ratio is 1 and none is clipped. Give "
                    "ppo_epochs or mini_batches, or leave it out.",
                )
    if "early_stop_kl" in given and dialect.early_stop_kl is not None and dialect.ppo_epochs == 1:
        refuse(
            "early_stop_kl", "ppo_epochs is 1, and no later epoch could be left out. Give ppo_epochs, or leave it out."
        )
    if "temperature_in_logprobs" in given and dialect.sampling_temperature == 1.0:
        refuse(
            "temperature_in_logprobs",
            "the temperature is 1, which changes no logits. Give another temperature, or leave it out.",
        )


IN_CONVERSATIONS = {
    "sampling": "until_eos",
    "truncate_token": "",
    "truncate_after": 0,
    "score_before_pad": False,
    "length_rule": "sampled",
    "kl_positions": "response",
    "score_position": "last",
    "value_positions": "response",
    "value_loss_positions": "response",
    "whiten_positions": "response",
}
"""{field: the only value with which a dialect takes conversations}. Turns end by themselves, nothing is cut, and no
positions count but those of drawn tokens."""


def check_conversations(dialect) -> None:
    """Raise UserError if the dialect does not take conversations, responses into which an environment inserts tokens.
    The message names the fields that stand in the way, and what to set."""
    wanted = {name: value for name, value in IN_CONVERSATIONS.items() if getattr(dialect, name) != value}
    if wanted:
        has = ", ".join(f"{name} {getattr(dialect, name)!r}" for name in wanted)
        settings = " ".join(f"{name}={str(value).lower()}" for name, value in wanted.items())
        raise UserError(
            f"the dialect {dialect.name} has {has}. In conversations (--environment) only the tokens that the policy "
            f"draws count, and none are cut. Give --set {settings}, or another --dialect, such as default or grpo."
        )


def check_sizes(
    dialect,
    *,
    rows_per_rank: int,
    mini_batches: int = 1,
    micro_batch_size: int | None = None,
    ranks: int = 1,
) -> None:
    """Check that a dialect can run with these batch sizes.

    Args:
        rows_per_rank: number of responses that each rank generates in a PPO step.
        mini_batches: number of optimizer steps in one pass over these responses.
        micro_batch_size: number of responses in one forward and backward pass; None: all responses of an optimizer
            step.
        ranks: number of ranks.

    Raises: UserError if it cannot.
    """
    unscaled = {"score_scaling": "none", "likelihood_coef": 0.0}
    scaled = [f"{name} {getattr(dialect, name)!r}" for name in unscaled if getattr(dialect, name) != unscaled[name]]
    if scaled and rows_per_rank * ranks < 2:
        raise UserError(f"{scaled[0]} with 1 response a step: one number has no deviation. Make 2 or more.")
    together = rows_per_rank if dialect.advantages_at == "rollout" else rows_per_rank // mini_batches
    if dialect.advantages_at == "micro_batch" and micro_batch_size is not None and together > micro_batch_size:
        together = together % micro_batch_size or micro_batch_size  # the last micro-batch holds the remainder
    if dialect.whiten_over == "all_ranks":
        together *= ranks
    field = "whiten_advantages" if dialect.whiten_advantages else "whiten_rewards"
    if together == 1 and getattr(dialect, field):
        raise UserError(
            f"{field} over a batch of one response (advantages_at {dialect.advantages_at!r}, whiten_over "
            f"{dialect.whiten_over!r}): its tokens would be compared with each other alone. Make the batch "
            f"larger, or set {field} to False."
        )
