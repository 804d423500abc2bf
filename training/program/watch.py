"""A thread of each rank that looks after the process while the main thread computes or waits for others.

Once a second it looks whether the launcher is still there, and whether a request to end has passed its deadline;
signals wake it. It is what ends a process whose main thread waits in a collective call that will never end.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from training.program.launchers import Launchers
from training.program.stopping import SIGNALS, Followed, Reason, StopRequest, listening

SECONDS = 1.0  # between looks
ENDED_EARLY, STOPPED = 75, 1  # exit codes; 75 is EX_TEMPFAIL of sysexits.h: try again


@contextmanager
def watching(grace: float) -> Iterator["Watch"]:
    """A watch over this process until the block is left."""
    with listening(grace) as request:
        watch = Watch(request)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()


class Watch:
    """The thread, and what wakes it."""

    def __init__(self, request: StopRequest):
        self.request, self.launchers = request, Launchers()
        self._awake, self._wake = socket.socketpair()
        self._awake.settimeout(SECONDS)
        self._wake.setblocking(False)
        self._wakeup_before = -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
        self._wake.send(b"\0")
        self._thread.join()
        self._awake.close()
        self._wake.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for number in self._signals():
                self.request.ask(SIGNALS[number])
                if number == signal.SIGINT and self.request.interrupted_again():
                    end(STOPPED, "second Ctrl-C: ended at once; what was trained since the last restart point is lost.")
            gone = self.launchers.gone()
            if gone and self.request.reason != Reason.LAUNCHER:
                self.request.ask(Reason.LAUNCHER)
                say(f"{gone} has gone: the run ends.")
            self._follow()

    def _signals(self) -> list[int]:
        try:
            numbers = self._awake.recv(64)
        except TimeoutError:
            return []
        return [number for number in numbers if number in SIGNALS]

    def _follow(self) -> None:
        """End the process where the request cannot wait for the main thread."""
        request = self.request
        if request.reason is None or request.followed == Followed.NOT_ANY_MORE:
            return
        if request.followed == Followed.AT_ONCE:
            end(ENDED_EARLY, f"{request.reason.text}: ended before the first step; there was nothing to save.")
        if request.deadline is not None and time.monotonic() > request.deadline:
            left = (
                f"go on with --resume {request.saved.parent.parent}" if request.saved else "no restart point is there"
            )
            end(
                STOPPED,
                f"{request.reason.text}: the step was not finished within --grace_seconds {request.grace:g}, and what "
                f"was trained since the last restart point is lost; {left}.",
            )


def say(message: str) -> None:
    """One line on standard error, by rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        with suppress(OSError):  # of a terminal that has gone
            print(message, file=sys.stderr, flush=True)


def end(code: int, message: str) -> None:
    """End this process now, whatever its other threads do."""
    say(message)
    os._exit(code)
