"""The output folder of a run: new, empty, or that of the run that is resumed. One run at a time writes into it.

Rank 0 holds a lock of the kernel (fcntl) on OUTPUT_DIR/run.lock until the run ends. The kernel releases the lock when
the process ends, however it ends, and never before: a stopped process keeps it. The processes that it has forked do not
hold it. The file's text names the holder, for messages and for the ranks on other hosts (`check_shared`).

Since the folder was empty when the run began, what stands in it under a name that the run writes is the run's own: a
resumed run replaces it. Files of other names are never removed; those in a model's folder are kept in its new folder.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import time
from datetime import datetime
from pathlib import Path

from engine import distributed
from engine.atomic_files import OLD, PARTIAL, remove_folder, restored, sync
from engine.errors import SharedError, UserError, shown_command
from engine.files import read_text, without_links
from engine.models.model_paths import base_of, is_adapter
from training.checkpoints.files import AUTO, CHECKPOINTS, checkpoints_in
from training.config.flags import RunFlags
from training.reporting.run_record import METRICS_FILE, RUN_FILE, recorded_models
from training.reporting.sinks import MetricWriter, View
from training.reporting.step_metrics import PROFILE
from training.reporting.trackers import RUNS_FILE
from training.runtime.ranks import checked
from training.runtime.stopping import reason_of

LOCK_FILE = "run.lock"
SHOWN_COMMAND = 100  # characters of the holder's command that a message shows

_held: "OutputLock | None" = None
_passing: list[Path] = []  # temporary folders, which are removed together with the lock


def take_lock(folder: Path) -> None:
    """Take the folder's lock, which this process then holds until `release_lock`. Makes the folder if necessary.

    Raises: UserError, which names the holder, if another run writes there, or if nothing can be written there.
    """
    global _held
    release_lock()
    _held = OutputLock(folder)


def release_lock() -> None:
    """Release the lock if this process holds one. Removes folders that were made for it and are still empty."""
    global _held
    if _held is not None:
        while _passing:
            shutil.rmtree(_passing.pop(), ignore_errors=True)
        _held.release()
    _held = None


def remove_with(folder: Path) -> None:
    """Have this folder removed when the lock is released. The lock is also released if the run stops early, for example
    by a Ctrl-C."""
    _passing.append(folder)


class OutputLock:
    """The lock of one folder. It is taken when the object is made. Raises UserError as `take_lock` does.

    text: the lock file's text, which differs from those of other runs. This process must not open the lock file again:
    the kernel releases a process's lock when the process closes any descriptor of the file.
    """

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / LOCK_FILE
        since = datetime.now().astimezone().isoformat(timespec="milliseconds")
        command = textwrap.shorten(shown_command(sys.argv), SHOWN_COMMAND, placeholder=" ...")
        text = f"process {os.getpid()} on {socket.gethostname()} since {since} ({command})"
        self.text = text.encode(errors="replace").decode()  # half characters cannot be written
        self._descriptor: int | None = None
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._locked()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self.text.encode(), 0)
        except OSError as error:
            self.release()
            raise UserError(
                f"--output_dir {folder}: nothing can be written there ({error.strerror}). Give another folder."
            ) from None

    def release(self) -> None:
        """Remove the lock file, if it is still this one, release the lock, and remove folders that were made for it and
        are empty."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(self._descriptor), self.path.lstat()):
                    self.path.unlink()
            os.close(self._descriptor)
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _locked(self) -> int:
        """Open the lock file and lock it; returns its descriptor."""
        while True:
            # O_NONBLOCK: a pipe in its place must not hold the run.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):  # which systems use for a lock that another has
                    holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
                    os.close(descriptor)
                    raise UserError(
                        f"--output_dir {self.folder}: another run writes there, {holder or 'which has just begun'}. "
                        "Wait for its end, end it, or give another folder."
                    ) from None
                print(
                    f"WARNING: the file system of {self.folder} has no locks ({error.strerror}): nothing keeps a "
                    "second run from writing there.",
                    flush=True,
                )
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self.path.lstat()):
                    return descriptor
            os.close(descriptor)  # the holder before has just removed the file


PATIENCE = 35.0  # seconds for which a rank looks; NFS may cache a folder's content for 30 seconds (acdirmin)
INTERVAL = 0.1  # seconds between two looks
SHOWN_HOSTS = 4  # number of hosts that a message names


