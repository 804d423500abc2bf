"""The flags that give fields of the dialect a value, and the dialect that they make: `AlgorithmFlags.resolved_dialect`.

--kl_coef 0.2 becomes the field kl_coef of a Dialect (engine/algorithms/dialect.py) here.

The flags of the actor's moving average, and of a reference that follows the actor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from engine.algorithms import DIALECTS, Dialect, get_dialect, parse_settings
from engine.algorithms.values import VALUES, FieldError
from engine.errors import UserError
from training.config.flags import DataFlags, flag
from training.config.other_systems import flag_of_other_systems


@dataclass(kw_only=True)
class AlgorithmFlags(DataFlags):
    """The algorithm of step 3. Flags without a default of their own take the dialect's value."""

    dialect: str = flag("default", "whose algorithmic choices are taken", choices=DIALECTS, group="algorithm")
    kl_coef: float | None = flag(None, "coefficient of the KL penalty")
    score_clip: float | None = flag(None, "scores are clipped to plus or minus this")
    missing_eos_penalty: float = flag(
        0.0, "subtracted from the score of a response that did not end by itself: missing_end=subtract"
    )
    gamma: float | None = flag(None, "discount a token")
    lam: float | None = flag(None, "lambda of GAE")
    clip_range: float | None = flag(None, "clip range of the ratio")
    value_clip_range: float | None = flag(None, "clip range of the values")
    whiten_advantages: bool | None = flag(None, "scale advantages to mean 0 and variance 1 over all tokens")
    ppo_epochs: int | None = flag(None, "passes over each step's responses")
    temperature: float | None = flag(None, "of sampling")
    old_logprobs: str | None = flag(
        None,
        "where the ratio's old log-probs come from: a forward pass over the finished responses, or the sampler, "
        "which saves that pass (rollout/logprob_gap tells how far apart the two are); auto: the sampler in fp32 where "
        "it computes with the actor's own code, so that both are the same within rounding",
        choices=VALUES["old_logprobs"],
    )
    ema_decay: float | None = flag(None, "decay of the moving average that --enable_ema keeps")
    set: list[str] = flag(
        [],
        "any field of the dialect as FIELD=VALUE, such as kl_controller=adaptive kl_target=6; "
        "`python -m engine.algorithms` lists the fields; given again, it adds to what was set, and a field "
        "that the command line gives wins over a YAML file's",
        adds_up=True,
    )

    actor_learning_rate: float | None = flag(None, "the actor's peak learning rate", group="optimization")
    critic_learning_rate: float | None = flag(None, "the critic's peak learning rate")
    actor_weight_decay: float | None = flag(None, "AdamW's, of the actor's matrices")
    critic_weight_decay: float | None = flag(None, "AdamW's, of the critic's matrices")
    lr_scheduler_type: str | None = flag(None, "shape of the learning rate", choices=VALUES["lr_schedule"])
    num_warmup_steps: int | None = flag(None, "optimizer steps of rising learning rate")
    max_grad_norm: float | None = flag(None, "gradients are clipped to this norm; 0 for no clipping")
    critic_pretrain_steps: int = flag(
        0,
        "steps before the first that train the critic alone, on responses of the SFT model and what really followed "
        "(lambda 1); they move neither prompts nor learning rates of the others. The critic is saved as "
        "OUTPUT_DIR/critic_pretrained, from which another run may start: its --critic_model_name_or_path, with "
        "--reward_model_name_or_path beside it",
    )
    critic_pretrain_learning_rate: float | None = flag(
        None, "the critic's peak learning rate in these steps; by default --critic_learning_rate"
    )
    critic_warmup_steps: int = flag(0, "steps at the start that train the critic alone")
    max_kl: float | None = flag(
        None,
        "end the run, before another update, when a step's responses are further from the reference than so many "
        "nats a response (objective/kl)",
    )

    per_device_generation_batch_size: int = flag(16, "prompts answered at once by each rank", group="batch sizes")
    generation_batches: int = flag(1, "so many times as many prompts in one step; they wait until others have ended")
    num_samples_per_prompt: int | None = flag(None, "responses drawn for each prompt")
    per_device_training_batch_size: int = flag(16, "responses in one forward and backward pass of each rank")
    gradient_accumulation_steps: int | None = flag(
        None,
        "passes in one optimizer step, which decides how many such steps there are (mini_batches); by default "
        "there are as many as the dialect has, and each takes all passes that it needs",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        DataFlags.validate(self)
        self.at_least(
            1,
            "per_device_generation_batch_size",
            "generation_batches",
            "per_device_training_batch_size",
            "gradient_accumulation_steps",
        )
        self.at_least(0, "critic_pretrain_steps", "critic_warmup_steps")
        self.above(0, "critic_pretrain_learning_rate")
        self.finite("critic_pretrain_learning_rate")
        if self.critic_pretrain_learning_rate is not None and not self.critic_pretrain_steps:
            raise UserError(
                f"--critic_pretrain_learning_rate {self.critic_pretrain_learning_rate} needs --critic_pretrain_steps."
            )
        self.above(0, "max_kl")
        self.finite("max_kl")
        self._validate_division()

    def resolved_dialect(self) -> tuple[Dialect, dict[str, tuple]]:
        """The dialect with the given flags in it, and what they changed: {field: (dialect's, given)}.

        Raises: UserError for a value that the dialect cannot have, under the name of the flag that gave it.
        """
        named = get_dialect(self.dialect)
        try:
            resolved = named.replaced(**self.given_fields())
        except FieldError as error:
            name = self._flags_of_fields().get(error.field)
            raise UserError(f"--{name} {getattr(self, name)}: {error.reason}" if name else str(error)) from None
        return resolved, named.differences(resolved)

    def counted_padding(self) -> str | None:
        """As RunFlags has it: of some dialects."""
        counts = self.resolved_dialect()[0].counts_padding
        return f"the dialect {self.dialect} counts numbers of padding" if counts else None

    def given_fields(self) -> dict[str, object]:
        """The dialect's fields that flags give a value, by --set or by a flag of their own.

        Raises: UserError for a field that is given twice, or that is another system's.
        """
        for word in self.set:
            field = _field(word)
            instead = None if field in Dialect.__dataclass_fields__ else flag_of_other_systems(field, 3)
            if instead:
                raise UserError(f"--set {word}: the dialect has no field {field}. {instead}")
        found, flags = parse_settings(self.set), self._flags_of_fields()
        for field, name in flags.items():
            if field in found:
                raise UserError(
                    f"--set {field}={found[field]} and --{name} {getattr(self, name)} say the same. Give one of them."
                )
        found |= {field: getattr(self, name) for field, name in flags.items()}
        if self.missing_eos_penalty:
            found["missing_end"] = "subtract"
        if self.gradient_accumulation_steps is not None:
            samples = found.get("samples_per_prompt", get_dialect(self.dialect).samples_per_prompt)
            made = self.per_device_generation_batch_size * self.generation_batches * samples
            found["mini_batches"] = max(1, made // self._rows_per_optimizer_step)
        return found

    def _flags_of_fields(self) -> dict[str, str]:
        """{field: flag} of the flags that give a field a value."""
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
        """Responses drawn for each prompt."""
        return self.resolved_dialect()[0].samples_per_prompt

    @property
    def rows_per_rank(self) -> int:
        """Responses that each rank makes in a step."""
        return self.per_device_generation_batch_size * self.generation_batches * self.samples_per_prompt

    @property
    def mini_batches(self) -> int:
        """Optimizer steps in one PPO epoch."""
        return self.resolved_dialect()[0].mini_batches

    def _validate_division(self) -> None:
        made, mini_batches = self.rows_per_rank, self.mini_batches
        sizes = (
            f"each rank makes {made} responses a step (--per_device_generation_batch_size "
            f"{self.per_device_generation_batch_size} x --generation_batches {self.generation_batches} x "
            f"--num_samples_per_prompt {self.samples_per_prompt})"
        )
        if self.gradient_accumulation_steps is not None:
            step = self._rows_per_optimizer_step
            if made % step:
                raise UserError(
                    f"batch sizes do not divide: {sizes}, which is no multiple of the {step} of an optimizer step "
                    f"(--per_device_training_batch_size {self.per_device_training_batch_size} x "
                    f"--gradient_accumulation_steps {self.gradient_accumulation_steps})."
                )
        elif made % mini_batches:
            raise UserError(
                f"batch sizes do not divide: {sizes}, which is no multiple of the dialect's mini_batches "
                f"{mini_batches}. Change the sizes, or --set mini_batches=N."
            )
        dialect = self.resolved_dialect()[0]
        if dialect.critic_learns_apart and made % dialect.critic_passes[1]:
            raise UserError(
                f"batch sizes do not divide: {sizes}, which is no multiple of the critic's {dialect.critic_passes[1]} "
                "mini-batches. Change the sizes, or --set critic_mini_batches=N."
            )

    @classmethod
    def no_flag(cls, name: str, value: str) -> str | None:
        """For a field of the dialect that is no flag: how it is set."""
        if name == "name" or name not in Dialect.__dataclass_fields__:
            return super().no_flag(name, value)
        own = [f"--{flag_} {value}, or " for flag_, field in DIALECT_FLAGS.items() if field == name]
        return f"{name} is a field of the dialect. Give {''.join(own)}--set {name}={value}."

    @classmethod
    def not_overridden(cls, file: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
        """What a YAML file says, without the dialect's fields that the command line gives a value, by any flag."""
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
    """The field that a word FIELD=VALUE gives a value."""
    return word.partition("=")[0] if isinstance(word, str) else ""


# Flags whose value is that of a field, first those of another name.
DIALECT_FLAGS = {
    "actor_learning_rate": "actor_lr",
    "critic_learning_rate": "critic_lr",
    "num_warmup_steps": "warmup_steps",
    "lr_scheduler_type": "lr_schedule",
    "num_samples_per_prompt": "samples_per_prompt",
    **{spec.name: spec.name for spec in fields(AlgorithmFlags) if spec.name in Dialect.__dataclass_fields__},
}
# Flag: the fields that it gives a value, with the two flags from which fields are computed.
FIELDS_OF_FLAGS = {name: (field,) for name, field in DIALECT_FLAGS.items()} | {
    "gradient_accumulation_steps": ("mini_batches",),
    "missing_eos_penalty": ("missing_end", "missing_end_value"),
}


START, MOVING = "start", "ema"  # of --reference


@dataclass(kw_only=True)
class ReferenceFlags(AlgorithmFlags):
    """Step 3: the average that is kept of the actor, and what KL is measured to."""

    enable_ema: bool = flag(
        False, "keep a moving average of the actor's weights; saved beside the actor", group="average of the actor"
    )
    ema_device: str | None = flag(
        None,
        "where it is kept, and a reference that is refreshed; by default beside the master weights",
        choices=("cpu",),
    )
    reference: str = flag(
        START,
        "what KL is measured to: the model that training starts from, or the moving average of the actor (ema), which "
        "is kept and saved as with --enable_ema",
        choices=(START, MOVING),
        group="the reference",
    )
    reference_refresh_steps: int | None = flag(
        None, "after every so many steps the reference becomes the actor as it stands; by default it never does"
    )
    reference_mixup_alpha: float = flag(
        1.0, "the actor's share in the reference at a refresh; what was the reference has the rest"
    )

    def validate_reference(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        self.at_least(1, "reference_refresh_steps")
        self.above(0, "reference_mixup_alpha")
        self.at_most(1, "reference_mixup_alpha")
        if self.reference == MOVING and self.reference_refresh_steps is not None:
            raise UserError(
                f"--reference_refresh_steps {self.reference_refresh_steps} with --reference {MOVING}: the average "
                "moves after every optimizer step by itself. Give one of them."
            )
        if self.reference_mixup_alpha != 1.0 and self.reference_refresh_steps is None:
            raise UserError(
                f"--reference_mixup_alpha {self.reference_mixup_alpha} needs --reference_refresh_steps: it is the "
                "actor's share at a refresh."
            )
        if self.ema_device is not None and not self.keeps_average and self.reference_refresh_steps is None:
            raise UserError(f"--ema_device {self.ema_device} needs --enable_ema.")
        if "ema_decay" in self.given_fields() and not self.keeps_average:
            given = "--set ema_decay=" if self.ema_decay is None else "--ema_decay "
            raise UserError(f"{given}{self.given_fields()['ema_decay']} needs --enable_ema.")

    @property
    def keeps_average(self) -> bool:
        """Whether there is a moving average of the actor."""
        return self.enable_ema or self.reference == MOVING

    def moving_reference(self) -> dict[str, object]:
        """The flags of a reference that moves, by name, each None where it does not."""
        refreshed = self.reference_refresh_steps is not None
        return {
            "--reference": self.reference if self.reference != START else None,
            "--reference_refresh_steps": self.reference_refresh_steps,
            "--reference_mixup_alpha": self.reference_mixup_alpha if refreshed else None,
        }
