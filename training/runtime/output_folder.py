"""The output folder of a run: its lock, the list of files that this program wrote there, and the removal of these
files.

Only one run at a time writes into an output folder: rank 0 takes the lock OUTPUT_DIR/run.lock before anything is
written. The lock file names the process and the host that hold it. A lock whose process has ended is stale, and the
next run takes it over. A process on another host (or in another container) cannot be checked: its lock is stale if the
lock file has not been refreshed for five minutes, by the clock of the file system. The lock needs no locking calls,
which network file systems may lack; it only requires that two processes cannot create the same file. All ranks have to
see the files that rank 0 writes.

OUTPUT_DIR/written.json lists each file before the file is made. Therefore all files are listed, even if the process is
killed:

    files       names relative to the folder, with * and ? as in a shell; "samples/after.jsonl"
    models      {folder of a model ("." for the output folder itself): the model's files in it}

--overwrite_output_dir removes the listed files and nothing else. Only rank 0 keeps the list. Files that are not listed
belong to somebody else and are never removed, not even in folders that the program made.

The folder and its list may come from somebody who is not trusted. Therefore no path is made from a listed name: the
folder is searched, without following links, and files that the list has are removed.
"""

import contextlib
import fnmatch
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from engine import distributed
from engine.errors import RunStopped, SharedError, UserError, shown_command
from engine.files import parsed_json, read_text, without_links
from engine.models.places import base_of, is_adapter
from engine.whole_files import OLD, PARTIAL, remove_folder, restored, sync, write_whole
from training.checkpoints.files import AUTO, CHECKPOINTS, MANIFEST, files_in, holds_point, points_in
from training.config.flags import RunFlags
from training.reporting.records import METRICS_FILE, RUN_FILE
from training.reporting.sinks import MetricWriter, View
from training.reporting.step_metrics import PROFILE
from training.runtime.agreement import checked
from training.runtime.processes import start_of, this_machine
from training.runtime.stopping import reason_of

LOCK_FILE = "run.lock"
REFRESHED, STALE = 15.0, 300.0  # seconds between refreshes of the lock file, and seconds after which it is stale
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
    _held.start()


def release_lock() -> None:
    """Release the lock if this process holds one. Removes folders that were made for it and are still empty."""
    global _held
    if _held is not None:
        while _passing and _held.taken_by is None:
            shutil.rmtree(_passing.pop(), ignore_errors=True)
        _held.release()
    _held = None


def remove_with(folder: Path) -> None:
    """Have this folder removed when the lock is released. The lock is also released if the run stops early, for example
    by a Ctrl-C."""
    _passing.append(folder)


def lock_token() -> str:
    """The token in this process's lock file, by which the holder of the lock is recognised."""
    assert _held is not None, "no lock is held"
    return _held.record["token"]


def check_held() -> None:
    """Raise RunStopped if another run has taken over the folder, because this run did not refresh the lock for too
    long."""
    if _held is not None and _held.taken_by is not None:
        raise RunStopped(
            f"{_held.folder}: {described_lock(_held.taken_by)} has taken this folder over, since this run gave no sign "
            "of life for five minutes. Nothing more is written there; see that only one of the two goes on."
        )


class OutputLock:
    """The lock of one folder. It is taken when the object is made. Raises UserError as `take_lock` does."""

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / LOCK_FILE
        self.taken_by: dict | None = None
        self.record = {"token": uuid.uuid4().hex, **this_process()}
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="output lock", daemon=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not self._created():
                self._clear_stale()
        except OSError as error:
            self._remove_made()
            raise UserError(
                f"--output_dir {folder}: nothing can be written there ({error.strerror}). Give another folder."
            ) from None

    def start(self) -> None:
        """Start the thread that refreshes the lock file."""
        self._thread.start()

    def release(self) -> None:
        """Remove the lock file, unless another run has taken over the lock."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if read_lock(self.path).get("token") == self.record["token"]:
                self.path.unlink()
        self._remove_made()

    def _created(self) -> bool:
        """Create the lock file; returns False if it exists already."""
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(self.record, file, indent=2)
        except OSError:  # the disk is full
            self.path.unlink()
            raise
        return True

    def _clear_stale(self) -> None:
        """Remove the lock file if it is stale. Raises: UserError if its holder still runs."""
        found = _read_soon(self.path)
        if not is_stale(found, self.path):
            raise UserError(
                f"--output_dir {self.folder}: another run writes there, {described_lock(found)}. Wait for its end, end "
                "it, or give another folder."
            )
        aside = self.path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:  # the lock was released, or another run removed it
            return
        if read_lock(aside) == found:
            aside.unlink()
        else:  # another run was faster, and the file is its lock
            aside.rename(self.path)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESHED):
            with contextlib.suppress(OSError):
                self._refresh_once()

    def _refresh_once(self) -> None:
        """Touch the lock file. If it was deleted, create it again. If another run has taken over the lock, note it."""
        found = read_lock(self.path)
        if found.get("token") == self.record["token"]:
            os.utime(self.path)
        elif found:
            self.taken_by = found
            self._ended.set()
        elif not self.path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._created()

    def _remove_made(self) -> None:
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()


def this_process() -> dict:
    """The content of a lock file of this process: what identifies the process, and a description for messages."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": this_machine(),
        "process_started": start_of(os.getpid()),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shown_command(sys.argv),
    }