def check_shared(output_dir: str) -> None:
    """Raise UserError on all ranks if one of them does not see rank 0's run.lock, or cannot write into its folder (all
    ranks call this).

    All ranks write their parts of a checkpoint into the output folder, so they must share it. Each rank looks there for
    the lock file, which rank 0 has just written and whose content no other run has. Other folders are not checked: rank
    0 alone writes models, metrics and TensorBoard's files, each node may have its own cache, and NVMe folders are local
    to a node.
    """
    if distributed.world_size() == 1:
        return
    folder = Path(output_dir).absolute()
    text = distributed.broadcast_object(_held.text if _held is not None else None)
    found = distributed.all_gather_objects((socket.gethostname(), str(folder), _problem(folder, text)))
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, (host, own, problem) in enumerate(found):
        if problem:
            ranks.setdefault((host, own, problem), []).append(rank)
    if ranks:
        writer, written, _ = found[0]
        told = []  # "node-b (8 ranks, 8 to 15), which looks in /out, does not see that"
        for (host, own, problem), having in ranks.items():
            numbers = f"rank {having[0]}" if len(having) == 1 else f"{len(having)} ranks, {having[0]} to {having[-1]}"
            told.append(f"{host} ({numbers}), which looks in {own}, {problem}")
        more = f"; and {len(told) - SHOWN_HOSTS} more" if len(told) > SHOWN_HOSTS else ""
        raise SharedError(
            f"--output_dir {output_dir} is not one folder for all ranks. Rank 0 on {writer} writes in {written}; "
            f"{'; '.join(told[:SHOWN_HOSTS])}{more}. Models and checkpoints need a folder that all nodes share: "
            "give one on a network file system, mounted at the same path on all of them and writable on each."
        )


def _problem(folder: Path, text: str) -> str:
    """A text that says why this rank cannot share rank 0's folder; "" if it can. text: the text of rank 0's lock
    file."""
    deadline = time.monotonic() + PATIENCE
    while not distributed.is_main() and _content(folder / LOCK_FILE) != text:
        if time.monotonic() > deadline:
            return "does not see that"
        time.sleep(INTERVAL)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write there ({reason_of(error)})"
    return ""


def _content(path: Path) -> str:
    """The text of a lock file; "" if it cannot be read."""
    try:
        return read_text(path)
    except (OSError, ValueError):
        return ""


COMPLETE = "model.complete"  # a whole model that is being moved into the output folder itself; see model_folders.py
MODEL_FOLDERS = (
    *("actor", "critic", "actor_ema", "actor_adapter", "critic_adapter", "actor_ema_adapter"),
    *("critic_pretrained", "critic_pretrained_adapter", "adapter", "."),
)
WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""The names of a saved model's files of weights. Two saves of a model may differ in their number."""
model_files: dict[Path, list[str]] = {}
"""{folder: names of the files} of the models that this process has saved."""


def check_output_dirs(args: RunFlags, resumed: bool = False) -> None:
    """Check that the output folder and TensorBoard's folder are new or empty, or belong to the run that is resumed.
    Except in a dry run, the lock is taken, so that no other run writes there until `release_lock`.

    resumed: whether the folder holds the run that is resumed. With --resume auto, a run that neither wrote a checkpoint
    nor came to its end begins again in its folder. Raises: UserError if the folder holds another run or anything else,
    or if nothing can be written there.
    """
    output_dir = Path(args.output_dir)
    folders = {"--output_dir": output_dir}
    if tensorboard_dir(args).parent != output_dir:
        folders["--tensorboard_path"] = tensorboard_dir(args)
    for name, folder in folders.items():
        _check_writable(name, folder)
    if not args.dry_run:
        take_lock(output_dir)
    _check_apart(args, output_dir)
    if resumed or (getattr(args, "resume", None) == AUTO and _only_begun(output_dir)):
        _check_names(output_dir)
        return
    for name, folder in folders.items():
        found = folder.iterdir() if folder.is_dir() else ()
        # A log is often there before the program starts: `... > out/training.log`.
        if any(path.suffix != ".log" and path.name != LOCK_FILE for path in found):
            way = ", or go on from a checkpoint in it with --resume" if checkpoints_in(folder) else ""
            raise UserError(f"{name} {folder} is not empty. Choose another folder{way}.")


def _only_begun(folder: Path) -> bool:
    """Whether the folder holds a run without checkpoints whose models were not saved. Raises: UserError."""
    return (folder / RUN_FILE).is_file() and not checkpoints_in(folder) and not recorded_models(folder)


def _check_writable(name: str, folder: Path) -> None:
    nearest = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    if not nearest.is_dir():
        kind = "a link that leads nowhere" if nearest.is_symlink() and not nearest.is_file() else "a file"
        raise UserError(f"{name} {folder}: {nearest} is {kind}. Give a folder.")
    try:
        tempfile.TemporaryDirectory(dir=nearest).cleanup()  # a real test: permissions say nothing about quotas
    except OSError as error:
        raise UserError(
            f"{name} {folder}: nothing can be written into {nearest} ({error.strerror}). Give another folder."
        ) from None


