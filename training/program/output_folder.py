"""The folder of a run: whose it may be, what is removed from it, where TensorBoard's files and the metrics go."""

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from engine.errors import UserError
from engine.models.places import base_of, is_adapter
from training.flags.arguments import RunFlags
from training.program import output_lock, written
from training.program.agreement import checked
from training.program.output_lock import LOCK_FILE
from training.program.unwritten import reason_of
from training.reporting.metrics_file import METRICS_FILE
from training.reporting.run_record import RUN_FILE
from training.reporting.views import View
from training.restarts.layout import AUTO, CHECKPOINTS, points_in

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
    _check_names(output_dir)
    _check_apart(args, output_dir)
    for name, folder in folders.items():
        # A run that died before its first restart point begins again.
        begun = getattr(args, "resume", None) == AUTO and written.only_begun(folder)
        _check_own(name, folder, args.overwrite_output_dir or resumed or begun, args.overwrites)


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


def _check_names(output_dir: Path) -> None:
    """Raise UserError for what stands where the run writes and is of another kind: a folder in a file's place or the
    reverse, a pipe; or a link, which may lead to another run's files, or two of them to one folder."""
    folders = (*written.MODEL_FOLDERS[:-1], "samples", CHECKPOINTS, PROFILE, "tensorboard", "wandb")
    for name in (*folders, METRICS_FILE, RUN_FILE, "curves.png", "frontier.png"):
        path = output_dir / name
        kind = "folder" if name in folders else "file"
        if path.exists() and not (path.is_dir() if name in folders else path.is_file()):
            raise UserError(
                f"--output_dir {output_dir}: {name} in it is no {kind}, and the run writes one there. Move it away."
            )
        if path.is_symlink():
            raise UserError(
                f"--output_dir {output_dir}: {name} in it is a link to {path.readlink()}, whose files the run would "
                "replace. Remove the link, or make all of --output_dir a link."
            )


def _check_apart(args: RunFlags, output_dir: Path) -> None:
    """Raise UserError where the output folder is, contains or lies in a model or data set that the run reads."""
    own = output_dir.resolve()
    for name, paths in args.read_paths().items():
        for given in _read_by(paths, name):
            path = Path(given).expanduser().resolve()
            if path.exists() and (own.is_relative_to(path) or path.is_relative_to(own)):
                how = "is" if own == path else "lies in" if own.is_relative_to(path) else "contains"
                raise UserError(
                    f"--output_dir {output_dir}: it {how} --{name} {given}, which the run reads. Give a folder "
                    "apart from it."
                )


def _read_by(paths: Iterable[str], name: str) -> Iterator[str]:
    """What a run reads that is given these paths: of an adapter its base too."""
    for path in paths:
        yield path
        if is_adapter(path):
            yield base_of(path, f"--{name}")


def _check_own(name: str, folder: Path, may_hold_files: bool, overwrites: bool) -> None:
    # A log is often there before the program starts: `... > out/training.log`.
    found = folder.iterdir() if folder.is_dir() else ()
    others = [file for file in found if file.suffix != ".log" and not file.name.startswith(LOCK_FILE)]
    if others and not may_hold_files:
        ways = ["choose another folder"]
        if overwrites:
            ways += ["go on from a restart point in it with --resume"] if points_in(folder) else []
            ways += ["give --overwrite_output_dir to overwrite what stands there"]
        raise UserError(f"{name} {folder} is not empty. {', or '.join(ways).capitalize()}.")


def tensorboard_dir(args: RunFlags) -> Path:
    """This run's TensorBoard folder.

    OUTPUT_DIR/tensorboard, or in --tensorboard_path one with the output folder's name.
    """
    output_dir = Path(args.output_dir)
    if args.tensorboard_path is None or Path(args.tensorboard_path).resolve() == output_dir.resolve():
        return output_dir / "tensorboard"
    shared = Path(args.tensorboard_path) / f"{output_dir.resolve().parent.name}_{output_dir.resolve().name}"
    return output_dir / "tensorboard" if shared.resolve() == output_dir.resolve() else shared


def begin_output_dir(args: RunFlags, resumed: bool = False) -> None:
    """Make the folder ready for this run's files (rank 0 does): what a kill has left half done is put in order, what
    the run will write is listed, and, unless the run that stands there goes on, what an earlier one wrote is removed.

    Models of an earlier run are left until this one's are whole. Raises: UserError on all ranks if that cannot be done.
    """
    from engine import distributed

    distributed.barrier()  # no rank may still be reading there
    checked(lambda: _begin(args, resumed))


def _begin(args: RunFlags, resumed: bool) -> None:
    from training.program.model_folders import finish_interrupted

    folder, events = Path(args.output_dir), tensorboard_dir(args)
    try:
        finish_interrupted(folder)
        if not resumed:
            left = written.remove_earlier(folder)
            if events.parent != folder:
                left += [str(events / name) for name in written.remove_earlier(events)]
            if left:
                shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
                print(f"{folder}: not this program's, and left alone: {shown}", flush=True)
        names = [METRICS_FILE, RUN_FILE, "curves.png", written.POINTS]
        names += [f"{PROFILE}/step_{step:06d}_rank*.json.gz*" for step in getattr(args, "profile_steps", ())]
        if args.enable_tensorboard:
            own = f"events.out.tfevents.*.{socket.gethostname()}.{os.getpid()}.*"
            if events.parent == folder:
                names.append(f"{events.name}/{own}")
            else:
                written.announce(events, own)
        written.announce(folder, *names)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: {error.filename or folder} cannot be made ready ({reason_of(error)}). Run the "
            "same command again then."
        ) from None


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