def read_lock(path: Path) -> dict:
    """The content of a lock file; {} if it does not exist or cannot be read."""
    try:
        found = parsed_json(read_text(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_soon(path: Path) -> dict:
    """Read a lock file, like `read_lock`. If the file is empty because it was made a moment ago, wait up to a second
    for its content."""
    for _ in range(20):
        if (found := read_lock(path)) or not path.exists():
            return found
        time.sleep(0.05)
    return read_lock(path)


def is_stale(record: dict, path: Path) -> bool:
    """Whether the lock's holder is gone. A lock file that cannot be read is taken for one that is still being written,
    until it is too old for this."""
    if record.get("machine") == this_machine() and isinstance(record.get("pid"), int):
        if record["pid"] == os.getpid():  # an earlier run in this process, which left its lock
            return _held is None or _held.record["token"] != record.get("token")
        return start_of(record["pid"]) != record.get("process_started")
    return _age(path) > STALE


def described_lock(record: dict) -> str:
    """A text that describes the holder of a lock."""
    if not record:
        return "which one its run.lock does not say"
    where = "on this machine" if record.get("machine") == this_machine() else f"on {record.get('host')}"
    command = textwrap.shorten(str(record.get("command")), SHOWN_COMMAND, placeholder=" ...")
    return f"process {record.get('pid')} {where} since {record.get('since')} ({command})"


def _age(path: Path) -> float:
    """Seconds since the file was refreshed, by the clock of the file system on which it lies."""
    probe = path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)


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
    token = distributed.broadcast_object(lock_token() if distributed.is_main() else None)
    found = distributed.all_gather_objects((socket.gethostname(), str(folder), _problem(folder, token)))
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


def _problem(folder: Path, token: str) -> str:
    """A text that says why this rank cannot share rank 0's folder; "" if it can. token: the token in rank 0's lock
    file."""
    deadline = time.monotonic() + PATIENCE
    while read_lock(folder / LOCK_FILE).get("token") != token:
        if time.monotonic() > deadline:
            return "does not see that"
        time.sleep(INTERVAL)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"cannot write there ({reason_of(error)})"
    return ""


WRITTEN_FILE = "written.json"
POINTS = "checkpoints/step_*"
"""The name that stands for all checkpoints in the list. A folder of this name is only taken for a checkpoint if it has
a checkpoint's content (`is_point`); its name may have an ending, as in step_000100.abandoned."""
OWN_FILES = (WRITTEN_FILE, LOCK_FILE)
COMPLETE = "model.complete"  # a whole model that is being moved into the output folder itself; see model_folders.py
KEPT = ".kept"  # the ending that is added to the name of a user's file if the run needs the name
PRETRAINED = ("critic_pretrained", "critic_pretrained_adapter")
MODEL_FOLDERS = (
    *("actor", "critic", "actor_ema", "actor_adapter", "critic_adapter", "actor_ema_adapter"),
    *PRETRAINED,
    *("adapter", "."),
)
_ABOUT = "what this program wrote here: --overwrite_output_dir removes this, and nothing else"
_lock = threading.Lock()
_announced: dict[Path, list[str]] = {}
"""{folder: names that this process has added to the folder's list}. If the folder is moved or deleted during the run,
the names are added to the list of the new folder."""


def check_output_dirs(args: RunFlags, resumed: bool = False) -> None:
    """Check that this run may use the output folder and TensorBoard's folder: each is new or empty, or belongs to the
    run that is resumed, or may be overwritten (--overwrite_output_dir). Except in a dry run, the lock is taken, so that
    no other run writes there until `release_lock`.

    resumed: whether the folder holds the run that is resumed. Raises: UserError if the folder holds another run or
    anything else, or if nothing can be written there.
    """
    output_dir = Path(args.output_dir)
    folders = {"--output_dir": output_dir}
    if tensorboard_dir(args).parent != output_dir:
        folders["--tensorboard_path"] = tensorboard_dir(args)
    for name, folder in folders.items():
        _check_writable(name, folder)
    if not args.dry_run:
        take_lock(output_dir)
    _check_names(output_dir)
    _check_apart(args, output_dir)
    for name, folder in folders.items():
        # A run that died before its first checkpoint begins again.
        begun = getattr(args, "resume", None) == AUTO and only_begun(folder)
        _check_own(name, folder, args.overwrite_output_dir or resumed or begun, args.overwrites)


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
    folders = (*MODEL_FOLDERS[:-1], "samples", CHECKPOINTS, PROFILE, "tensorboard", "wandb")
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


def _check_own(name: str, folder: Path, may_hold_files: bool, overwrites: bool) -> None:
    # A log is often there before the program starts: `... > out/training.log`.
    found = folder.iterdir() if folder.is_dir() else ()
    others = [file for file in found if file.suffix != ".log" and not file.name.startswith(LOCK_FILE)]
    if others and not may_hold_files:
        ways = ["choose another folder"]
        if overwrites:
            ways += ["go on from a checkpoint in it with --resume"] if points_in(folder) else []
            ways += ["give --overwrite_output_dir to overwrite what stands there"]
        raise UserError(f"{name} {folder} is not empty. {', or '.join(ways).capitalize()}.")


def tensorboard_dir(args: RunFlags) -> Path:
    """This run's TensorBoard folder: OUTPUT_DIR/tensorboard, or the folder in --tensorboard_path that has the output
    folder's name."""
    output_dir, own = Path(args.output_dir), without_links(args.output_dir)
    if args.tensorboard_path is None or without_links(args.tensorboard_path) == own:
        return output_dir / "tensorboard"
    shared = Path(args.tensorboard_path) / f"{own.parent.name}_{own.name}"
    return output_dir / "tensorboard" if without_links(shared) == own else shared


def begin_output_dir(args: RunFlags, resumed: bool = False) -> None:
    """Prepare the folder for this run (rank 0 does). Finish or remove saves that were interrupted by a kill, and list
    the files that the run will write. Unless the run is resumed, also remove an earlier run's files.

    The models of an earlier run stay until this run's models are whole. Raises: UserError on all ranks if this fails.
    """
    distributed.barrier()  # no rank may still be reading there
    checked(lambda: _begin(args, resumed))


def _begin(args: RunFlags, resumed: bool) -> None:
    folder, events = Path(args.output_dir), tensorboard_dir(args)
    try:
        finish_interrupted(folder)
        if not resumed:
            left = remove_earlier(folder)
            if events.parent != folder:
                left += [str(events / name) for name in remove_earlier(events)]
            if left:
                shown = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
                print(f"{folder}: not this program's, and left alone: {shown}", flush=True)
        names = [METRICS_FILE, RUN_FILE, "curves.png", POINTS]
        names += [f"{PROFILE}/step_{step:06d}_rank*.json.gz*" for step in getattr(args, "profile_steps", ())]
        if args.enable_tensorboard:
            own = f"events.out.tfevents.*.{socket.gethostname()}.{os.getpid()}.*"
            if events.parent == folder:
                names.append(f"{events.name}/{own}")
            else:
                announce(events, own)
        announce(folder, *names)
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
    others = Written.read(output_dir).model_files(["."]) - {Path(path.name) for path in files}
    remove_files(output_dir, others)
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
        tensorboard=args.enable_tensorboard,
        tensorboard_dir=tensorboard_dir(args),
        wandb_project=args.wandb_project,
    )


