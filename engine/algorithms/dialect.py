"""The fields of a dialect, with their meanings, values and defaults, and properties derived from them. Also: how fields
are read from a command line (`kl_coef=0.2 score_clip=none query_start=.`), and which tokens its texts name."""

import dataclasses
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from engine.algo.advantages import ESTIMATORS
from engine.algo.corrections import CORRECTIONS
from engine.algo.schedules import SCHEDULES
from engine.algorithms.checks import FieldError, check_relations
from engine.errors import UserError, nearest
from engine.options import SAME, TOLD, choices_of, fault, option

TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
choice = partial(option, resume=TOLD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One system's choices. The defaults are those of the dialect `default`; comments say why we recommend them."""

    name: str = choice("default", "what the dialect is called")

    # A fixed coefficient makes curves of score against KL comparable between runs. In the reward, k1 is the only
    # estimator whose expected gradient is the KL's gradient. In the loss these are k2, and k3 times the ratio.
    kl_coef: float = choice(0.1, "coefficient of the KL penalty", least=0, group="KL penalty")
    kl_estimator: str = choice("k1", "estimator of the KL of a token", choices=("k1", "k2", "k3"))
    kl_in: str = choice(
        "reward", "the penalty is part of each token's reward, or of the policy's loss", choices=("reward", "loss")
    )
    kl_times_ratio: bool = choice(False, "in the loss, multiply each KL estimate by the policy's ratio")
    kl_controller: str = choice(
        "fixed",
        "the coefficient stays (fixed), or is steered towards kl_target (adaptive)",
        choices=("fixed", "adaptive"),
        resume=SAME,
    )
    kl_target: float = choice(
        6.0,
        "the KL that the coefficient is steered towards, in nats a response",
        above=0,
        only_with="kl_controller=adaptive",
    )
    kl_horizon: float = choice(
        10000.0, "responses in which the coefficient can change by a fifth", above=0, only_with="kl_controller=adaptive"
    )
    kl_measure: str = choice(
        "k1",
        "the KL that steers: k1 over the response, or trlX's exp_delta over all tokens",
        choices=("k1", "exp_delta"),
        only_with="kl_controller=adaptive",
    )
    kl_update: str = choice(
        "step",
        "the coefficient changes after each step with its responses, or after each PPO epoch with a mini-batch's",
        choices=("step", "epoch"),
        only_with="kl_controller=adaptive",
    )

    # The policy is sampled without changes. Log-probs are taken at the same temperature, by the forward pass that
    # also learns.
    sampling: str = choice(
        "until_eos",
        "responses end with EOS (until_eos), have one length in which EOS is an ordinary token (fixed), or have one "
        "length and no EOS (without_eos)",
        choices=("until_eos", "fixed", "without_eos"),
        group="sampling",
    )
    temperature: float = choice(1.0, "temperature of sampling", above=0)
    temperature_offset: float = choice(0.0, "is added to the temperature wherever logits are divided by it")
    temperature_in_logprobs: bool = choice(True, "log-probs are taken at the temperature of sampling, too")
    old_logprobs: str = choice(
        "auto",
        "where the ratio's old log-probs come from: a forward pass over the finished responses, after which the first "
        "ratio is 1, or the sampler, which saves that pass (rollout/logprob_gap tells how far apart the two are); "
        "auto: the sampler in fp32 where it computes with the actor's own code, so that both are the same within "
        "rounding, and where no other positions count than those that were drawn",
        choices=("auto", "forward", "sampler"),
    )
    samples_per_prompt: int = choice(1, "responses drawn for each prompt", above=0, resume=SAME)
    dynamic_sampling: int = choice(
        1, "batches of prompts that may be drawn until groups whose scores differ fill a step", above=0
    )

    query_start: str = choice(
        "",
        "a query begins after the first such token: none, the tokenizer's EOS (eos), or any text of one token",
        group="texts",
    )
    query_end: str = choice("", "a query ends with the last such token; named as in query_start")
    truncate_token: str = choice("", "what is scored ends with the first such token; named as in query_start")
    truncate_after: int = choice(0, "truncate_token counts from this position on", least=0)
    score_before_pad: bool = choice(False, "what is scored ends before the first pad token, where one was drawn")
    pad_token: str = choice(
        "tokenizer",
        "which token pads: the tokenizer's own, or by a system's rule (engine/models/reading.py)",
        choices=("tokenizer", "never_eos", "padding", "eos", "eos_unless_llama"),
    )

    # All sampled tokens are learned, EOS included; otherwise the model never learns to stop.
    length_rule: str = choice(
        "sampled",
        "which positions count: the sampled tokens, those before_pad, those that are not_pad, or the whole row",
        choices=("sampled", "before_pad", "not_pad", "row"),
        group="positions",
    )
    reward_slots: str = choice(
        "response",
        "KL counts at the positions of the response, also at the next one (one_past), only at those of them after "
        "a counted token (after_tokens), or at all",
        choices=("response", "one_past", "after_tokens", "all"),
    )
    score_slot: str = choice(
        "last",
        "the position of the score: the last token of the response, the next one (after_last), or the second after it "
        "(two_after)",
        choices=("last", "after_last", "two_after"),
    )
    value_slots: str = choice(
        "response",
        "where values are kept (elsewhere they are 0): the positions of the response, also one or two after it "
        "(one_past, two_past), or all",
        choices=("response", "one_past", "two_past", "all"),
    )
    value_loss_slots: str = choice(
        "response",
        "which values are learned: those of the response, or also that of the complete response (one_past)",
        choices=("response", "one_past"),
    )
    min_response_tokens: int = choice(1, "shorter responses are masked out and counted as degenerate", least=0)

    # A clip far out (5 deviations) stops a reward model's outliers without bending its ordinary scores.
    score_clip: float | None = choice(5.0, "scores are clipped to plus or minus this", above=0, group="scores")
    score_scaling: str = choice(
        "none",
        "scores are divided by the running deviation, or by the deviation of the first_batch",
        choices=("none", "running", "first_batch"),
        resume=SAME,
    )
    score_order: str = choice(
        "scale_clip", "which comes first, scaling or clipping", choices=("scale_clip", "clip_scale")
    )
    missing_end: str = choice(
        "none",
        "the score of a response without end: unchanged (none), replaced by missing_end_value, or less that value "
        "(subtract)",
        choices=("none", "replace", "subtract"),
        resume=SAME,
    )
    missing_end_value: float = choice(
        0.0,
        "replaces the score of a response without end, or is subtracted from it",
        only_with="missing_end",
        resume=SAME,
    )
    overlong_buffer: float = choice(
        0.0, "the last share of the longest response, in which a score falls by up to overlong_penalty", least=0, most=1
    )
    overlong_penalty: float = choice(
        1.0, "what a response of the full length loses", above=0, only_with="overlong_buffer"
    )
    mask_truncated: bool = choice(
        False, "nothing is learned from a response without end; others are still compared with it"
    )

    # Whitening over all tokens of all ranks makes learning rates independent of the scale of rewards. Responses are
    # short and scored at their end, so nothing is discounted. lam has been 0.95 since Ziegler et al. 2019.
    advantage_estimator: str = choice(
        "gae",
        "gae with a critic; without one the rewards to come (reinforce), those less the group's mean "
        "(reinforce_baseline), or the reward less that of the other responses to the prompt (rloo) or less the mean of "
        "all of them (grpo)",
        choices=ESTIMATORS,
        group="advantages",
    )
    advantage_scale: str = choice(
        "none",
        "advantages of grpo and rloo are divided by the deviation of the group's rewards, or of the whole batch's",
        choices=("none", "group", "batch"),
    )
    scale_variance: str = choice(
        "unbiased",
        "whether that deviation divides by n - 1 (unbiased) or n",
        choices=("unbiased", "biased"),
        only_with="advantage_scale",
    )
    scale_eps: float = choice(1e-4, "added to that deviation", above=0, only_with="advantage_scale")
    gamma: float = choice(1.0, "discount a token", least=0, most=1)
    lam: float = choice(0.95, "lambda of GAE", least=0, most=1, only_with="critic_start")
    value_lam: float | None = choice(
        None,
        "lambda of the returns that the critic learns; none: as lam. VC-PPO has 1",
        least=0,
        most=1,
        only_with="critic_start",
    )
    length_adaptive_alpha: float | None = choice(
        None,
        "the advantages' lambda is 1 - 1 / (alpha L), L the response's length; VAPO has 0.05",
        above=0,
        only_with="critic_start",
    )
    advantages_at: str = choice(
        "rollout",
        "advantages are estimated and whitened once a rollout, or anew in each mini_batch or micro_batch",
        choices=("rollout", "mini_batch", "micro_batch"),
    )
    whiten_rewards: bool = choice(False, "scale rewards to variance 1, and keep their mean")
    whiten_advantages: bool = choice(True, "scale advantages to mean 0 and variance 1 over all tokens")
    whiten_slots: str = choice(
        "response",
        "whitening takes its statistics over the positions of the response, or over the padded row",
        choices=("response", "row"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )
    whiten_over: str = choice(
        "all_ranks",
        "whitening takes its statistics over all_ranks, or over each rank alone",
        choices=("all_ranks", "rank"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )
    whiten_variance: str = choice(
        "biased",
        "whitening divides by n (biased), n - 1 (unbiased), or n - 1 with one rank only (unbiased_alone)",
        choices=("biased", "unbiased", "unbiased_alone"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )

    # One mean over all tokens of the optimizer step does not depend on the number of ranks or micro-batches. The
    # critic has its own optimizer (Adam), whose steps a factor of the loss would not change.
    ratio: str = choice(
        "token",
        "the ratio of each token, of the whole response, or the geometric mean of its tokens' (response_mean)",
        choices=("token", "response", "response_mean"),
        group="losses",
    )
    clip_range: float = choice(0.2, "clip range of the ratio", above=0)
    clip_range_high: float | None = choice(
        None, "clip range upwards, if not as far as downwards (DAPO's clip-higher)", above=0
    )
    dual_clip: float | None = choice(None, "an upper bound of the ratio where the advantage is negative", above=0)
    value_clip_range: float | None = choice(
        0.2, "clip range of the values; none: not clipped", above=0, only_with="critic_start"
    )
    value_factor: float = choice(1.0, "factor of the critic's loss", least=0, only_with="critic_start")
    loss_scope: str = choice(
        "optimizer_step",
        "losses are a mean over the tokens of the optimizer_step, the mean of each micro_batch's mean, or their sum "
        "(micro_batch_sum); the policy's also the mean of each response's mean, or the sum over responses divided by "
        "a fixed_length, --max_answer_seq_len",
        choices=("optimizer_step", "micro_batch", "micro_batch_sum", "response", "fixed_length"),
    )
    early_stop_kl: float | None = choice(None, "remaining PPO epochs are left out when approxkl is over this", above=0)
    ratio_limit: float | None = choice(None, "an optimizer step whose mean ratio is over this is left out", above=0)

    # Importance sampling, for a sampler that differs slightly from the policy (16 bits, another engine). No dialect
    # has it.
    correction: str = choice(
        "none",
        "the policy's loss times the ratio of its old log-probs, then always a forward pass's, to the sampler's: of "
        "each token or of the sequence, truncated or masked outside correction_min and correction_max",
        choices=lambda: ("none", *CORRECTIONS),
        group="importance sampling",
    )
    correction_min: float = choice(
        0.0, "a ratio under this is cut to it, or masked; IcePop has 0.5", least=0, most=1, only_with="correction"
    )
    correction_max: float = choice(
        2.0, "a ratio over this is cut to it, or masked; verl has 2", least=1, only_with="correction"
    )

    # Four passes over each rollout learn about twice as much per sample as one; clipping bounds their change. Warm-up
    # takes the 10 steps in which Adam's second moments fill. Its first step has a rate over 0, or it would be lost.
    # There is no weight decay, because the KL penalty regularises.
    ppo_epochs: int = choice(4, "passes over each step's responses", above=0, resume=SAME, group="optimization")
    mini_batches: int = choice(1, "optimizer steps in each pass", above=0, resume=SAME)
    critic_epochs: int | None = choice(
        None, "the critic's own passes, made before the actor's; none: as ppo_epochs", above=0, only_with="critic_start"
    )
    critic_mini_batches: int | None = choice(
        None, "the critic's optimizer steps in each pass; none: as mini_batches", above=0, only_with="critic_start"
    )
    actor_lr: float = choice(1e-5, "the actor's peak learning rate", least=0)
    critic_lr: float = choice(1e-5, "the critic's peak learning rate", least=0, only_with="critic_start")
    lr_schedule: str = choice("linear", "shape of the learning rate", choices=SCHEDULES)
    lr_per: str = choice(
        "optimizer_step",
        "the rate changes with each optimizer_step, or with each step (rollout)",
        choices=("optimizer_step", "step"),
    )
    warmup_steps: int = choice(10, "optimizer steps of rising learning rate", least=0)
    warmup_from_zero: bool = choice(False, "the first step of warm-up has rate 0", only_with="warmup_steps")
    optimizer: str = choice(
        "adamw",
        "adamw, or tf_adam: Adam with epsilon where TensorFlow adds it",
        choices=("adamw", "tf_adam"),
        resume=SAME,
    )
    betas: tuple[float, float] = choice((0.9, 0.95), "Adam's betas", least=0, below=1)
    eps: float = choice(1e-8, "Adam's epsilon", above=0)
    actor_weight_decay: float = choice(0.0, "weight decay of the actor", least=0)
    critic_weight_decay: float = choice(0.0, "weight decay of the critic", least=0, only_with="critic_start")
    decay: str = choice(
        "matrices",
        "what weight decay shrinks: matrices, all (biases and norms too), or by deepspeed_chat's names of weights",
        choices=("matrices", "all", "deepspeed_chat"),
        only_with=("actor_weight_decay", "critic_weight_decay"),
    )
    max_grad_norm: float = choice(1.0, "gradients are clipped to this norm; 0 for no clipping", least=0)

    # A critic that starts as the reward model knows what a good end is worth.
    critic_start: str = choice(
        "reward_model",
        "the critic starts as the reward_model, or as the SFT model with a zero_head; none: there is no critic",
        choices=("reward_model", "zero_head", "none"),
        resume=SAME,
        group="models",
    )
    hydra_layers: int = choice(
        0, "only the actor's last k layers train; the reference is frozen copies of those", least=0, resume=SAME
    )
    ema_decay: float = choice(0.992, "decay of the moving average that --enable_ema keeps", least=0, most=1)

    def __post_init__(self):
        """Raises: FieldError for a value that a field cannot have, and for values that contradict each other."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            if reason := fault(spec, value):
                raise FieldError(spec.name, value, reason)
        check_relations(self)

    @classmethod
    def choices(cls, field: str) -> Collection[str]:
        """The values that a field may have; empty if it has no list of values."""
        return choices_of(cls.__dataclass_fields__[field]) or ()

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
        """Raise UserError, listing all fields, if no field has this name."""
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
        """Whether the sampler's log-probs serve as old log-probs if a rollout has them.

        exact: whether they equal those of a forward pass within rounding. They exist for drawn tokens only, so no other
        positions may count, and no drawn token may be hidden from attention.
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
        """Whether advantages and returns are estimated with different lambdas, so that returns are not advantages plus
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
        """Whether the critic makes its optimizer steps separately. Otherwise each optimizer step updates both
        models."""
        return self.has_critic and self.critic_passes != (self.ppo_epochs, self.mini_batches)

    @property
    def micro_batches_matter(self) -> bool:
        """Whether the result depends on how responses are divided into micro-batches."""
        return self.loss_scope in ("micro_batch", "micro_batch_sum") or self.advantages_at == "micro_batch"

    @property
    def ranks_matter(self) -> bool:
        """Whether the result depends, beyond rounding, on the number of ranks that the same responses are spread
        over."""
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
        """Whether log-probs count at positions where no token was drawn, or where the drawn token was cut off."""
        if self.length_rule == "row":
            return self.sampling == "until_eos"
        return self.reward_slots != "response" and (self.sampling == "until_eos" or bool(self.truncate_token))

    @property
    def positions_past_response(self) -> int | None:
        """How many positions after a response's last token still count; None: all of the row."""
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
        """Whether log-probs or values count at positions whose token is not real, or is not attended to."""
        return self.positions_past_response != 0 or self.length_rule == "not_pad" or self._counts_past_end

    def unbiased_variance(self, ranks: int) -> bool:
        """Whether whitening divides by n - 1 in a run of so many ranks."""
        return self.whiten_variance == "unbiased" or (self.whiten_variance == "unbiased_alone" and ranks == 1)


def parse_settings(words: Sequence[str]) -> dict[str, object]:
    """{field: value} of words FIELD=VALUE, each value of its field's kind.

    "none" stands for None in fields that may be None, "true" or "false" for booleans, two numbers with a comma between
    them for betas. Nothing after the "=" stands for the empty text.

    Raises: UserError for a word without "=", a field that does not exist or is set twice, a value of the wrong type.
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

    A text that is in the vocabulary stands for that token. Any other text has to be encoded as exactly one token.

    Raises: UserError if the text is not a single token, or the tokenizer does not know it.
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
    """The token that ends the scored text: that of `truncate_token`, or else EOS, or None if there is none."""
    found = token_id(tokenizer, dialect, "truncate_token")
    return tokenizer.eos_token_id if found is None else found
