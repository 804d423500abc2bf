"""The fields of a dialect, their defaults with reasons, and what follows from them; fields as words of a command line
(`kl_coef=0.2 score_clip=none query_start=.`), and the tokens that its texts name."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass

from engine.algorithms.values import check_values
from engine.errors import UserError, nearest

TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One system's choices; the comments say why `default`'s, which stand here, are what we recommend."""

    name: str = "default"

    # KL penalty. A fixed coefficient makes curves of score against KL comparable between runs.
    kl_coef: float = 0.1
    kl_estimator: str = "k1"  # the only one whose expected gradient, in the reward, is the KL's own
    kl_in: str = "reward"  # "reward" of each token, or the policy's "loss": there k2 has that gradient
    kl_times_ratio: bool = False  # in the loss, each estimate times the policy's ratio: then k3 has that gradient, too
    kl_controller: str = "fixed"  # "fixed", or "adaptive": steered towards kl_target
    kl_target: float = 6.0  # nats a response; used by the adaptive controller only, as the next three
    kl_horizon: float = 10000.0  # responses in which the coefficient can change by a fifth
    kl_measure: str = "k1"  # what is steered: "k1" over the response, or trlX's "exp_delta" over all tokens
    kl_update: str = "step"  # after each "step" with its responses; or PPO "epoch" with a mini-batch's

    # Sampling from the policy as it is; log-probs are taken at the same temperature, by the function that learns.
    sampling: str = "until_eos"  # or "fixed" length with EOS an ordinary token, or "without_eos": suppressed
    temperature: float = 1.0
    temperature_offset: float = 0.0  # added to it wherever logits are divided by it
    temperature_in_logprobs: bool = True
    old_logprobs: str = "auto"  # of a second "forward" pass, so that the first ratio is 1; or the "sampler"'s; "auto":
    # the sampler's in fp32 where it computes as the actor does, so that both are the same within rounding, and where no
    # other positions count than those that were drawn
    samples_per_prompt: int = 1
    dynamic_sampling: int = 1  # batches of prompts that may be drawn until groups whose scores differ fill a step

    # Texts. "" is none, "eos" the tokenizer's EOS, anything else a text of one token.
    query_start: str = ""  # a query begins after the first such token
    query_end: str = ""  # and ends with the last one
    truncate_token: str = ""  # what is scored ends with the first such token
    truncate_after: int = 0  # at or after this position
    score_before_pad: bool = False  # and before the first pad token, where one was drawn
    pad_token: str = "tokenizer"  # which token pads, by a rule of engine/models/reading.py

    # Which positions count. What was sampled is what is learned, EOS included, or the model never learns to stop.
    length_rule: str = "sampled"  # "sampled" tokens, or those "before_pad", those "not_pad", the whole "row"
    reward_slots: str = "response"  # KL counts at the positions of the "response", also "one_past" it, of these at
    # those "after_tokens" that count, or at "all"
    score_slot: str = "last"  # "last" token of the response, "after_last", "two_after"
    value_slots: str = "response"  # where values are kept; as reward_slots, and "two_past"; 0 elsewhere
    value_loss_slots: str = "response"  # or also "one_past" it: the value of the complete response
    min_response_tokens: int = 1  # shorter responses are masked out and counted as degenerate

    # Scores. A clip far out stops a reward model's outliers without bending its ordinary scores (5 deviations).
    score_clip: float | None = 5.0
    score_scaling: str = "none"  # scores are divided by the "running" deviation or the "first_batch"'s
    score_order: str = "scale_clip"  # or "clip_scale"
    missing_end: str = "none"  # a score without end: "replace" by the value below, "subtract" it
    missing_end_value: float = 0.0
    overlong_buffer: float = 0.0  # the last share of the longest response, in which a score falls by up to the penalty
    overlong_penalty: float = 1.0
    mask_truncated: bool = False  # nothing is learned from a response without end, which others are compared with

    # Advantages. Whitening over all tokens of all ranks makes learning rates carry over between rewards of any scale.
    advantage_estimator: str = "gae"  # without a critic "rloo" or "grpo": against the other responses to the prompt or
    # their mean; "reinforce": the rewards to come; "reinforce_baseline": those less the group's mean
    advantage_scale: str = "none"  # "grpo"'s and "rloo"'s are divided by the deviation of the rewards of the "group",
    # or of the whole "batch"
    scale_variance: str = "unbiased"  # or "biased": that deviation's
    scale_eps: float = 1e-4  # is added to it
    gamma: float = 1.0  # a response is short, and its end is what is scored: nothing to discount
    lam: float = 0.95  # the value used since Ziegler et al. 2019
    value_lam: float | None = None  # lambda of the returns that the critic learns; none: as lam. VC-PPO has 1
    length_adaptive_alpha: float | None = None  # the advantages' lambda is 1 - 1 / (alpha L); VAPO has 0.05
    advantages_at: str = "rollout"  # once a "rollout", or anew in each "mini_batch" or "micro_batch"; whitening too
    whiten_rewards: bool = False  # to variance 1, the mean kept
    whiten_advantages: bool = True
    whiten_slots: str = "response"  # statistics over the positions of the "response", or over the padded "row"
    whiten_over: str = "all_ranks"  # or each "rank" its own
    whiten_variance: str = "biased"  # "unbiased"; "unbiased_alone": that with one rank only

    # Losses. One mean over all tokens of the optimizer step: no number of ranks or micro-batches changes it.
    ratio: str = "token"  # of each "token", or of the whole "response", or "response_mean": its tokens' geometric mean
    clip_range: float = 0.2
    clip_range_high: float | None = None  # upwards, if not as far as downwards: DAPO's clip-higher
    dual_clip: float | None = None  # a ratio counts at most as this where the advantage is negative
    value_clip_range: float | None = 0.2  # none: values are not clipped
    value_factor: float = 1.0  # the critic has an optimizer of its own, which a factor would not change
    loss_scope: str = "optimizer_step"  # or mean of "micro_batch" means, or their sum: "micro_batch_sum"; the policy's
    # also mean of each "response"'s mean, or sum over responses times a "fixed_length": --max_answer_seq_len
    early_stop_kl: float | None = None  # remaining PPO epochs are left out when approxkl is over this
    ratio_limit: float | None = None  # an optimizer step whose mean ratio is over this is left out

    # Importance sampling from a sampler that is not quite the policy: 16 bits, another engine. No dialect has it.
    correction: str = "none"  # "token_truncate", "token_mask", "sequence_truncate", "sequence_mask": the policy's loss
    # times the ratio of its old log-probs, then always a forward pass's, to the sampler's
    correction_min: float = 0.0  # a ratio under this is cut to it, or masked; IcePop has 0.5 here
    correction_max: float = 2.0  # and one over this: verl's threshold

    # Optimization. Four passes over each rollout learn about twice as much per sample as one; clipping bounds them.
    ppo_epochs: int = 4
    mini_batches: int = 1  # optimizer steps in each pass
    critic_epochs: int | None = None  # the critic's own passes, made before the actor's; none: as ppo_epochs
    critic_mini_batches: int | None = None  # and its optimizer steps in each; none: as mini_batches
    actor_lr: float = 1e-5
    critic_lr: float = 1e-5
    lr_schedule: str = "linear"
    lr_per: str = "optimizer_step"  # the rate changes with each "optimizer_step", or "step" (rollout)
    warmup_steps: int = 10  # optimizer steps in which Adam's second moments fill
    warmup_from_zero: bool = False  # the first step of warm-up has a rate, or it would be lost
    optimizer: str = "adamw"  # or "tf_adam": epsilon as TensorFlow has it
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    actor_weight_decay: float = 0.0  # the KL penalty is the regulariser
    critic_weight_decay: float = 0.0
    decay: str = "matrices"  # what weight decay shrinks; or "all": biases and norms too; or by "deepspeed_chat"'s names
    max_grad_norm: float = 1.0  # 0: no clipping

    # Models. A critic that starts as the reward model knows what a good end is worth.
    critic_start: str = "reward_model"  # or a "zero_head" on the SFT model; "none": there is no critic
    hydra_layers: int = 0  # only the actor's last k layers train; the reference is frozen copies of those
    ema_decay: float = 0.992  # DeepSpeed-Chat's; only used where an EMA is asked for

    def __post_init__(self):
        """Raises: FieldError for a value that a field cannot have, and for values that contradict each other."""
        check_values(self)

    def override(self, **values) -> "Dialect":
        """This dialect with some fields replaced; values of None leave theirs as they are.

        Raises: UserError for a field that does not exist, and for what cannot go together.
        """
        own = {name: getattr(self, name, None) for name in values}
        return self.replaced(**{name: own[name] if value is None else value for name, value in values.items()})

    def replaced(self, **values) -> "Dialect":
        """As `override`, but None is a value like others."""
        for name in values:
            self.check_field(name)
        return dataclasses.replace(self, **values)

    @classmethod
    def check_field(cls, name: str) -> None:
        """Raise UserError, listing the fields, if there is none of this name."""
        known = [field.name for field in dataclasses.fields(cls)]
        if name not in known:
            near = nearest(name, known)
            raise UserError(
                f"dialect field {name!r} does not exist{f'; did you mean {near}?' if near else '.'} "
                f"Known: {', '.join(known)}."
            )

    def differences(self, other: "Dialect") -> dict[str, tuple]:
        """The fields in which two dialects differ, name aside: {field: (own value, other's value)}."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name) != getattr(other, field.name)
        }

    def takes_sampled_logprobs(self, exact: bool) -> bool:
        """Whether old log-probs are the sampler's where a rollout has them.

        exact: whether they are a forward pass's within rounding. They are of what was drawn, which must be all that
        counts, and all that is attended to.
        """
        wanted = self.old_logprobs == "sampler" or (self.old_logprobs == "auto" and exact)
        others_count = self._counts_past_end or self.measures_prompts or self.length_rule == "not_pad"
        return wanted and self.correction == "none" and not others_count

    @property
    def sampling_temperature(self) -> float:
        """What logits are divided by when tokens are drawn."""
        return self.temperature + self.temperature_offset

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before log-probs are taken."""
        return self.sampling_temperature if self.temperature_in_logprobs else 1.0

    @property
    def has_critic(self) -> bool:
        """Whether a critic is built at all."""
        return self.critic_start != "none"

    @property
    def decouples_lambdas(self) -> bool:
        """Whether advantages and returns are estimated with lambdas of their own, so that they differ by more than the
        values."""
        return self.value_lam is not None or self.length_adaptive_alpha is not None

    @property
    def updates(self) -> int:
        """Optimizer steps of the actor after each rollout."""
        return self.ppo_epochs * self.mini_batches

    @property
    def critic_passes(self) -> tuple[int, int]:
        """The critic's epochs after each rollout, and its optimizer steps in each of them."""
        return self.critic_epochs or self.ppo_epochs, self.critic_mini_batches or self.mini_batches

    @property
    def critic_learns_apart(self) -> bool:
        """Whether the critic has optimizer steps of its own, where otherwise each is of both models."""
        return self.has_critic and self.critic_passes != (self.ppo_epochs, self.mini_batches)

    @property
    def micro_batches_matter(self) -> bool:
        """Whether which responses form a micro-batch, and how many, changes what is learned."""
        return self.loss_scope in ("micro_batch", "micro_batch_sum") or self.advantages_at == "micro_batch"

    @property
    def ranks_matter(self) -> bool:
        """Whether over how many ranks the same responses are spread changes what is learned, beyond rounding."""
        whitens = self.whiten_rewards or self.whiten_advantages
        by_rank = whitens and (self.whiten_over == "rank" or self.whiten_variance == "unbiased_alone")
        steered_by_rank = self.kl_controller == "adaptive" and self.kl_update == "epoch"
        return by_rank or steered_by_rank or self.micro_batches_matter

    @property
    def measures_prompts(self) -> bool:
        """Whether the KL that steers the coefficient is summed over the prompt's tokens too."""
        return self.kl_controller == "adaptive" and self.kl_measure == "exp_delta"

    @property
    def _counts_past_end(self) -> bool:
        """Whether log-probs count in positions for which no token was drawn, or of which it was cut off."""
        if self.length_rule == "row":
            return self.sampling == "until_eos"
        return self.reward_slots != "response" and (self.sampling == "until_eos" or bool(self.truncate_token))

    @property
    def positions_past_response(self) -> int | None:
        """How many positions after a response's last token still carry a number that counts; None: all of the row."""
        if "all" in (self.reward_slots, self.value_slots):
            return None
        past = {
            "response": 0,
            "one_past": 1,
            "after_tokens": 1,
            "two_past": 2,
            "last": 0,
            "after_last": 1,
            "two_after": 2,
        }
        return max(past[rule] for rule in (self.reward_slots, self.value_slots, self.value_loss_slots, self.score_slot))

    @property
    def counts_padding(self) -> bool:
        """Whether log-probs or values count in positions where no token is real, or is attended to."""
        return self.positions_past_response != 0 or self.length_rule == "not_pad" or self._counts_past_end

    def unbiased_variance(self, ranks: int) -> bool:
        """Whether whitening divides by n - 1 in a run of so many ranks."""
        return self.whiten_variance == "unbiased" or (self.whiten_variance == "unbiased_alone" and ranks == 1)


