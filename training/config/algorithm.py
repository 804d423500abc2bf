"""The flags of step 3's algorithm. `AlgorithmFlags.resolved` holds the dialect that the flags describe.

A dialect is the set of all algorithm choices of a run (engine/algorithms/dialect.py). Each dialect is named after the
system that it follows. A flag sets a field of the dialect: --kl_coef 0.2 sets the field kl_coef. `ReferenceFlags` adds
flags for the moving average of the actor's weights and for a reference that follows the actor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from engine.algorithms import DIALECTS, Dialect, check_effect, get_dialect, parse_settings
from engine.algorithms.checks import FieldError
from engine.errors import UserError
from training.config.flags import DataFlags, flag
from training.config.other_systems import flag_of_other_systems


def dialect_flag(field: str, *, group: str = "", only_with: str | tuple[str, ...] = ()):
    """A flag that sets a field of the dialect. The flag has the field's help text and range. The flag's default None
    keeps the dialect's value."""
    metadata = Dialect.__dataclass_fields__[field].metadata
    own = {"default": None, "group": group, "field": field, "only_with": only_with}
    return flag(**{**metadata, **own})


@dataclass(frozen=True, slots=True)
class Resolved:
    """The dialect that the flags describe, and the fields that they changed: {field: (value of the named dialect, value
    of the flag)}."""

    dialect: Dialect
    changed: dict[str, tuple]


