"""The flags of LoRA: DeepSpeed-Chat's names and meanings, and beside them what users of peft expect.

Source: microsoft/DeepSpeedExamples 83757d9c, applications/DeepSpeed-Chat/training/step*/main.py. `--lora_module_name`
is "decoder.layers." there, OPT's; here all linear layers but the head, which for OPT are the same ones.
"""

from dataclasses import dataclass
from typing import ClassVar

from engine.errors import UserError
from engine.models.lora import ALL_LINEAR, LoraSpec
from training.flags.arguments import RunFlags, flag

LEARNING_RATE = 5e-4  # DeepSpeed-Chat's, of actor and critic alike


@dataclass(kw_only=True)
class LoraFlags(RunFlags):
    """What the adapters of a run have in common; a step's own flags say of which rank each model's is.

    lora_models: what stands before `lora_dim` and its like, once for each model that can have an adapter.
    """

    lora_models: ClassVar[tuple[str, ...]]

    only_optimize_lora: bool = flag(
        False,
        "train the factors alone (and a score head); otherwise all that is not adapted, such as biases, norms and "
        "embeddings, trains too, with the model's own learning rate",
        group="LoRA",
    )
    lora_alpha: float | None = flag(
        None, "updates are scaled by alpha / dimension; by default 1, as in DeepSpeed-Chat (peft's is 8)"
    )
    lora_target_modules: list[str] = flag(
        [],
        "the adapted layers by the last part of their names, such as q_proj v_proj, or all-linear: all but the output "
        "head, which is the default; all-linear lm_head has that one too",
    )
    lora_dropout: float | None = flag(None, "dropout before the factors, while steps 1 and 2 train; step 3 has none")

    save_merged: str = flag(
        "auto",
        "beside the adapters save the models with these merged into them, too; auto: where the disk has room for them",
        choices=("auto", "true", "false"),
    )

    def validate_lora(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        self.at_least(0, "lora_dropout", *self._names("dim"), *self._names("learning_rate"))
        self.above(0, "lora_alpha")
        self.finite("lora_alpha")
        if self.lora_dropout is not None and self.lora_dropout >= 1:
            raise UserError(f"--lora_dropout {self.lora_dropout}: must be less than 1.")
        for model in self.lora_models:
            self._refuse_without_dim((f"{model}lora_module_name", f"{model}lora_learning_rate"), (f"{model}lora_dim",))
            if getattr(self, f"{model}lora_module_name") and self.lora_target_modules:
                raise UserError(
                    f"--{model}lora_module_name {getattr(self, f'{model}lora_module_name')} and --lora_target_modules "
                    f"{' '.join(self.lora_target_modules)} say the same. Give one of them."
                )
        if self.save_merged == "false" and not self.only_optimize_lora and any(map(self.lora, self.lora_models)):
            raise UserError(
                "--save_merged false without --only_optimize_lora: an adapter has no place for the biases, norms and "
                "embeddings that train too, so that the merged model is all there is to save. Leave it out, or give "
                "--only_optimize_lora."
            )
        shared = ("only_optimize_lora", "lora_alpha", "lora_target_modules", "lora_dropout", "save_merged")
        self._refuse_without_dim(shared, self._names("dim"))

    def lora(self, model: str = "") -> LoraSpec | None:
        """The adapter that is asked for of a model, or None. model: one of `lora_models`."""
        dim, rate = getattr(self, f"{model}lora_dim"), getattr(self, f"{model}lora_learning_rate")
        if not dim:
            return None
        targets = getattr(self, f"{model}lora_module_name") or tuple(self.lora_target_modules)
        if self.scores(model) and ALL_LINEAR in self.lora_target_modules:
            targets = ()  # what stands beside it is of a language model's output head, which a scorer has none of
        return LoraSpec(
            dim=dim,
            alpha=1.0 if self.lora_alpha is None else self.lora_alpha,
            targets=ALL_LINEAR if targets in ((), (ALL_LINEAR,)) else targets,
            dropout=self.lora_dropout or 0.0,
            lr=LEARNING_RATE if rate is None else rate,
            only=self.only_optimize_lora,
            seed=self.seed,
        )

    def scores(self, model: str) -> bool:
        """Whether a model, one of `lora_models`, has a score head in place of an output head."""
        return model == "critic_"

    def check_rate(self, model: str, rate: float, by: str | None = None) -> None:
        """Raise UserError where factors are to learn beside weights whose rate is 0, of which theirs is no multiple.

        rate: of the model's weights. model: one of `lora_models`. by: the flag that it has factors by, if it is not the
        one of their rank.
        """
        dim = getattr(self, f"{model}lora_dim")
        if (dim or by) and not rate:
            raise UserError(
                f"--{model}learning_rate 0 with {by or f'--{model}lora_dim {dim}'}: the rate of the "
                f"factors, --{model}lora_learning_rate, is held as a multiple of this one. Give one above 0; "
                "--only_optimize_lora keeps all but the factors as they are."
            )

    def _names(self, ending: str) -> list[str]:
        return [f"{model}lora_{ending}" for model in self.lora_models]

    def _refuse_without_dim(self, names: tuple[str, ...], dims: tuple[str, ...] | list[str]) -> None:
        if any(getattr(self, dim) for dim in dims):
            return
        for name in names:
            value = getattr(self, name)
            if value is not None and value is not False and value not in ([], "auto"):
                words = value if isinstance(value, list) else [] if value is True else [value]
                raise UserError(
                    f"{' '.join([f'--{name}', *map(str, words)])} needs {' or '.join(f'--{dim}' for dim in dims)}, "
                    "the rank of the factors: without it there is no LoRA. Give it, or leave the flag out."
                )


@dataclass(kw_only=True)
class ModelLoraFlags(LoraFlags):
    """The adapter of steps 1 and 2."""

    lora_models: ClassVar[tuple[str, ...]] = ("",)

    lora_dim: int = flag(0, "rank of the factors that train in place of matrices; 0: no LoRA, all weights train")
    lora_module_name: str | None = flag(
        None, "adapt the linear layers whose names contain this; by default --lora_target_modules says which"
    )
    lora_learning_rate: float | None = flag(None, f"the factors' peak learning rate; by default {LEARNING_RATE}")


@dataclass(kw_only=True)
class RoleLoraFlags(LoraFlags):
    """The adapters of step 3."""

    lora_models: ClassVar[tuple[str, ...]] = ("actor_", "critic_")

    actor_lora_dim: int = flag(
        0, "rank of the factors that train in place of the actor's matrices; 0: no LoRA, all its weights train"
    )
    critic_lora_dim: int = flag(0, "the same, of the critic")
    actor_lora_module_name: str | None = flag(
        None,
        "adapt the actor's linear layers whose names contain this; by default --lora_target_modules says which",
    )
    critic_lora_module_name: str | None = flag(None, "the same, of the critic's layers")
    actor_lora_learning_rate: float | None = flag(
        None, f"peak learning rate of the actor's factors; by default {LEARNING_RATE}"
    )
    critic_lora_learning_rate: float | None = flag(
        None, f"peak learning rate of the critic's factors; by default {LEARNING_RATE}"
    )
    share_trunk: bool = flag(
        False,
        "one model serves actor, critic, reference and reward model, each with an adapter and a head of its own; needs "
        "--only_optimize_lora",
    )

    def validate_lora(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate_lora()
        if self.lora_dropout:
            raise UserError(
                f"--lora_dropout {self.lora_dropout}: PPO compares the probabilities that a response had when it was "
                "sampled with those that it has now, and dropout would change them by itself. Leave it out, or give 0."
            )
        if self.share_trunk and not (self.only_optimize_lora and self.actor_lora_dim):
            raise UserError(
                "--share_trunk needs --only_optimize_lora and --actor_lora_dim: what all four models share must not "
                "train."
            )
