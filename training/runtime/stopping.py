"""Handles requests to end a run early, and files that could not be written.

The signals TERM, HUP and INT (Ctrl-C), and the end of the launcher, ask the run to finish its step, save a checkpoint
and end, within --grace_seconds. The signal USR1 asks for the same without a time limit. A second INT ends the process
immediately. The ranks agree on a request between two steps, so that all ranks save the same step, whichever rank was
asked.

What the run is doing decides when a request is followed:
    at once         before the first step, when there is nothing to save: the process ends
    at a border     while training: after the current step, `agreed()` returns the reason on all ranks
    not any more    while the finished models are saved: saving goes on

If a run cannot write a file, it prints a warning and goes on. At its end it prints the warning again, and its exit code
is not 0. A run that fails after its models were saved prints where they are.
"""

import contextlib
import errno
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NoReturn

from engine import distributed
from engine.errors import EndedEarly, RunStopped, UserError


class Reason(IntEnum):
    """Why a run was asked to end. If there are several reasons, the largest counts, since it may have caused the
    others: after a Ctrl-C a launcher sends TERM and exits."""

    SIGUSR1 = 1
    LAUNCHER = 2
    SIGHUP = 3
    SIGTERM = 4
    SIGINT = 5

    @property
    def text(self) -> str:
        """The reason's name in messages."""
        return {Reason.SIGINT: "Ctrl-C (SIGINT)", Reason.LAUNCHER: "its launcher has gone"}.get(self, self.name)

    @property
    def in_haste(self) -> bool:
        """Whether the run has to end within --grace_seconds."""
        return self != Reason.SIGUSR1


class Followed(StrEnum):
    """When a request is followed."""

    AT_ONCE = "at once"
    AT_BORDER = "at a step's border"
    NOT_ANY_MORE = "not any more"

    @property
    def text(self) -> str:
        """A sentence about what the run does after a request to end."""
        back = "a launcher may give the prompt back before"
        return {
            Followed.AT_ONCE: "the run ends.",
            Followed.AT_BORDER: f'the run finishes its step and saves; {back}. Wait for the line "ended early".',
            Followed.NOT_ANY_MORE: f"the run is about to end by itself; {back}. Wait for its last line.",
        }[self]


SIGNALS = {signal.Signals[reason.name]: reason for reason in Reason if reason != Reason.LAUNCHER}
SAME_KEY = 1.0  # seconds within which two INTs are one Ctrl-C: the terminal sends one, a launcher may pass on another


@dataclass
class StopRequest:
    """Whether this process was asked to end, and when the run follows the request.

    grace: seconds from a request in haste to its deadline. deadline: the time, by time.monotonic(), at which the
    process ends even if it has not finished. newest: the newest checkpoint, for the message of a run that misses its
    deadline.
    """

    grace: float = 25.0
    reason: Reason | None = None
    deadline: float | None = None
    followed: Followed = Followed.AT_ONCE
    newest: Path | None = None
    _interrupts: list[float] = field(default_factory=list)

    def ask(self, reason: Reason) -> None:
        """Note that this process is asked to end."""
        if reason.in_haste and self.deadline is None:
            self.deadline = time.monotonic() + self.grace
        if self.reason is None or reason > self.reason:
            self.reason = reason

    @property
    def left(self) -> str:
        """A sentence about what is on the disk when a run ends without saving."""
        where = f"go on with --resume {self.newest.parent.parent}" if self.newest else "no checkpoint is there"
        return f"what was trained since the last checkpoint is lost; {where}."

    def interrupted_again(self) -> bool:
        """Count a Ctrl-C; returns whether it is a second one, which ends the process at once."""
        self._interrupts.append(time.monotonic())
        return self._interrupts[-1] - self._interrupts[0] > SAME_KEY


request = StopRequest()
"""The StopRequest of this process. Signals concern the whole process, so there is only one."""