@dataclass(kw_only=True)
class AlgorithmFlags(DataFlags):
    """The flags of step 3's algorithm. A flag that is not given takes the dialect's value."""

    dialect: str = flag("default", "system whose algorithmic choices are taken", choices=DIALECTS, group="algorithm")
    kl_coef: float | None = dialect_flag("kl_coef")
    score_clip: float | None = dialect_flag("score_clip")
    missing_eos_penalty: float = flag(
        0.0, "number subtracted from the score of a response that did not end by itself (missing_end=subtract)"
    )
    cut_responses: str | None = dialect_flag("cut_responses")
    likelihood_coef: float | None = dialect_flag("likelihood_coef")
    gamma: float | None = dialect_flag("gamma")
    lam: float | None = dialect_flag("lam")
    clip_range: float | None = dialect_flag("clip_range")
    value_clip_range: float | None = dialect_flag("value_clip_range")
    whiten_advantages: bool | None = dialect_flag("whiten_advantages")
    ppo_epochs: int | None = dialect_flag("ppo_epochs")
    temperature: float | None = dialect_flag("temperature")
    old_logprobs: str | None = dialect_flag("old_logprobs")
    ema_decay: float | None = dialect_flag("ema_decay", only_with=("enable_ema", "reference=ema"))
    set: list[str] = flag(
        [],
        "fields of the dialect as FIELD=VALUE, such as kl_controller=adaptive kl_target=6; `python -m "
        "engine.algorithms` lists them. Several of these flags add up",
        adds_up=True,
    )

    actor_learning_rate: float | None = dialect_flag("actor_lr", group="optimization")
    critic_learning_rate: float | None = dialect_flag("critic_lr")
    actor_weight_decay: float | None = dialect_flag("actor_weight_decay")
    critic_weight_decay: float | None = dialect_flag("critic_weight_decay")
    lr_scheduler_type: str | None = dialect_flag("lr_schedule")
    num_warmup_steps: int | None = dialect_flag("warmup_steps")
    max_grad_norm: float | None = dialect_flag("max_grad_norm")
    critic_pretrain_steps: int = flag(
        0,
        "steps before the first one in which the critic alone trains, on responses of the SFT model (docs/critic.md). "
        "They use up no prompts and change no schedule. The critic is saved as OUTPUT_DIR/critic_pretrained",
        least=0,
    )
    critic_pretrain_learning_rate: float | None = flag(
        None,
        "peak learning rate in --critic_pretrain_steps; by default --critic_learning_rate",
        above=0,
        only_with="critic_pretrain_steps",
    )
    critic_warmup_steps: int = flag(0, "steps at the start in which only the critic trains", least=0)
    max_kl: float | None = flag(
        None,
        "end the run, before its update, at a step whose KL to the reference (objective/kl) is above this many nats "
        "per response",
        above=0,
    )

    per_device_generation_batch_size: int = flag(
        16, "prompts that each rank answers at the same time", least=1, group="batch sizes"
    )
    generation_batches: int = flag(
        1,
        "multiplies the prompts of a step; each rank still answers --per_device_generation_batch_size at a time",
        least=1,
    )
    num_samples_per_prompt: int | None = dialect_flag("samples_per_prompt")
    per_device_training_batch_size: int = flag(
        16,
        "responses per rank in one forward and backward pass; with --sequence_parallel_size, of all ranks that share "
        "it",
        least=1,
    )
    gradient_accumulation_steps: int | None = flag(
        None,
        "forward and backward passes in one optimizer step; sets the dialect's mini_batches. By default the dialect's "
        "mini_batches set the number of passes",
        least=1,
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        self._check_division()

    @cached_property
    def resolved(self) -> Resolved:
        """The named dialect, changed by the given flags. It is computed once.

        Raises: UserError, with the flag in its message, if a field is given twice or belongs to another system, or if
        the dialect does not allow a value or ignores it.
        """
        named, flags = get_dialect(self.dialect), self._fields_of_flags()
        given = self._set_fields()
        for field, name in flags.items():
            if field in given:
                raise UserError(f"--set {field}={given[field]} and {self.word(name)} say the same. Give one of them.")
        given |= {field: getattr(self, name) for field, name in flags.items()}
        if self.missing_eos_penalty:
            given["missing_end"] = "subtract"
        if self.gradient_accumulation_steps is not None:
            samples = given.get("samples_per_prompt", named.samples_per_prompt)
            made = self.per_device_generation_batch_size * self.generation_batches * samples
            given["mini_batches"] = max(1, made // self._rows_per_optimizer_step)
        try:
            dialect = named.replaced(**given)
            check_effect(dialect, given)
        except FieldError as error:
            name = flags.get(error.field)
            raise UserError(f"{self.word(name)}: {error.reason}" if name else str(error)) from None
        return Resolved(dialect, named.differences(dialect))

    def counted_padding(self) -> str | None:
        """See RunFlags: some dialects use the model's outputs at padding positions."""
        counts = self.resolved.dialect.counts_padding
        return f"the dialect {self.dialect} counts numbers of padding" if counts else None

    def _set_fields(self) -> dict[str, object]:
        """{field: value} for each field that --set sets."""
        for word in self.set:
            field = _field(word)
            instead = None if field in Dialect.__dataclass_fields__ else flag_of_other_systems(field, 3)
            if instead:
                raise UserError(f"--set {word}: the dialect has no field {field}. {instead}")
        return parse_settings(self.set)

    def _fields_of_flags(self) -> dict[str, str]:
        """{field: flag} for each field that a flag sets."""
        return {
            field: name
            for name, given in FIELDS_OF_FLAGS.items()
            for field in given
            if getattr(self, name) is not None and (name != "missing_eos_penalty" or self.missing_eos_penalty)
        }

    @property
    def _rows_per_optimizer_step(self) -> int:
        return self.per_device_training_batch_size * (self.gradient_accumulation_steps or 1)

    @property
    def samples_per_prompt(self) -> int:
        """The number of responses that are drawn for each prompt."""
        return self.resolved.dialect.samples_per_prompt

    @property
    def rows_per_rank(self) -> int:
        """The number of responses that each rank draws in a step."""
        return self.per_device_generation_batch_size * self.generation_batches * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """The number of optimizer steps in one PPO epoch."""
        return self.resolved.dialect.mini_batches

    def _check_division(self) -> None:
        made, dialect = self.rows_per_rank, self.resolved.dialect
        sizes = (
            f"batch sizes do not divide: each rank makes {made} responses a step (--per_device_generation_batch_size "
            f"{self.per_device_generation_batch_size} x --generation_batches {self.generation_batches} x "
            f"--num_samples_per_prompt {self.samples_per_prompt}), which is no multiple of the"
        )
        if self.gradient_accumulation_steps is not None:
            step = self._rows_per_optimizer_step
            if made % step:
                batches = step // math.gcd(step, made // self.generation_batches)  # and its multiples divide
                raise UserError(
                    f"{sizes} {step} of an optimizer step ({self.word('per_device_training_batch_size')} x "
                    f"{self.word('gradient_accumulation_steps')}). Change one of them: --generation_batches "
                    f"{math.ceil(self.generation_batches / batches) * batches} makes them divide."
                )
        elif made % dialect.mini_batches:
            raise UserError(
                f"{sizes} dialect's mini_batches {dialect.mini_batches}. Change the sizes, or --set mini_batches=N."
            )
        if dialect.critic_learns_apart and made % dialect.critic_passes[1]:
            raise UserError(
                f"{sizes} critic's {dialect.critic_passes[1]} mini-batches. Change the sizes, or --set "
                "critic_mini_batches=N."
            )

    @classmethod
    def no_flag(cls, name: str, value: str) -> str | None:
        """If `name` is a dialect field without a flag, returns a message on how to set it."""
        if name == "name" or name not in Dialect.__dataclass_fields__:
            return super().no_flag(name, value)
        own = [f"--{flag_} {value}, or " for flag_, field in DIALECT_FLAGS.items() if field == name]
        return f"{name} is a field of the dialect. Give {''.join(own)}--set {name}={value}."

    @classmethod
    def not_overridden(cls, file: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
        """The YAML file's settings, except those for dialect fields that the command line also sets."""
        taken = [_field(word) for word in given.get("set", [])]
        taken += [field for name, value in given.items() if value != 0 for field in FIELDS_OF_FLAGS.get(name, ())]
        kept = {
            name: value
            for name, value in file.items()
            if not any(field in taken for field in FIELDS_OF_FLAGS.get(name, ()))
        }
        words = kept.pop("set", None) or []
        words = [word for word in (words if isinstance(words, list) else [words]) if _field(word) not in taken]
        return kept | ({"set": words} if words else {})


def _field(word: object) -> str:
    """The name of the field in a text FIELD=VALUE."""
    return word.partition("=")[0] if isinstance(word, str) else ""


DIALECT_FLAGS = {spec.name: spec.metadata["field"] for spec in fields(AlgorithmFlags) if spec.metadata["field"]}
"""{flag: the field that it sets}."""
FIELDS_OF_FLAGS = {name: (field,) for name, field in DIALECT_FLAGS.items()} | {
    "gradient_accumulation_steps": ("mini_batches",),
    "missing_eos_penalty": ("missing_end", "missing_end_value"),
}
"""{flag: fields that it sets}, including two flags from whose values fields are computed."""


START, MOVING = "start", "ema"  # values of --reference


@dataclass(kw_only=True)
class ReferenceFlags(AlgorithmFlags):
    """Step 3's flags for the moving average of the actor's weights, and for the reference model of the KL."""

    enable_ema: bool = flag(
        False,
        "keep a moving average of the actor's weights, and save it beside the actor",
        group="average of the actor",
    )
    ema_device: str | None = flag(
        None,
        "device of the moving average, and of a reference that is refreshed; by default they are beside the master "
        "weights",
        choices=("cpu",),
        only_with=("enable_ema", "reference=ema", "reference_refresh_steps"),
    )
    reference: str = flag(
        START,
        "model that KL is measured to. start: the model that training starts from. ema: the moving average of the "
        "actor, which is kept and saved as with --enable_ema",
        choices=(START, MOVING),
        group="the reference",
    )
    reference_refresh_steps: int | None = flag(
        None,
        "steps between refreshes, at which the reference takes the actor's weights; by default there are none",
        least=1,
    )
    reference_mixup_alpha: float = flag(
        1.0,
        "share of the actor's weights in a refreshed reference; the rest is the old reference",
        above=0,
        most=1,
        only_with="reference_refresh_steps",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, by themselves or in combination."""
        super().validate()
        if self.reference == MOVING and self.reference_refresh_steps is not None:
            raise UserError(
                f"{self.word('reference_refresh_steps')} with --reference {MOVING}: the average moves after every "
                "optimizer step by itself. Give one of them."
            )
        if (self.reference == MOVING or self.reference_refresh_steps) and self.resolved.dialect.likelihood_coef:
            moving = "reference_refresh_steps" if self.reference_refresh_steps else "reference"
            raise UserError(
                f"{self.word(moving)} with likelihood_coef: the likelihood is the SFT model's, and a reference that "
                "follows the actor finds likely whatever the actor writes. Give one of them."
            )

    @property
    def keeps_average(self) -> bool:
        """Whether the run keeps a moving average of the actor's weights."""
        return self.enable_ema or self.reference == MOVING