@dataclass
class Written:
    """The list of the files that this program wrote into a folder."""

    folder: Path
    files: list[str] = field(default_factory=list)
    models: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Written":
        """The list in this folder; an empty list if there is none or it is damaged."""
        try:
            found = parsed_json(read_text(folder / WRITTEN_FILE))
            models = {name: [str(file) for file in files] for name, files in found["models"].items()}
            return cls(folder, [str(name) for name in found["files"]], models)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(folder)

    def write(self) -> None:
        """Write the list into the folder. Raises: OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"about": _ABOUT, "files": self.files, "models": self.models}, indent=2)
        write_whole(self.folder / WRITTEN_FILE, text + "\n")

    def has(self, name: str) -> bool:
        """Whether the list has this file. A * or ? in the list does not match a /."""
        patterns = (one for one in self.files if one != POINTS and one.count("/") == name.count("/"))
        return name in self.files or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def present(self) -> list[Path]:
        """The paths of those listed files and checkpoints that exist, without models."""
        points = filter(is_point, self.folder.glob(POINTS)) if POINTS in self.files else ()
        return [*(self.folder / name for name in files_in(self.folder) if self.has(name)), *points]

    def model_files(self, names: Iterable[str]) -> set[Path]:
        """The listed files of these models, relative to the folder."""
        return {Path(name, file) for name in names for file in self.models.get(name, ())}


def is_point(path: Path) -> bool:
    """Whether a folder is a complete or incomplete checkpoint of this program; False for a link."""
    if path.is_symlink() or path.parent.is_symlink() or not path.is_dir():
        return False
    if re.fullmatch(r"step_-?\d+(\.\w+)?", path.name) is None:
        return False
    return path.suffix == PARTIAL or holds_point(path)


def kept_place(path: Path) -> Path:
    """The path to which a user's file is moved if the run needs its name: NAME.kept; if this exists, NAME.kept.kept and
    so on."""
    while os.path.lexists(path := path.with_name(path.name + KEPT)):
        pass
    return path


def announce(folder: Path, *names: str) -> None:
    """Add names of files to the folder's list, before the files are made. An existing file of such a name that is not
    listed belongs to the user, and is renamed.

    Raises: OSError.
    """
    with _lock:
        announced = _announced.setdefault(folder, [])
        listed = Written.read(folder)
        for name in set(names) - set(announced) - set(listed.files):
            path = folder / name
            if not set(name) & set("*?[") and path.is_file() and not listed.has(name):
                path.rename(kept_place(path))
        announced += [name for name in names if name not in announced]
        new = [name for name in announced if name not in listed.files]
        if new:
            listed.files += new
            listed.write()


def list_model(folder: Path, name: str, files: Iterable[str], only: bool = False) -> list[str]:
    """Add files of the model `name` to the folder's list. Returns the model's files that were listed before. only:
    whether the new files replace these earlier ones on the list.

    Raises: OSError.
    """
    with _lock:
        listed = Written.read(folder)
        before = listed.models.get(name, [])
        after = sorted(set(files) | set(() if only else before))
        if after != before:
            listed.models[name] = after
            listed.write()
        return before


def remove_earlier(folder: Path) -> list[str]:
    """Remove all listed files except models, and folders that are then empty. Returns the remaining files that are
    neither listed nor logs.

    Raises: OSError.
    """
    listed = Written.read(folder)
    for path in listed.present():
        _remove(path)
        for parent in path.relative_to(folder).parents[:-1]:
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()
    listed.files = []
    _announced.pop(folder, None)
    if folder.is_dir() and (listed.models or (folder / WRITTEN_FILE).exists()):
        listed.write()
    ours = listed.model_files(listed.models)
    left = sorted(path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    return [str(path) for path in left if path not in ours and path.suffix != ".log" and path.name not in OWN_FILES]


def only_begun(folder: Path) -> bool:
    """Whether the folder holds only logs, and listed files of a run that has saved no model and no checkpoint."""
    listed = Written.read(folder)
    present = set(listed.present())
    if any((path / MANIFEST).is_file() for path in present if path.suffix != PARTIAL):
        return False
    for path in folder.rglob("*"):
        own = path.suffix == ".log" or path.name.startswith(OWN_FILES) or path.suffix == PARTIAL
        if not path.is_dir() and not own and not present & {path, *path.parents}:
            return False
    return True


def remove_other_models(folder: Path, kept: Iterable[str]) -> None:
    """Remove all listed models except `kept`, and their folders if these are then empty. Raises: OSError."""
    with _lock:
        listed = Written.read(folder)
        others = [name for name in listed.models if name not in set(kept)]
        if others:
            remove_files(folder, listed.model_files(others))
            listed.models = {name: files for name, files in listed.models.items() if name not in others}
            listed.write()


def remove_files(folder: Path, names: Iterable[str | Path]) -> None:
    """Remove these files from the folder if they exist, and subfolders that are empty after this.

    names: relative to the folder. They may come from an untrusted list: names that lead out of the folder, or through a
    link, are not found. Raises: OSError.
    """
    for name in sorted(files_in(folder) & set(map(str, names))):
        (folder / name).unlink()
        for parent in Path(name).parents[:-1]:
            with contextlib.suppress(OSError):
                (folder / parent).rmdir()


def _remove(path: Path) -> None:
    """Remove a file or a checkpoint. If a checkpoint has a manifest, only the files in the manifest are removed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    try:
        names = list(parsed_json(read_text(path / MANIFEST))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        shutil.rmtree(path)
        return
    remove_files(path, names)
    (path / MANIFEST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.rmdir()
