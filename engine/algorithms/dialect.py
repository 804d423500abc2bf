"""The fields of a dialect, with their meanings, values and defaults, and properties that follow from the fields. This
file also reads fields from a command line (`kl_coef=0.2 score_clip=none query_start=.`), and finds the tokens that
fields name."""

import dataclasses
import types
import typing
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine.algo.advantages import ESTIMATORS
from engine.algo.corrections import CORRECTIONS
from engine.algo.kl import KL_ESTIMATORS
from engine.algo.schedules import SCHEDULES
from engine.algorithms.checks import FieldError, check_relations
from engine.errors import UserError, nearest
from engine.options import choices_of, fault
from engine.options import option as choice

TRUTHS = {"true": True, "yes": True, "false": False, "no": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The algorithmic choices of one system. The defaults are those of the dialect `default`; comments give reasons."""

    name: str = choice("default", "the dialect's name")

    # A fixed coefficient makes curves of score against KL comparable between runs. In the reward, k1 is the only
    # estimator whose expected gradient is the KL's gradient. In the loss, k2 has that property, and so has k3 times the
    # ratio.
    kl_coef: float = choice(0.1, "coefficient of the KL penalty", least=0, group="KL penalty")
    kl_estimator: str = choice(
        "k1",
        "how each token's KL is estimated: k1 = log p - log q, k2 = k1^2 / 2, k3 = exp(-k1) - 1 + k1",
        choices=KL_ESTIMATORS,
    )
    kl_in: str = choice(
        "reward",
        "where the KL penalty is applied: to each token's reward, or in the policy's loss",
        choices=("reward", "loss"),
    )
    kl_times_ratio: bool = choice(False, "with kl_in=loss: multiply each token's KL estimate by the policy's ratio")
    kl_controller: str = choice(
        "fixed",
        "fixed: the KL coefficient stays. adaptive: it starts at kl_coef and is steered so that the KL approaches "
        "kl_target",
        choices=("fixed", "adaptive"),
    )
    kl_target: float = choice(
        6.0,
        "with kl_controller=adaptive: the KL to approach, in nats per response",
        above=0,
        only_with="kl_controller=adaptive",
    )
    kl_horizon: float = choice(
        10000.0,
        "with kl_controller=adaptive: responses over which the coefficient can change by about a fifth",
        above=0,
        only_with="kl_controller=adaptive",
    )
    kl_measure: str = choice(
        "k1",
        "with kl_controller=adaptive: the KL that is steered. k1: the sum over the response's tokens. exp_delta: "
        "trlX's, a sum over the tokens of prompt and response",
        choices=("k1", "exp_delta"),
        only_with="kl_controller=adaptive",
    )
    kl_update: str = choice(
        "step",
        "with kl_controller=adaptive: the coefficient changes after each step, or after each PPO epoch, for which one "
        "rank's responses of one mini-batch count towards kl_horizon",
        choices=("step", "epoch"),
        only_with="kl_controller=adaptive",
    )

    # Tokens are drawn from the unchanged policy. Log-probs are computed at the temperature at which tokens were drawn,
    # by the forward pass that also computes the gradient.
    sampling: str = choice(
        "until_eos",
        "until_eos: a response ends with EOS. fixed: all responses have the longest length, and EOS is a token like "
        "others. without_eos: the same, but EOS is never drawn",
        choices=("until_eos", "fixed", "without_eos"),
        group="sampling",
    )
    temperature: float = choice(1.0, "sampling temperature", above=0)
    temperature_offset: float = choice(0.0, "number added to the temperature before logits are divided by it")
    temperature_in_logprobs: bool = choice(True, "divide logits by the temperature before log-probs are taken, too")
    old_logprobs: str = choice(
        "auto",
        "where the ratio's old log-probs come from. forward: a forward pass over the responses. sampler: the sampler, "
        "which saves this pass. auto: the sampler in fp32, if it computes with the actor's own code, only drawn tokens "
        "count and there is no correction; else forward",
        choices=("auto", "forward", "sampler"),
    )
    samples_per_prompt: int = choice(1, "number of responses drawn for each prompt", above=0)
    dynamic_sampling: int = choice(
        1,
        "most batches of prompts that a step draws until groups whose scores differ fill it; 1: one batch, and all its "
        "groups are used",
        above=0,
    )

    query_start: str = choice(
        "",
        "the prompt begins after the first occurrence of this token, and a text without it is left out: eos for the "
        "tokenizer's EOS, or any text of one token; empty: no such rule",
        group="texts",
    )
    query_end: str = choice(
        "",
        "the prompt ends with the last occurrence of this token, and a text without it is left out; given as in "
        "query_start",
    )
    truncate_token: str = choice(
        "", "the scored text ends with the first occurrence of this token, given as in query_start"
    )
    truncate_after: int = choice(0, "response position from which on truncate_token counts", least=0)
    score_before_pad: bool = choice(False, "the scored text ends before the first pad token that was drawn")
    cut_responses: str = choice(
        "open",
        "what a reward model that reads the policy's token ids gets of a response without an end. open: the response "
        "as it is. closed: with EOS behind it, or for prompts that are messages the token that ends a turn",
        choices=("open", "closed"),
    )
    pad_token: str = choice(
        "tokenizer",
        "which token pads: the tokenizer's own, or one by another system's rule (docs/dialects.md)",
        choices=("tokenizer", "never_eos", "padding", "eos", "eos_unless_llama"),
    )

    # All sampled tokens are learned, EOS included: without EOS the model would never learn to stop.
    length_rule: str = choice(
        "sampled",
        "response positions that count. sampled: the sampled tokens. before_pad: those before the first pad token. "
        "not_pad: all but pad tokens. row: every position",
        choices=("sampled", "before_pad", "not_pad", "row"),
        group="positions",
    )
    kl_positions: str = choice(
        "response",
        "positions of the KL penalty. response: those of the response. one_past: also the next one. after_tokens: the "
        "first one, and each that follows a counted token. all: the whole row",
        choices=("response", "one_past", "after_tokens", "all"),
    )
    score_position: str = choice(
        "last",
        "position of the score: the response's last token (last), the one after it (after_last), or the second after "
        "it (two_after)",
        choices=("last", "after_last", "two_after"),
    )
    value_positions: str = choice(
        "response",
        "positions whose values are kept; others are set to 0. response: those of the response. one_past, two_past: "
        "also the next one or two. all: the whole row",
        choices=("response", "one_past", "two_past", "all"),
    )
    value_loss_positions: str = choice(
        "response",
        "positions of the critic's loss: those of the response, or also the next one, where the response is complete "
        "(one_past)",
        choices=("response", "one_past"),
    )
    min_response_tokens: int = choice(
        1, "a response with fewer tokens is masked out and counted as degenerate", least=0
    )

    # A wide clip (5 standard deviations) limits a reward model's outliers and leaves its ordinary scores unchanged.
    score_clip: float | None = choice(
        5.0,
        "scores are clipped to plus or minus this number; --set score_clip=none turns clipping off",
        above=0,
        group="scores",
    )
    score_scaling: str = choice(
        "none",
        "what scores are divided by: nothing (none), the standard deviation of all scores so far (running), or that of "
        "the first batch (first_batch)",
        choices=("none", "running", "first_batch"),
    )
    score_order: str = choice(
        "scale_clip",
        "whether scores are first scaled and then clipped, or the reverse",
        choices=("scale_clip", "clip_scale"),
    )
    missing_end: str = choice(
        "none",
        "the score of a response without an end. none: it stays. replace: it becomes missing_end_value. subtract: "
        "missing_end_value is subtracted",
        choices=("none", "replace", "subtract"),
    )
    missing_end_value: float = choice(
        0.0,
        "with missing_end: the number that replaces the score, or is subtracted from it",
        only_with="missing_end",
    )
    overlong_buffer: float = choice(
        0.0,
        "the last part of the longest length, as a share of it, in which each token lowers the score, by "
        "overlong_penalty in all; 0: no penalty",
        least=0,
        most=1,
    )
    overlong_penalty: float = choice(
        1.0,
        "with overlong_buffer: how much the score of a response of full length falls",
        above=0,
        only_with="overlong_buffer",
    )
    likelihood_coef: float = choice(
        0.0,
        "coefficient of the likelihood, which is added to the score: the mean log-prob of the response's tokens under "
        "the reference, less its mean over the first responses, in their standard deviations; 0: none. It is clipped "
        "at score_clip, apart from the score",
        least=0,
    )
    likelihood_cap: float = choice(
        1.0,
        "with likelihood_coef: the likelihood counts up to this many standard deviations",
        only_with="likelihood_coef",
    )
    mask_truncated: bool = choice(
        False, "learn nothing from a response without an end; other responses are still compared with it"
    )

    # Whitening over all tokens of all ranks makes learning rates independent of the scale of rewards. Responses are
    # short and scored at their end, so rewards are not discounted. lam has been 0.95 since Ziegler et al. 2019.
    advantage_estimator: str = choice(
        "gae",
        "gae: generalised advantage estimation with a critic; the others have no critic. reinforce: each token's sum "
        "of rewards to come. reinforce_baseline: that sum less the group's mean reward. rloo: a response's reward less "
        "the mean of the others in its group. grpo: a response's reward less the group's mean",
        choices=ESTIMATORS,
        group="advantages",
    )
    advantage_scale: str = choice(
        "none",
        "with grpo or rloo: divide advantages by the rewards' standard deviation in the group, or in the whole batch",
        choices=("none", "group", "batch"),
    )
    scale_variance: str = choice(
        "unbiased",
        "with advantage_scale: the variance divides by n - 1 (unbiased) or by n (biased)",
        choices=("unbiased", "biased"),
        only_with="advantage_scale",
    )
    scale_eps: float = choice(
        1e-4, "with advantage_scale: number added to the standard deviation", above=0, only_with="advantage_scale"
    )
    gamma: float = choice(1.0, "discount factor per token", least=0, most=1)
    lam: float = choice(0.95, "lambda of GAE", least=0, most=1, only_with="critic_start")
    value_lam: float | None = choice(
        None,
        "lambda of the returns that the critic learns; none: the same as lam. VC-PPO uses 1",
        least=0,
        most=1,
        only_with="critic_start",
    )
    length_adaptive_alpha: float | None = choice(
        None,
        "this number, alpha, gives advantages the lambda 1 - 1 / (alpha L), with L the response's length; none: lam. "
        "VAPO uses 0.05",
        above=0,
        only_with="critic_start",
    )
    advantages_at: str = choice(
        "rollout",
        "when advantages are estimated and whitened: once per rollout, or again in each mini_batch or micro_batch",
        choices=("rollout", "mini_batch", "micro_batch"),
    )
    whiten_rewards: bool = choice(False, "scale rewards to variance 1, and keep their mean")
    whiten_advantages: bool = choice(
        True, "scale advantages to mean 0 and variance 1 over all tokens; with grpo or rloo over all responses"
    )
    whiten_positions: str = choice(
        "response",
        "positions over which whitening takes mean and variance: those of the response, or the whole padded row",
        choices=("response", "row"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )
    whiten_over: str = choice(
        "all_ranks",
        "ranks over which whitening takes mean and variance: all together, or each alone",
        choices=("all_ranks", "rank"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )
    whiten_variance: str = choice(
        "biased",
        "whitening's variance divides by n (biased), by n - 1 (unbiased), or by n - 1 in a run of one rank and by "
        "n in others (unbiased_alone)",
        choices=("biased", "unbiased", "unbiased_alone"),
        only_with=("whiten_advantages", "whiten_rewards"),
    )

    # A loss that is one mean over all tokens of the optimizer step does not depend on the number of ranks or
    # micro-batches. The critic has an optimizer of its own, Adam, so a factor of the critic's loss would not change its
    # steps.
    ratio: str = choice(
        "token",
        "the ratio of new to old probability. token: of each token. response: of the response, the product over its "
        "tokens. response_mean: of the response, the geometric mean over its tokens",
        choices=("token", "response", "response_mean"),
        group="losses",
    )
    surrogate: str = choice(
        "clip",
        "the policy's loss. clip: PPO's, in which a token whose ratio is clipped has no gradient. cispo: the ratio, "
        "clipped, only weights the token's gradient. sapo: the gradient falls smoothly as the ratio moves away from 1",
        choices=("clip", "cispo", "sapo"),
    )
    gate_temperatures: tuple[float, float] = choice(
        (1.0, 1.05),
        "with surrogate=sapo: how fast the gradient falls, for tokens with positive and for tokens with negative "
        "advantage",
        above=0,
        only_with="surrogate=sapo",
    )
    clip_range: float = choice(
        0.2,
        "the ratio is clipped to the range from 1 - this number to 1 + this number",
        above=0,
        only_with="surrogate=clip|cispo",
    )
    clip_range_high: float | None = choice(
        None,
        "upper clip range: the ratio is clipped at 1 + this number (DAPO's clip-higher); none: the same as clip_range",
        above=0,
        only_with="surrogate=clip|cispo",
    )
    dual_clip: float | None = choice(
        None,
        "upper bound of the ratio where the advantage is negative; none: no bound",
        above=0,
        only_with="surrogate=clip",
    )
    value_clip_range: float | None = choice(
        0.2,
        "the value loss clips new values to the old value plus or minus this number; --set value_clip_range=none "
        "turns clipping off",
        above=0,
        only_with="critic_start",
    )
    value_factor: float = choice(1.0, "factor of the critic's loss", least=0, only_with="critic_start")
    loss_scope: str = choice(
        "optimizer_step",
        "how losses are averaged. optimizer_step: over all tokens of the optimizer step. micro_batch: the mean of the "
        "micro-batches' means. micro_batch_sum: the sum of a rank's micro-batch means, averaged over ranks. For the "
        "policy alone, response: the mean of the responses' means; fixed_length: the sum divided by responses times "
        "--max_answer_seq_len",
        choices=("optimizer_step", "micro_batch", "micro_batch_sum", "response", "fixed_length"),
    )
    entropy_coef: float = choice(
        0.0,
        "coefficient of the entropy bonus, which is subtracted from the policy's loss: this number times the policy's "
        "mean entropy, averaged as that loss is; 0: no bonus",
        least=0,
    )
    early_stop_kl: float | None = choice(
        None,
        "leave out a step's remaining PPO epochs after one whose approxkl is above this number; none: never",
        above=0,
    )
    ratio_limit: float | None = choice(
        None, "leave out an optimizer step whose mean ratio is above this number; none: never", above=0
    )

    # Importance sampling corrects for a sampler that differs slightly from the policy because it computes in 16 bits or
    # in another engine. No named dialect uses it.
    correction: str = choice(
        "none",
        "importance sampling: multiply the policy's loss by the ratio of the old policy's probability to the "
        "sampler's, of each token or of the response (sequence). truncate: cut ratios to correction_min and "
        "correction_max; mask: set those outside to 0; binary_kl, tv: set each token's ratio to 0 where the divergence "
        "of the two probabilities of the token (or its mean over the response) is over correction_max. The old "
        "log-probs then come from a forward pass",
        choices=lambda: ("none", *CORRECTIONS),
        group="importance sampling",
    )
    correction_min: float = choice(
        0.0,
        "with correction: a smaller ratio is cut to this number, or masked. IcePop uses 0.5",
        least=0,
        most=1,
        only_with="correction=token_truncate|token_mask|sequence_truncate|sequence_mask",
    )
    correction_max: float = choice(
        2.0,
        "with correction: a larger ratio is cut to this number, or masked. verl uses 2. With binary_kl and tv: the "
        "largest divergence at which a ratio is kept, less than 1",
        above=0,
        only_with="correction",
    )

    # Four passes over each rollout learn about twice as much per sample as one pass; clipping bounds how far they move
    # the policy. Warm-up lasts the 10 steps in which Adam's second moments fill. The first step's learning rate is over
    # 0, since a step of rate 0 would change nothing. There is no weight decay, because the KL penalty already
    # regularises.
    ppo_epochs: int = choice(4, "PPO epochs: passes over the responses of each step", above=0, group="optimization")
    mini_batches: int = choice(1, "mini-batches of a PPO epoch; each takes one optimizer step", above=0)
    critic_epochs: int | None = choice(
        None,
        "epochs of the critic, if not ppo_epochs; they then come before the actor's",
        above=0,
        only_with="critic_start",
    )
    critic_mini_batches: int | None = choice(
        None, "mini-batches of a critic's epoch, if not mini_batches", above=0, only_with="critic_start"
    )
    actor_lr: float = choice(1e-5, "peak learning rate of the actor", least=0)
    critic_lr: float = choice(1e-5, "peak learning rate of the critic", least=0)
    lr_schedule: str = choice("linear", "schedule of the learning rate", choices=SCHEDULES)
    lr_per: str = choice(
        "optimizer_step",
        "whether the learning rate changes with each optimizer step, or with each rollout (step)",
        choices=("optimizer_step", "step"),
    )
    warmup_steps: int = choice(
        10,
        "warm-up steps, in which the learning rate rises to its peak: optimizer steps, or rollouts with lr_per=step",
        least=0,
    )
    warmup_from_zero: bool = choice(False, "the first warm-up step has learning rate 0", only_with="warmup_steps")
    optimizer: str = choice(
        "adamw",
        "adamw, or tf_adam: Adam with epsilon where TensorFlow adds it",
        choices=("adamw", "tf_adam"),
    )
    betas: tuple[float, float] = choice((0.9, 0.95), "Adam's betas", least=0, below=1)
    eps: float = choice(1e-8, "Adam's epsilon", above=0)
    actor_weight_decay: float = choice(0.0, "weight decay of the actor", least=0)
    critic_weight_decay: float = choice(0.0, "weight decay of the critic", least=0)
    decay: str = choice(
        "matrices",
        "weights that decay: matrices only, all (also biases and norms), or all but those that DeepSpeed-Chat's list "
        "of names spares (deepspeed_chat)",
        choices=("matrices", "all", "deepspeed_chat"),
        only_with=("actor_weight_decay", "critic_weight_decay"),
    )
    max_grad_norm: float = choice(1.0, "gradients are clipped to this norm; 0: no clipping", least=0)

    # A critic that starts as the reward model already predicts the scores of complete responses.
    critic_start: str = choice(
        "reward_model",
        "what the critic starts from: the reward model, or the SFT model with a new head of zeros (zero_head); "
        "none: there is no critic",
        choices=("reward_model", "zero_head", "none"),
        group="models",
    )
    hydra_layers: int = choice(
        0,
        "number of the actor's last layers that train; the reference is frozen copies of these on the same lower "
        "layers. 0: all layers train",
        least=0,
    )
    ema_decay: float = choice(
        0.992, "decay of the moving average of the actor's weights (--enable_ema)", least=0, most=1
    )

    def __post_init__(self):
        """Raises: FieldError for a value that a field cannot have, and for values of several fields that contradict
        each other."""
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
        """This dialect with some fields replaced. A field for which None is given keeps its value.

        Raises: UserError for a field that does not exist, and for values that contradict each other.
        """
        own = {name: getattr(self, name, None) for name in values}
        return self.replaced(**{name: own[name] if value is None else value for name, value in values.items()})

    def replaced(self, **values) -> "Dialect":
        """As `override`, but a field for which None is given gets the value None."""
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
        """The fields, apart from `name`, in which this dialect differs from another: {field: (own value, other's
        value)}."""
        return {
            field.name: (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name) != getattr(other, field.name)
        }

    def takes_sampled_logprobs(self, exact: bool) -> bool:
        """Whether the sampler's log-probs are used as old log-probs, if a rollout has them.

        The sampler has log-probs of drawn tokens only. They can be used only if no other position counts, and no drawn
        token is masked out of attention. exact: whether the sampler's log-probs equal those of a forward pass within
        rounding.
        """
        wanted = self.old_logprobs == "sampler" or (self.old_logprobs == "auto" and exact)
        others_count = self._counts_past_end or self.measures_prompts or self.length_rule == "not_pad"
        return wanted and self.correction == "none" and not others_count

    @property
    def sampling_temperature(self) -> float:
        """The number that logits are divided by when tokens are drawn."""
        return self.temperature + self.temperature_offset

    @property
    def logprob_temperature(self) -> float:
        """The number that logits are divided by before log-probs are taken."""
        return self.sampling_temperature if self.temperature_in_logprobs else 1.0

    @property
    def has_critic(self) -> bool:
        """Whether the dialect trains a critic."""
        return self.critic_start != "none"

    @property
    def decouples_lambdas(self) -> bool:
        """Whether advantages and returns are estimated with different lambdas, so that returns are not advantages plus
        values."""
        return self.value_lam is not None or self.length_adaptive_alpha is not None

    @property
    def updates(self) -> int:
        """The number of optimizer steps that the actor makes after each rollout."""
        return self.ppo_epochs * self.mini_batches

    @property
    def critic_passes(self) -> tuple[int, int]:
        """Returns (the number of the critic's epochs after each rollout, the number of its optimizer steps in an
        epoch)."""
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
    def measures_prompts(self) -> bool:
        """Whether the KL that steers the coefficient is summed over the prompt's tokens too."""
        return self.kl_controller == "adaptive" and self.kl_measure == "exp_delta"

    @property
    def _counts_past_end(self) -> bool:
        """Whether log-probs count at positions where no token was drawn, or where the drawn token was cut off."""
        if self.length_rule == "row":
            return self.sampling == "until_eos"
        return self.kl_positions != "response" and (self.sampling == "until_eos" or bool(self.truncate_token))

    @property
    def positions_past_response(self) -> int | None:
        """How many positions after a response's last token still count; None: all of the row."""
        if "all" in (self.kl_positions, self.value_positions):
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
        return max(
            past[rule]
            for rule in (self.kl_positions, self.value_positions, self.value_loss_positions, self.score_position)
        )

    @property
    def counts_padding(self) -> bool:
        """Whether log-probs or values count at positions whose token is padding or is masked out of attention."""
        return self.positions_past_response != 0 or self.length_rule == "not_pad" or self._counts_past_end

    def unbiased_variance(self, ranks: int) -> bool:
        """Whether whitening divides the squared deviations by n - 1 rather than n in a run with this number of
        ranks."""
        return self.whiten_variance == "unbiased" or (self.whiten_variance == "unbiased_alone" and ranks == 1)


def parse_settings(words: Sequence[str]) -> dict[str, object]:
    """Reads words of the form FIELD=VALUE, and returns {field: value}. Each value is converted to its field's type.

    "none" becomes None in fields that may be None; "true" and "false" become booleans; betas are two numbers separated
    by a comma. If nothing follows the "=", the value is the empty string.

    Raises: UserError for a word without "=", a field that does not exist or is set twice, or a value of a wrong type.
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
    """The id of the token that this field of the dialect names; None if the field names no token.

    If the field's text is an entry of the vocabulary, it names that token. Any other text must be encoded as exactly
    one token.

    Raises: UserError if the text is encoded as several tokens, or the tokenizer does not know the text.
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
    """The id of the token that ends the scored text: that of the dialect's `truncate_token` if it names one, else that
    of EOS; None if there is no EOS either."""
    found = token_id(tokenizer, dialect, "truncate_token")
    return tokenizer.eos_token_id if found is None else found
