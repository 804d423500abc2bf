"""The flags of the merge program."""

from dataclasses import dataclass
from typing import ClassVar

from engine.algo.weight_changes import METHODS
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.zero.config import EngineConfig
from training.flags.arguments import REQUIRED, flag
from training.flags.data_arguments import DataFlags

FRONTIER = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
WITHOUT_DATA = ("known_texts_path", "reward_model_name_or_path", "reward_function", "max_kl")


@dataclass(kw_only=True)
class MergeFlags(DataFlags):
    """Which models are merged, at which scales they are measured and on what, and which one is saved."""

    phase: ClassVar[int] = 3

    data_path: list[str] = flag(
        [],
        "prompts, as in step 3; held-out ones are answered at each scale. Without, nothing is measured, and --scale "
        "says what is saved",
        group="data",
    )
    sft_model_name_or_path: str = flag(REQUIRED, "the model that training started from", group="models")
    trained_model_name_or_path: list[str] = flag(
        REQUIRED, "what was trained from it: saved folders, of whole models or of adapters"
    )
    method: str = flag(
        "linear",
        "how the changes of several models become one: their mean (linear), or one as long as theirs, along the arc "
        "between them (slerp; WARP)",
        choices=METHODS,
    )
    scales: list[float] = flag(
        FRONTIER, "where the line is measured: 0 is the SFT model, 1 the trained one or the mean of several"
    )
    scale: float | None = flag(None, "save the model at this scale", group="what is saved")
    max_kl: float | None = flag(
        None, "save the model with the best score among those within so many nats a response of the SFT model"
    )
    max_shard_size: str = flag("50GB", "larger weight files are split")

    reward_model_name_or_path: str | None = flag(None, "the reward model", group="measuring")
    reward_function: str | None = flag(
        None, "a function or RewardSource class, as in step 3; with a reward model, scores add up"
    )
    known_texts_path: list[str] = flag(
        [],
        "texts whose words count as known, beside those of the prompts: data sets as step 1 reads them, such as the "
        "SFT model's own",
    )
    num_eval_prompts: int = flag(128, "how many held-out prompts are answered at each scale")
    max_prompt_seq_len: int = flag(256, "longest prompt, in tokens")
    max_answer_seq_len: int = flag(256, "longest response, in tokens")
    stop: list[str] = flag([], "strings that end a response, beside the tokens that do")
    temperature: float = flag(1.0, "of sampling")
    per_device_eval_batch_size: int = flag(16, "responses of each rank side by side, and in one forward pass")
    zero_stage: int = flag(0, "3 divides each model over the ranks; at 0 each rank has all of them", choices=(0, 3))

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        DataFlags.validate(self)
        self.finite("scale", "max_kl")
        self.above(0, "temperature", "max_kl")
        self.at_least(1, "num_eval_prompts", "max_prompt_seq_len", "max_answer_seq_len", "per_device_eval_batch_size")
        for name in ("preflight", "overwrite_output_dir"):
            if getattr(self, name):
                raise UserError(f"--{name}: the merge program has no use for it. Leave it out.")
        bad = [scale for scale in self.scales if not abs(scale) < 1e6]
        if bad:
            raise UserError(f"--scales {bad[0]}: give finite numbers.")
        if len(set(self.scales)) < len(self.scales):
            raise UserError(f"--scales {' '.join(f'{scale:g}' for scale in self.scales)}: a scale is given twice.")
        self._validate_choice()

    def _validate_choice(self) -> None:
        if self.scale is not None and self.max_kl is not None:
            raise UserError(
                f"--scale {self.scale:g} and --max_kl {self.max_kl:g} both choose a model. Give one of them."
            )
        if self.scale == 0.0:
            raise UserError("--scale 0: that is the SFT model, which is there already. Give another scale.")
        if self.data_path:
            if self.reward_model_name_or_path is None and self.reward_function is None:
                raise UserError(
                    "--data_path without a reward: give --reward_model_name_or_path, --reward_function, or both."
                )
            return
        given = next((name for name in WITHOUT_DATA if getattr(self, name)), None)
        if given is not None:
            raise UserError(f"--{given} needs --data_path: without prompts nothing is measured.")
        if self.scale is None:
            raise UserError("there is nothing to do: give --data_path to measure scales, --scale to save one, or both.")

    @property
    def measured_scales(self) -> list[float]:
        """In rising order, with that of the SFT model, and of the model that is to be saved."""
        chosen = [] if self.scale is None else [self.scale]
        return sorted({0.0, *self.scales, *chosen}) if self.data_path else []

    def engine_spec(self) -> EngineSpec:
        """What the engines are to be that measure: frozen ones of policy, reference, and reward model if there is
        one."""
        return EngineSpec(
            actor_path=self.sft_model_name_or_path,
            critic_path=None,
            with_critic=False,
            reward_path=self.reward_model_name_or_path,
            with_reward_model=self.reward_model_name_or_path is not None,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            dtype=str(self.dtype),
            micro_batch_size=self.per_device_eval_batch_size,
            **{role: EngineConfig(role, self.zero_stage) for role in ("actor", "reference", "reward")},
        )