def parse_settings(words: Sequence[str]) -> dict[str, object]:
    """{field: value} of words FIELD=VALUE, each value of its field's kind.

    "none" stands for None where a field may be that, "true" or "false" for truth values, two numbers with a comma
    between them for betas; nothing behind the sign is the empty text.

    Raises: UserError for a word without a sign, a field that does not exist or comes twice, a value of another kind.
    """
    kinds, found = typing.get_type_hints(Dialect), {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign:
            raise UserError(f"{word!r}: dialect fields are set as FIELD=VALUE.")
        Dialect.check_field(name)
        if name in found:
            raise UserError(f"{word!r}: {name} is set twice. Say it once.")
        if name == "name":
            raise UserError(f"{word!r}: a dialect's name is not set. --dialect chooses one.")
        found[name] = _value(word, text, kinds[name])
    return found


def _value(word: str, text: str, kind):
    optional = isinstance(kind, types.UnionType)
    if optional:
        if text.lower() == "none":
            return None
        kind = next(one for one in typing.get_args(kind) if one is not type(None))
    try:
        if kind is bool:
            return TRUTHS[text.lower()]
        if typing.get_origin(kind) is tuple:
            first, second = text.split(",")
            return float(first), float(second)
        return kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "two numbers: 0.9,0.95")
        raise UserError(f"{word!r}: give {wanted}{', or none' if optional else ''}.") from None


