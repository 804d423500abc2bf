"""How a run ends: requests to end early, and what the run prints at its end.

TERM, HUP, one INT (Ctrl-C) and a launcher that has gone ask the run to finish its step, save and end within
--grace_seconds; USR1 asks the same without haste. A second INT ends the process at once. The ranks agree on a request
at a step's border, so that all save the same step, whichever of them was asked.

A request is followed
    at once         before the first step, when there is nothing to save: the process ends
    at a border     while training: `agreed()` is true on all ranks from the next border on
    not any more    while the finished models are being saved: that is let through

If a run cannot write a file, it says so at once and goes on; at its end it says so again, and does not end as a
success. A run that fails after its models were saved says where they are.
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
    """The reason of a request to end. Of several the largest counts, since it may have caused the others: at a Ctrl-C a
    launcher sends TERM and exits."""

    SIGUSR1 = 1
    LAUNCHER = 2
    SIGHUP = 3
    SIGTERM = 4
    SIGINT = 5

    @property
    def text(self) -> str:
        """As messages name it."""
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
        """What a run does that was asked to end."""
        back = "a launcher may give the prompt back before"
        return {
            Followed.AT_ONCE: "the run ends.",
            Followed.AT_BORDER: f'the run finishes its step and saves; {back}. Wait for the line "ended early".',
            Followed.NOT_ANY_MORE: f"the run is about to end by itself; {back}. Wait for its last line.",
        }[self]


SIGNALS = {signal.Signals[reason.name]: reason for reason in Reason if reason != Reason.LAUNCHER}
SAME_KEY = 1.0  # seconds: Ctrl-C reaches the ranks from the terminal, and again from a launcher that passes it on


@dataclass
class StopRequest:
    """Whether this process was asked to end, and how the run stands to it.

    grace: seconds. deadline: by time.monotonic, of a request in haste. saved: the checkpoint that the run has
    reached so far, for the message of a run that missed its deadline.
    """

    grace: float = 25.0
    reason: Reason | None = None
    deadline: float | None = None
    followed: Followed = Followed.AT_ONCE
    saved: Path | None = None
    _interrupts: list[float] = field(default_factory=list)

    def ask(self, reason: Reason) -> None:
        """Note a request."""
        if reason.in_haste and self.deadline is None:
            self.deadline = time.monotonic() + self.grace
        if self.reason is None or reason > self.reason:
            self.reason = reason

    @property
    def left(self) -> str:
        """What there is of a run that ends without saving."""
        where = f"go on with --resume {self.saved.parent.parent}" if self.saved else "no checkpoint is there"
        return f"what was trained since the last checkpoint is lost; {where}."

    def interrupted_again(self) -> bool:
        """Count a Ctrl-C; whether it is a second one, which ends the process at once."""
        self._interrupts.append(time.monotonic())
        return self._interrupts[-1] - self._interrupts[0] > SAME_KEY


request = StopRequest()
"""This process's: signals are the process's, too."""


@contextlib.contextmanager
def listening(grace: float) -> Iterator[StopRequest]:
    """Take the signals that ask a run to end, until the block is left; ignored ones (nohup, a shell's &) stay so.

    While the main thread waits for other ranks, its handlers do not run: a watch thread has to look, too.
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
    """What any rank was asked by, the same on all (all ranks call this, at a step's border)."""
    value = distributed.largest(int(request.reason or 0))
    return Reason(value) if value else None


@contextlib.contextmanager
def at_borders() -> Iterator[None]:
    """While this block trains, requests wait for `agreed`."""
    distributed.barrier()  # no rank may still be where a request ends it at once
    request.followed = Followed.AT_BORDER
    try:
        yield
    finally:
        let_through()


def let_through() -> None:
    """From here on requests change nothing: the run is saving its result, and ends by itself."""
    request.followed = Followed.NOT_ANY_MORE


def end_early(reason: Reason, step: int, last_step: int, point: Path | None) -> NoReturn:
    """End the run at a step's border, when `point` is written (all ranks call this).

    Raises: EndedEarly; RunStopped where the checkpoint could not be written.
    """
    let_through()
    asked = f"{reason.text}: ended early after step {step} of {last_step}"
    if point is None:
        raise RunStopped(f"{asked}, and its checkpoint could not be written: see above.")
    raise EndedEarly(f"{asked}, saved in {point}. Go on with --resume {point.parent.parent}.")


@contextlib.contextmanager
def saved_models_named(saved: Mapping[str, Path]) -> Iterator[None]:
    """Have what goes wrong in this block say where the trained models are, where `saved` holds any by then.

    Raises: RunStopped for a stop, for an error of the system (a full disk) and for an exit from within; another
    exception as it is, with a note.
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


# What could not be written.

_noted: dict[str, str] = {}


def reason_of(error: BaseException) -> str:
    """Why something could not be written, in words; a full disk's with the space that is left."""
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"{words}: free some space" if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else words


def note_unwritten(what: str | Path, error: BaseException) -> None:
    """Print, once for each `what`, that it cannot be written and that the run goes on."""
    if str(what) not in _noted:
        _noted[str(what)] = reason_of(error)
        print(f"WARNING: {what} cannot be written ({reason_of(error)}). The run goes on.", file=sys.stderr, flush=True)


@contextlib.contextmanager
def unwritten_noted(what: str | Path) -> Iterator[None]:
    """Note what cannot be written in this block, or read back, and go on behind it."""
    try:
        yield
    except (OSError, UserError) as error:
        note_unwritten(what, error)


def note_written(what: str | Path) -> None:
    """Take back a note: what was missing stands there by now."""
    if _noted.pop(str(what), None) is not None:
        print(f"{what} could be written again; nothing of it is missing.", file=sys.stderr, flush=True)


def forget_unwritten() -> None:
    """Begin a run in which everything could be written so far."""
    _noted.clear()


def check_all_written() -> None:
    """Raise RunStopped on all ranks, with a list, if rank 0 could not write something (all ranks call this)."""
    missing = distributed.broadcast_object("; ".join(f"{what} ({reason})" for what, reason in _noted.items()))
    if missing:
        raise RunStopped(f"the run came to its end, but not all of it is on the disk: {missing}.")
