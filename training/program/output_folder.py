"""The folder of a run: whose it may be, what is removed from it, where TensorBoard's files and the metrics go."""

import os
import shutil
import tempfile
from pathlib import Path

from engine.errors import UserError
from training.flags.arguments import RunFlags
from training.program import output_lock
from training.program.output_lock import LOCK_FILE
from training.reporting.views import View
from training.restarts.layout import CHECKPOINTS, points_in

PROFILE = "profile"  # that of recorded steps


def check_output_dirs(args: RunFlags, resumed: bool = False) -> None:
    """Make sure that the output folder and TensorBoard's are the run's own: new, empty, resumed, or given up by their
    owner; and that no other run writes there, now or (but for a dry run) until `output_lock.release`.

    resumed: whether the run that is gone on with stands there. Raises: UserError if another run, or anything else,
    stands there, or if nothing can be written there.
    """
    output_dir = Path(args.output_dir)
    folders = {"--output_dir": output_dir}
    if tensorboard_dir(args).parent != output_dir:
        folders["--tensorboard_path"] = tensorboard_dir(args)
    for name, folder in folders.items():
        _check_writable(name, folder)
    if not args.dry_run:
        output_lock.take(output_dir)
    for name, folder in folders.items():
        _check_own(name, folder, args.overwrite_output_dir or resumed)


def _check_writable(name: str, folder: Path) -> None:
    nearest = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    if not nearest.is_dir():
        kind = "a link that leads nowhere" if nearest.is_symlink() and not nearest.is_file() else "a file"
        raise UserError(f"{name} {folder}: {nearest} is {kind}. Give a folder.")
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()  # permissions do not tell of quotas or of network folders
    except OSError as error:
        raise UserError(
            f"{name} {folder}: nothing can be written into {nearest} ({error.strerror}). Give another folder."
        ) from None


def _check_own(name: str, folder: Path, may_hold_files: bool) -> None:
    # A log is often there before the program starts: `... > out/training.log`.
    found = folder.iterdir() if folder.is_dir() else ()
    others = [file for file in found if file.suffix != ".log" and not file.name.startswith(LOCK_FILE)]
    if others and not may_hold_files:
        go_on = " go on from a restart point in it with --resume," if points_in(folder) else ""
        raise UserError(
            f"{name} {folder} is not empty. Choose another folder,{go_on} or give --overwrite_output_dir "
            "to overwrite what stands there."
        )


def tensorboard_dir(args: RunFlags) -> Path:
    """This run's TensorBoard folder.

    OUTPUT_DIR/tensorboard, or in --tensorboard_path one with the output folder's name.
    """
    output_dir = Path(args.output_dir)
    if args.tensorboard_path is None or Path(args.tensorboard_path).resolve() == output_dir.resolve():
        return output_dir / "tensorboard"
    shared = Path(args.tensorboard_path) / f"{output_dir.resolve().parent.name}_{output_dir.resolve().name}"
    return output_dir / "tensorboard" if shared.resolve() == output_dir.resolve() else shared


def clear_output_dir(args: RunFlags) -> None:
    """Remove what an earlier run logged and recorded there and its restart points (rank 0 does), so that its curves do
    not go on in the new run's and --resume does not find a point of it.

    Models are left until they are overwritten.
    """
    from engine import distributed

    distributed.barrier()  # no rank may still be reading there
    if distributed.is_main():
        folder = Path(args.output_dir)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        for path in (folder / "samples", folder / CHECKPOINTS, folder / PROFILE):
            shutil.rmtree(path, ignore_errors=True)
        for file in tensorboard_dir(args).glob("events.out.tfevents.*"):
            file.unlink()
    distributed.barrier()


def open_writer(args: RunFlags, *, total_steps: int, view: View, resume_step: int | None = None):
    """Where the run's metrics go; on the main rank its folders are made by this."""
    from training.reporting.sinks import MetricWriter

    return MetricWriter(
        args.output_dir,
        total_steps=total_steps,
        resume_step=resume_step,
        view=view,
        tensorboard=args.enable_tensorboard,
        tensorboard_dir=tensorboard_dir(args),
        wandb_project=args.wandb_project,
    )