@contextlib.contextmanager
def listening(grace: float) -> Iterator[StopRequest]:
    """Handle the signals that ask a run to end, within this block. A signal that the process ignores (because of nohup
    or a shell's &) stays ignored.

    While the main thread waits for other ranks, Python runs no signal handlers. Therefore a watch thread has to check
    for signals.
    """
    global request
    request = StopRequest(grace)
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
        for number, handler in before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, lambda number, _: request.ask(SIGNALS[number]))
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreed() -> Reason | None:
    """The reason why a rank was asked to end; None if no rank was asked. The result is the same on all ranks (all ranks
    call this between two steps)."""
    value = distributed.largest(int(request.reason or 0))
    return Reason(value) if value else None


@contextlib.contextmanager
def at_borders() -> Iterator[None]:
    """Within this block requests to end are followed between steps, by `agreed`."""
    distributed.barrier()  # until here, a request may end a rank immediately
    request.followed = Followed.AT_BORDER
    try:
        yield
    finally:
        let_through()


def let_through() -> None:
    """From now on requests to end are ignored: the run saves its result and ends by itself."""
    request.followed = Followed.NOT_ANY_MORE


def end_early(reason: Reason, step: int, last_step: int, checkpoint: Path | None) -> NoReturn:
    """End the run between two steps, after the checkpoint `checkpoint` was written (all ranks call this).

    Raises: EndedEarly; RunStopped if the checkpoint could not be written.
    """
    let_through()
    asked = f"{reason.text}: ended early after step {step} of {last_step}"
    if checkpoint is None:
        raise RunStopped(f"{asked}, and its checkpoint could not be written: see above.")
    raise EndedEarly(f"{asked}, saved in {checkpoint}. Go on with --resume {checkpoint.parent.parent}.")


@contextlib.contextmanager
def saved_models_named(saved: Mapping[str, Path]) -> Iterator[None]:
    """If an error is raised within this block after models were saved, add to it where the models are. saved: {name:
    folder} of the models saved so far.

    Raises: RunStopped, which replaces a RunStopped, an OSError (a full disk) or a SystemExit. Any other exception is
    raised again with a note.
    """
    try:
        yield
    except (RunStopped, OSError, SystemExit) as error:
        if not saved:
            raise
        what = str(error) if isinstance(error, RunStopped) else f"{type(error).__name__}: {error}"
        raise RunStopped(f"{what}\n{_where(saved)}") from None
    except Exception as error:
        if saved:
            error.add_note(_where(saved))
        raise


def _where(saved: Mapping[str, Path]) -> str:
    return "Training was done by then, and its models are saved: " + ", ".join(map(str, saved.values())) + "."


# Files that could not be written.

_noted: dict[str, str] = {}


def reason_of(error: BaseException) -> str:
    """A text that says why a file could not be written. If the disk is full, the text asks to free some space."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{words}: free some space" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else words


def note_unwritten(what: str | Path, error: BaseException) -> None:
    """Print that `what` cannot be written and that the run goes on; the same `what` is printed only once."""
    if str(what) not in _noted:
        _noted[str(what)] = reason_of(error)
        print(f"WARNING: {what} cannot be written ({reason_of(error)}). The run goes on.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def unwritten_noted(what: str | Path) -> Iterator[None]:
    """If the block cannot write a file, or cannot read it back, note this and go on after the block."""
    try:
        yield
    except (OSError, UserError) as error:
        note_unwritten(what, error)


def note_written(what: str | Path) -> None:
    """Remove the note about `what`, because it has been written since."""
    if _noted.pop(str(what), None) is not None:
        print(f"{what} could be written again; nothing of it is missing.", file=sys.stderr, flush=True)


def forget_unwritten() -> None:
    """Remove all notes, at the beginning of a run."""
    _noted.clear()


def check_all_written() -> None:
    """Raise RunStopped on all ranks if rank 0 could not write a file; the message lists these files (all ranks call
    this)."""
    missing = distributed.broadcast_object("; ".join(f"{what} ({reason})" for what, reason in _noted.items()))
    if missing:
        raise RunStopped(f"the run came to its end, but not all of it is on the disk: {missing}.")
