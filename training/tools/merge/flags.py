"""The flags of the merge program."""

from dataclasses import dataclass
from typing import ClassVar

from engine.algo.weight_changes import METHODS
from engine.errors import UserError
from training.config.flags import REQUIRED, flag
from training.config.models import ScoreFlags, refuse_twice
from training.tools.flags import MeasuringFlags

FRONTIER = [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5]


@dataclass(kw_only=True)
class MergeFlags(MeasuringFlags, ScoreFlags):
    """The flags that say which models are merged, at which scales and on which prompts the merged model is measured,
    and at which scale it is saved."""

    program: ClassVar[str] = "merge"

    data_path: list[str] = flag(
        [],
        "prompts; the held-out ones are answered at each scale. Without prompts nothing is measured, and --scale "
        "chooses the saved model",
        group="data",
    )
    sft_model_name_or_path: str = flag(REQUIRED, "model that training started from", group="models")
    trained_model_name_or_path: list[str] = flag(
        REQUIRED, "models that were trained from it: saved folders of whole models or of adapters"
    )
    method: str = flag(
        "linear",
        "how the weight changes of several models become one. linear: their mean. slerp: spherical interpolation, "
        "which keeps their length (WARP)",
        choices=METHODS,
    )
    scales: list[float] = flag(
        FRONTIER,
        "scales of the change that are measured: 0 is the SFT model, 1 the trained model or the merge of several",
    )
    scale: float | None = flag(None, "save the model at this scale", group="what is saved")
    choose_by: str | None = flag(
        None,
        "save the model for which this held-out number is largest: eval/score (the default with --max_kl), or "
        "eval/reward_NAME of one of several rewards, also of one with weight 0",
        only_with="data_path",
    )
    kl_coef: float = flag(
        0.0,
        "number subtracted from what --choose_by names for each nat of KL to the SFT model",
        least=0,
        only_with="choose_by",
    )
    max_kl: float | None = flag(
        None,
        "choose among the models whose KL to the SFT model is at most this many nats per response",
        above=0,
        only_with="data_path",
    )
    max_shard_size: str = flag("50GB", "weight files are split at this size")

    reward_model_name_or_path: list[str] = flag(
        [],
        "reward models, as in step 3. The score is the weighted sum of all rewards; each is measured by itself, too",
        only_with="data_path",
        group="rewards",
    )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        super().validate()
        refuse_twice(self, "trained_model_name_or_path")
        chosen = [self.word(name) for name in ("choose_by", "max_kl") if getattr(self, name) is not None]
        if self.scale is not None and chosen:
            raise UserError(f"--scale {self.scale:g} and {chosen[0]} both choose a model. Give one of them.")
        if self.scale == 0.0:
            raise UserError("--scale 0: that is the SFT model, which is there already. Give another scale.")
        if self.data_path:
            if not self.reward_paths and not self.other_rewards:
                raise UserError(
                    "--data_path without a reward: give --reward_model_name_or_path, --reward_function, --reward_url, "
                    "or --environment."
                )
        elif self.scale is None:
            raise UserError("there is nothing to do: give --data_path to measure scales, --scale to save one, or both.")

    @property
    def measured_scales(self) -> list[float]:
        """The scales to measure, in rising order, including 0 (the SFT model) and --scale; [] without prompts."""
        chosen = [] if self.scale is None else [self.scale]
        return sorted({0.0, *self.scales, *chosen}) if self.data_path else []