def _check_names(output_dir: Path) -> None:
    """Raise UserError if a path to which the run writes is of the wrong kind: a folder where the run writes a file, a
    file where it makes a folder, a pipe, or a link. A link may lead to another run's files, and two links may lead to
    the same folder."""
    folders = (*MODEL_FOLDERS[:-1], "samples", CHECKPOINTS, PROFILE, "tensorboard", "wandb", "swanlab")
    for name in (*folders, METRICS_FILE, RUN_FILE, RUNS_FILE):
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
    """Raise UserError if the output folder is a model or data set that the run reads, contains one, or lies in one."""
    own = without_links(output_dir)
    for name, paths in args.read_paths().items():
        bases = [base_of(path, f"--{name}") for path in paths if is_adapter(path)]
        for given in (*paths, *bases):
            path = without_links(Path(given).expanduser())
            if path.exists() and (own.is_relative_to(path) or path.is_relative_to(own)):
                how = "is" if own == path else "lies in" if own.is_relative_to(path) else "contains"
                raise UserError(
                    f"--output_dir {output_dir}: it {how} --{name} {given}, which the run reads. Give a folder "
                    "apart from it."
                )


def tensorboard_dir(args: RunFlags) -> Path:
    """This run's TensorBoard folder: OUTPUT_DIR/tensorboard, or the folder in --tensorboard_path that has the output
    folder's name."""
    output_dir, own = Path(args.output_dir), without_links(args.output_dir)
    if args.tensorboard_path is None or without_links(args.tensorboard_path) == own:
        return output_dir / "tensorboard"
    shared = Path(args.tensorboard_path) / f"{own.parent.name}_{own.name}"
    return output_dir / "tensorboard" if without_links(shared) == own else shared


def begin_output_dir(args: RunFlags, resumed: bool = False) -> None:
    """Prepare the folder for this run (rank 0 does). Finish or remove saves that were interrupted by a kill. Raises:
    UserError on all ranks if this fails."""
    distributed.barrier()  # no rank may still be reading there
    checked(lambda: _begin(Path(args.output_dir), resumed))


def _begin(folder: Path, resumed: bool) -> None:
    try:
        finish_interrupted(folder)
        if not resumed:  # the files of a run that begins again
            for name in (METRICS_FILE, RUNS_FILE):
                (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"--output_dir {folder}: {error.filename or folder} cannot be made ready ({reason_of(error)}). Run the "
            "same command again then."
        ) from None


def finish_interrupted(output_dir: Path) -> None:
    """Finish saves that were interrupted by a kill: a whole model is moved to its place, incomplete models are removed.

    Raises: OSError.
    """
    complete = output_dir / COMPLETE
    if complete.is_symlink():
        complete.unlink()
    elif complete.is_dir():
        link_complete(output_dir)
    for name in MODEL_FOLDERS:
        place = output_dir / ("model" if name == "." else name)
        with contextlib.suppress(OSError):
            restored(place)
        for ending in (PARTIAL, OLD):
            with contextlib.suppress(OSError):
                remove_folder(place.with_name(place.name + ending))


def link_complete(output_dir: Path) -> None:
    """Move the model in model.complete into the output folder itself, and remove model.complete."""
    complete = output_dir / COMPLETE
    (output_dir / "config.json").unlink(missing_ok=True)  # from here on, no mixture of two models can be loaded
    files = [path for path in complete.iterdir() if path.is_file() and not path.is_symlink()]
    for path in output_dir.iterdir():
        if WEIGHTS.fullmatch(path.name) and not (complete / path.name).exists():
            path.unlink()
    for file in sorted(files, key=lambda path: path.name == "config.json"):
        link = output_dir / f"{file.name}.tmp"
        link.unlink(missing_ok=True)
        try:
            os.link(file, link)
        except OSError:  # a file system without hard links
            shutil.copyfile(file, link)
            sync(link)
        link.replace(output_dir / file.name)
    sync(output_dir)
    rest = output_dir / f"model{PARTIAL}"  # renamed first: it is not whole while it is removed
    remove_folder(rest)
    complete.replace(rest)
    shutil.rmtree(rest)


def open_writer(args: RunFlags, *, total_steps: int, view: View, resume_step: int | None = None) -> MetricWriter:
    """The run's MetricWriter. On the main rank it makes the folders into which it writes."""
    return MetricWriter(
        args.output_dir,
        total_steps=total_steps,
        resume_step=resume_step,
        view=view,
        report_to=args.reports,
        tensorboard_dir=tensorboard_dir(args),
        project=args.report_project,
    )
