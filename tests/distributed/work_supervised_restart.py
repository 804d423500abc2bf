"""Run by ranks: steps 1 and 2 whole, and stopped in the middle of a step or of what follows, and gone on with."""

import contextlib
import shutil
from pathlib import Path
from unittest import mock

from engine import distributed
from scripts.harness.programs import PROGRAMS, Tiny, command_line
from training.config.parsing import parse_flags
from training.runtime import output_folder
from training.supervised import SupervisedTrainer

SAVE_STEPS, BROKEN_AT = 3, 6  # the checkpoints of steps 3 and 6; the step after 5 does not come to its end
NORMALIZATION = "training.step2_reward.score_statistics"


class Killed(BaseException):
    """Ends a run where it stands: nothing in it expects this."""


def all_runs(folder: str, tiny: Tiny, stages: tuple[int, ...]) -> dict[str, list[bool]]:
    """By STEP_STAGE, which of two courses ended; they write into `folder`/STEP_STAGE_whole and STEP_STAGE_resumed."""
    ended = {}
    for step in (1, 2):
        for stage in stages:
            whole, resumed = (Path(folder) / f"{step}_{stage}_{name}" for name in ("whole", "resumed"))
            flags = flags_of(tiny, step, stage)
            ended[f"{step}_{stage}"] = [run(step, flags, whole)]
            with broken_at(BROKEN_AT):
                run(step, flags, resumed)
            if stage == 0:
                keep(resumed, Path(folder) / f"{step}_half")
            if step == 2:
                with mock.patch(NORMALIZATION, side_effect=Killed):
                    run(step, flags, resumed)
            ended[f"{step}_{stage}"].append(run(step, flags, resumed))
    return ended


def flags_of(tiny: Tiny, step: int, stage: int) -> dict:
    """32 examples in micro-batches of 2 by 2 ranks, 2 a step: 4 steps an epoch, two epochs; stage 3 with dropout."""
    return tiny.flags(
        step,
        zero_stage=stage,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=3e-3,
        dropout=0.1 if stage == 3 else 0.0,
        save_steps=SAVE_STEPS,
        resume="auto",
        eval_interval=3,
        **({"normalize_before": True} if step == 2 else {}),
    )


def run(step: int, flags: dict, output_dir: Path) -> bool:
    """Run the program of this step in these processes; whether it came to its end, or was killed."""
    module, flags_class = PROGRAMS[step]
    args = parse_flags(flags_class, command_line({**flags, "output_dir": output_dir, "dtype": "fp32"}), "", print)
    ended = False
    with contextlib.suppress(Killed):
        module.main(args)
        ended = True
    output_folder.release_lock()
    distributed.barrier()
    return ended


def broken_at(step: int):
    """Within this context a run ends in the middle of this step, after its backward passes."""
    whole = SupervisedTrainer.optimizer_step

    def optimizer_step(self, number, batches):
        if number == step:
            self.checkpoints.wait()  # the checkpoint of step 3 is whole, however slow the disk
            self.loss(batches[0], mock.Mock())
            raise Killed
        return whole(self, number, batches)

    return mock.patch.object(SupervisedTrainer, "optimizer_step", optimizer_step)


def keep(folder: Path, copy: Path) -> None:
    """Rank 0 copies a stopped run's folder, to be gone on with by others."""
    if distributed.is_main():
        shutil.copytree(folder, copy)
    distributed.barrier()
