"""The flags of restart points, which all three steps share."""

from dataclasses import dataclass

from engine.errors import UserError
from training.checkpoints.files import Schedule
from training.flags.arguments import RunFlags, flag


@dataclass(kw_only=True)
class RestartFlags(RunFlags):
    """When restart points are written, which are kept, and what a run goes on from."""

    save_steps: int = flag(0, "steps between restart points; 0 for none", group="restart points")
    save_minutes: float = flag(0.0, "minutes between restart points, also beside --save_steps; 0 for none")
    keep_checkpoints: int = flag(0, "keep the newest so many restart points; 0 for all")
    keep_best_checkpoint: bool = flag(
        False, "keep the one of the best held-out score too, and write one wherever an evaluation finds a better score"
    )
    async_checkpoints: bool = flag(
        True, "go on training while a restart point is written, from a copy of the state in host memory"
    )
    resume: str | None = flag(
        None,
        "a restart point, or the output folder of a run, to go on from; auto: the newest one in --output_dir, or the "
        "beginning where that has none",
    )

    def schedule(self) -> Schedule:
        """When restart points are written and which are kept."""
        return Schedule(
            steps=self.save_steps,
            minutes=self.save_minutes,
            keep=self.keep_checkpoints,
            keep_best=self.keep_best_checkpoint,
            asynchronous=self.async_checkpoints,
        )

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        self.at_least(0, "save_steps", "save_minutes", "keep_checkpoints")
        if self.keep_best_checkpoint and not self.keep_checkpoints:
            raise UserError(
                "--keep_best_checkpoint with --keep_checkpoints 0: all restart points are kept. Give "
                "--keep_checkpoints 1 or more, or leave --keep_best_checkpoint out."
            )
