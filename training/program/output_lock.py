"""One run at a time writes into an output folder: rank 0 holds OUTPUT_DIR/run.lock from before anything is written.

The file says which process of which host holds it. One whose process is gone is stale, and the next run takes it over.
A process of another host (or of another container) cannot be looked at: it counts as gone when it has not refreshed the
file for five minutes, by the clock of the file system. No file system's own locks are needed, which network file
systems may lack; only that two cannot create one file.
"""

import contextlib
import json
import os
import shutil
import socket
import sys
import textwrap
import threading
import time
import uuid
from datetime import datetime
from pathlib import Path

from engine.errors import RunStopped, UserError, shown_command
from engine.files import read_text
from engine.json_objects import parsed
from training.program.processes import start_of, this_machine

LOCK_FILE = "run.lock"
REFRESHED, STALE = 15.0, 300.0  # seconds
SHOWN = 100  # characters of the holder's command in a message

_held: "OutputLock | None" = None
_passing: list[Path] = []  # folders that go with it


def take(folder: Path) -> None:
    """Have this process hold the folder's lock until `release`; makes the folder.

    Raises: UserError, which names the holder, if another run writes there, or if nothing can be written there.
    """
    global _held
    release()
    _held = OutputLock(folder)
    _held.start()


def release() -> None:
    """Give back the lock that this process holds, if it does, and folders that were made for it and stayed empty."""
    global _held
    if _held is not None:
        while _passing and _held.taken_by is None:
            shutil.rmtree(_passing.pop(), ignore_errors=True)
        _held.release()
    _held = None


def remove_with(folder: Path) -> None:
    """Have a folder removed with the lock, however this process ends by its own doing (a Ctrl-C, say)."""
    _passing.append(folder)


def token() -> str:
    """What the file of the lock that this process holds says of this one holder alone, as its "token"."""
    assert _held is not None, "no lock is held"
    return _held.record["token"]


def check_held() -> None:
    """Raise RunStopped where another run has taken the folder, because this one had stood still for too long."""
    if _held is not None and _held.taken_by is not None:
        raise RunStopped(
            f"{_held.folder}: {described(_held.taken_by)} has taken this folder over, since this run gave no sign of "
            "life for five minutes. Nothing more is written there; see that only one of the two goes on."
        )


class OutputLock:
    """The lock of one folder, held by this process from its making on; raises UserError as `take` does."""

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
        """Begin to refresh the file."""
        self._thread.start()

    def release(self) -> None:
        """Remove the file, unless it is another run's by now."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if read(self.path).get("token") == self.record["token"]:
                self.path.unlink()
        self._remove_made()

    def _created(self) -> bool:
        """Whether the file could be made; false where there is one."""
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
        """Take the file away if its holder is gone; raises UserError if it is not."""
        found = _read_soon(self.path)
        if not is_stale(found, self.path):
            raise UserError(
                f"--output_dir {self.folder}: another run writes there, {described(found)}. Wait for its end, end it, "
                "or give another folder."
            )
        aside = self.path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        try:
            self.path.rename(aside)
        except FileNotFoundError:  # given back, or taken away by another run, which may hold it now
            return
        if read(aside) == found:
            aside.unlink()
        else:  # another run was faster, and this is its own
            aside.rename(self.path)

    def _refresh(self) -> None:
        while not self._ended.wait(REFRESHED):
            with contextlib.suppress(OSError):
                self._refresh_once()

    def _refresh_once(self) -> None:
        """Touch the file; make it again where it is gone, with the folder or without; notice that it is another's."""
        found = read(self.path)
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
    """What tells this process from all others, and what people want to know of it."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "machine": this_machine(),
        "process_started": start_of(os.getpid()),
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shown_command(sys.argv),
    }


def read(path: Path) -> dict:
    """What a lock file says; {} where there is none, or none that can be read."""
    try:
        found = parsed(read_text(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_soon(path: Path) -> dict:
    """As `read`, but a file that was only just made is given a second to be written."""
    for _ in range(20):
        if (found := read(path)) or not path.exists():
            return found
        time.sleep(0.05)
    return read(path)


def is_stale(record: dict, path: Path) -> bool:
    """Whether the holder is gone. An unreadable file is being written, or was when its process was killed."""
    if record.get("machine") == this_machine() and isinstance(record.get("pid"), int):
        if record["pid"] == os.getpid():  # an earlier run of this very process, which did not end in order
            return _held is None or _held.record["token"] != record.get("token")
        return start_of(record["pid"]) != record.get("process_started")
    return _age(path) > STALE


def described(record: dict) -> str:
    """The holder in words."""
    if not record:
        return "which one its run.lock does not say"
    where = "on this machine" if record.get("machine") == this_machine() else f"on {record.get('host')}"
    command = textwrap.shorten(str(record.get("command")), SHOWN, placeholder=" ...")
    return f"process {record.get('pid')} {where} since {record.get('since')} ({command})"


def _age(path: Path) -> float:
    """Seconds since the file was refreshed, by the clock that stamps files where it lies."""
    probe = path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
