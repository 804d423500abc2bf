"""Every algorithmic choice of a PPO run, under names: one frozen dataclass, one row per known system.

    dialect = get_dialect("default").override(kl_coef=0.1)

A field that a user gives by flag overrides the dialect's value. What each system computes was read from its source;
`deepspeed_chat` is DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat.
"""
import dataclasses
import difflib
from dataclasses import dataclass

from engine.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One system's choices; the comments say why `default`'s, which stand here, are what we recommend."""
    name: str = "default"

    # KL penalty. A fixed coefficient makes curves of score against KL comparable between runs.
    kl_coef: float = 0.1
    kl_estimator: str = "k1"            # the only one whose expected gradient, in the reward, is the KL's own

    # Which tokens count. What was sampled is what is learned, EOS included, or the model never learns to stop.
    length_rule: str = "sampled"        # "sampled", or "before_pad": tokens before the first pad token
    reward_slots: str = "response"      # KL and values count on "response" slots, or on "one_past" the response too
    score_slot: str = "last"            # "last" token of the response, or "after_last"
    min_response_tokens: int = 1        # shorter responses are masked out and counted as degenerate

    # Scores. A clip far out stops a reward model's outliers without bending its ordinary scores (5 deviations).
    score_clip: float | None = 5.0

    # Advantages. Whitening over all tokens of all ranks makes learning rates carry over between rewards of any scale.
    gamma: float = 1.0                  # a response is short, and its end is what is scored: nothing to discount
    lam: float = 0.95                   # the value used since Ziegler et al. 2019
    whiten_advantages: bool = True

    # Losses. One mean over all tokens of the optimizer step: no number of ranks or micro-batches changes it.
    clip_range: float = 0.2
    value_clip_range: float = 0.2
    loss_scope: str = "optimizer_step"  # "optimizer_step", or "micro_batch": a mean of the micro-batches' means

    # Optimization. Four passes over each rollout learn about twice as much per sample as one; clipping bounds them.
    ppo_epochs: int = 4
    actor_lr: float = 1e-5
    critic_lr: float = 1e-5
    lr_schedule: str = "linear"
    warmup_steps: int = 10              # optimizer steps in which Adam's second moments fill
    warmup_from_zero: bool = False      # the first step of warm-up has a rate, or it would be lost
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    actor_weight_decay: float = 0.0     # the KL penalty is the regulariser
    critic_weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    # Sampling from the policy as it is; log-probs are taken at the same temperature, by the function that learns.
    temperature: float = 1.0
    temperature_in_logprobs: bool = True
    old_logprobs: str = "auto"          # of a second "forward" pass, so that the first ratio is 1; or the "sampler"'s;
                                        # "auto": the sampler's in fp32, where both are the same within rounding

    ema_decay: float = 0.992            # DeepSpeed-Chat's; only used where an EMA is asked for

    def override(self, **values) -> "Dialect":
        """This dialect with some fields replaced; values of None leave theirs as they are.

        Raises: UserError for a field that does not exist.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise UserError(f"dialect field {name!r} does not exist{f'; did you mean {near[0]}?' if near else ''}. "
                                f"Known: {', '.join(known)}.")
        return dataclasses.replace(self, **{name: value for name, value in values.items() if value is not None})

    def differences(self, other: "Dialect") -> dict[str, tuple]:
        """The fields in which two dialects differ, name aside: {field: (own value, other's value)}."""
        return {field.name: (getattr(self, field.name), getattr(other, field.name))
                for field in dataclasses.fields(self)
                if field.name != "name" and getattr(self, field.name) != getattr(other, field.name)}

    def samples_logprobs(self, dtype: str) -> bool:
        """Whether the sampler is to note the log-probs of what it draws; dtype: "fp32", "fp16" or "bf16"."""
        return self.old_logprobs == "sampler" or self.old_logprobs == "auto" and dtype == "fp32"

    @property
    def logprob_temperature(self) -> float:
        """What logits are divided by before log-probs are taken."""
        return self.temperature if self.temperature_in_logprobs else 1.0


DIALECTS = {dialect.name: dialect for dialect in (
    Dialect(),
    Dialect(
        name="deepspeed_chat",
        length_rule="before_pad",       # its masks are `ids != pad`, so EOS counts only where pad is another token
        reward_slots="one_past",        # the first pad slot holds a KL term, the score, and a value
        score_slot="after_last",
        min_response_tokens=2,          # it drops shorter ones on their rank; here they are masked and counted
        whiten_advantages=False,
        loss_scope="micro_batch",
        ppo_epochs=1,
        actor_lr=9.65e-6,
        critic_lr=5e-6,
        lr_schedule="cosine",
        warmup_steps=100,
        warmup_from_zero=True,
        temperature_in_logprobs=False,
        old_logprobs="forward",
    ),
)}


def get_dialect(name: str) -> Dialect:
    """The dialect of this name; raises UserError, listing the known ones."""
    if name not in DIALECTS:
        raise UserError(f"--dialect {name!r}: known are {', '.join(DIALECTS)}.")
    return DIALECTS[name]
