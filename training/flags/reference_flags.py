"""The flags of the actor's moving average, and of a reference that follows the actor."""

from dataclasses import dataclass

from engine.errors import UserError
from training.flags.algorithm_flags import AlgorithmFlags
from training.flags.arguments import flag

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