def token_id(tokenizer, dialect: Dialect, field: str) -> int | None:
    """The id of the token that the dialect's field names; None where it names none.

    A text that is a token as it stands is that one; another has to be encoded as one.

    Raises: UserError where it is no single token, or one that the tokenizer does not know.
    """
    text = getattr(dialect, field)
    if not text:
        return None
    if text == "eos":
        if tokenizer.eos_token_id is None:
            raise UserError(f"{field} 'eos': the tokenizer has no EOS token. Name another; an empty text is none.")
        return tokenizer.eos_token_id
    known = tokenizer.get_vocab().get(text)
    ids = [known] if known is not None else tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise UserError(
            f"{field} {text!r}: {len(ids)} tokens for this model's tokenizer; it should be one. Name "
            "another; an empty text is none."
        )
    if known is None and ids[0] == tokenizer.unk_token_id:
        raise UserError(
            f"{field} {text!r}: this model's tokenizer does not know it. Name another; an empty text is none."
        )
    return ids[0]


def end_token_id(tokenizer, dialect: Dialect) -> int | None:
    """The token that what is scored ends with: that of `truncate_token`, or else EOS, if there is one."""
    found = token_id(tokenizer, dialect, "truncate_token")
    return tokenizer.eos_token_id if found is None else found
