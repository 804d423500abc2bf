"""The watch thread of each rank, which monitors the process while the main thread computes or waits for other ranks.

Once a second the thread checks whether the launcher still exists, whether a request to end has passed its deadline, and
whether the heartbeats show that a rank is missing; a signal wakes it at once. It can end a process whose main thread
waits in a collective call that never returns.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from engine import distributed
from training.runtime import output_folder
from training.runtime.environment import USER_ERROR, from_here, print_line, write_error_file
from training.runtime.heartbeats import EVERYWHERE, Monitor, Reporter, Verdict, meeting_address
from training.runtime.processes import Launchers, is_another_rank, place
from training.runtime.ranks import MeetingPoint
from training.runtime.stopping import SIGNALS, Followed, Reason, StopRequest, listening

SECONDS = 1.0  # seconds between checks
LAST_LOOK = 3.0  # seconds that a request waits before the first step: the end of another rank may have caused it
REPORT_WITHIN = 15.0  # seconds in which rank 0 prints an error that this rank reported; then this rank prints it
JOINING = "joining the process group"
ENDED_EARLY, STOPPED = 75, 1  # exit codes; 75 is EX_TEMPFAIL of sysexits.h: try again


@contextlib.contextmanager
def watching(grace: float, timeout_minutes: float) -> Iterator["Watch"]:
    """Run a `Watch` of this process within this block. grace: see StopRequest. timeout_minutes: see Watch."""
    with listening(grace) as request:
        watch = Watch(request, timeout_minutes)
        watch.start()
        try:
            yield watch
        finally:
            watch.stop()


class Watch:
    """The watch thread. timeout_minutes: the run ends if no rank has moved for this many minutes."""

    def __init__(self, request: StopRequest, timeout_minutes: float):
        self.request = request
        self.timeout_minutes = timeout_minutes
        self.launchers = Launchers()
        self.reporter: Reporter | None = None
        self._meeting_point = MeetingPoint()
        self._monitor: Monitor | None = None
        self._failure: tuple[str, int] | None = None
        self._look = threading.Thread()
        self._asked_at: float | None = None
        self._launcher_reported = self._interrupt_reported = False
        self._awake, self._wake = socket.socketpair()
        self._awake.settimeout(SECONDS)
        self._wake.setblocking(False)
        self._wakeup_before = -1
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread. From now on SIGUSR2 prints the stacks of all threads."""
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            with contextlib.suppress(OSError, ValueError, AttributeError):  # raised if standard error is no file
                faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        self._thread.start()

    def join(self) -> None:
        """Take part in the heartbeats (all ranks call this, when the process group exists)."""
        if distributed.world_size() == 1:
            return
        address, own = None, meeting_address()
        known = set(distributed.all_gather_objects(own))
        if distributed.is_main():
            listens = own if len(known) == 1 else EVERYWHERE
            self._monitor = Monitor(distributed.world_size(), self.timeout_minutes, listens)
            self._monitor.start()
            address = self._monitor.address, self._monitor.key
        (host, port), key = distributed.broadcast_object(address)
        if host == EVERYWHERE:
            host = "127.0.0.1" if distributed.is_main() else own
        self.reporter = Reporter(distributed.rank(), (host, port), key)
        place.changed = self._say_place

    def _say_place(self) -> None:
        """Send a heartbeat with this rank's new phase at once."""
        if self.reporter is not None:
            beat = self.reporter.say()
            if self._monitor is not None:
                self._monitor.pass_on(beat)

    def leave(self, code: int) -> None:
        """Report that this rank ends by itself, with this exit code. Later requests to end are ignored."""
        self.request.followed = Followed.NOT_ANY_MORE
        if self.reporter is not None:
            self.reporter.say(left=code)

    def tell(self, trouble: str, code: int = STOPPED) -> None:
        """Report this rank's error. One rank prints it, and all ranks end with this exit code, including ranks that
        wait for this one to join. If no other rank prints the error, this rank does. When one rank has ended, launchers
        ask the others to end; such later requests do not change the code."""
        self.request.followed = Followed.NOT_ANY_MORE
        message = ("error: " if code == USER_ERROR else "") + from_here(trouble)
        write_error_file(message)
        if self.reporter is not None:
            self.reporter.say(trouble=trouble, code=code)
            time.sleep(REPORT_WITHIN)
            print_line(message)
        elif distributed.is_main():
            print_line(message)
            self._meeting_point.announce(message, code)
        elif not self._meeting_point.announce(message, code):
            print_line(message)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        place.changed = lambda: None
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._wakeup_before)
        self._wake.send(b"\0")
        self._thread.join()
        if self._monitor is not None:
            self._monitor.close()
        if self.reporter is not None:
            self.reporter.close()
        self._awake.close()
        self._wake.close()

    def _run(self) -> None:
        while not self._stopped.is_set():
            for number in self._signals():
                self.request.ask(SIGNALS[number])
                if number == signal.SIGINT and self.request.interrupted_again():
                    end(STOPPED, f"second Ctrl-C: ended at once; {self.request.left}")
            self._look_for_launchers()
            self._look_for_ranks()
            self._follow()

    def _signals(self) -> list[int]:
        try:
            numbers = self._awake.recv(64)
        except TimeoutError:
            return []
        return [number for number in numbers if number in SIGNALS]

    def _look_for_launchers(self) -> None:
        gone = self.launchers.gone()
        if gone and not self._launcher_reported:
            self._launcher_reported = True
            self.request.ask(Reason.LAUNCHER)
            say(f"{gone} has gone: {self.request.followed.text}")

    def _look_for_ranks(self) -> None:
        if self.reporter is None:
            self._look_for_the_absent()
            return
        self.reporter.look()
        if self.reporter.verdict is not None:
            conclude(self.reporter.verdict, self.reporter)

    def _look_for_the_absent(self) -> None:
        """End the process if a rank cannot join the others, or does not join in time."""
        if place.phase != JOINING:
            return
        if not self._look.is_alive():  # torch waits without end for a store that takes connections and never answers
            self._look = threading.Thread(target=self._look_into_the_store, daemon=True)
            self._look.start()
        self._look.join(SECONDS)
        if self._failure is not None:
            message, code = self._failure
            say(message)
            if distributed.is_main():
                self._meeting_point.let_others_hear()
            leave_now(code)
        if time.monotonic() - place.entered > self.timeout_minutes * 60:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            end(
                STOPPED,
                f"not all of {os.environ['WORLD_SIZE']} ranks have come to {where} within {self.timeout_minutes:g} "
                "minutes (--timeout_minutes). Look at the nodes that are missing.",
            )

    def _look_into_the_store(self) -> None:
        self._failure = self._meeting_point.failure()

    def _follow(self) -> None:
        """End the process if a request to end cannot wait for the main thread."""
        request, now = self.request, time.monotonic()
        interrupted = request.reason == Reason.SIGINT  # a person's Ctrl-C, which comes before the launcher ends
        if interrupted and not self._interrupt_reported and request.followed != Followed.AT_ONCE:
            self._interrupt_reported = True
            say(f"{request.reason.text}: {request.followed.text}")
        if request.reason is None or request.followed == Followed.NOT_ANY_MORE:
            return
        self._asked_at = self._asked_at or now
        if request.followed == Followed.AT_ONCE:
            if self.reporter is not None and not interrupted:
                if now < self._asked_at + LAST_LOOK:
                    return
                if self.reporter.others_left:
                    if now > self._asked_at + 2 * LAST_LOOK:
                        leave_now(STOPPED)  # another rank has printed the reason
                    return
            end(
                ENDED_EARLY,
                f"{request.reason.text}: ended before the first step; there was nothing to save, and nothing is lost.",
            )
        if request.deadline is not None and now > request.deadline:
            late = f"{request.reason.text}: the step was not finished within --grace_seconds {request.grace:g}"
            late += f", and {request.left}"
            if self.reporter is None or now > request.deadline + 2 * LAST_LOOK:
                end(STOPPED, late)
            self.reporter.say(trouble=late, code=STOPPED)  # all ranks end by the verdict, which says who was asked


def conclude(verdict: Verdict, reporter: Reporter) -> None:
    """End this process with rank 0's verdict. Rank 0 prints the message; the ranks named in it print their stacks."""
    if verdict.message:
        say(verdict.message)
        write_error_file(verdict.message)  # instead of the error that the other rank's end caused here
    if reporter.rank in verdict.stacks:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    for machine, pid in verdict.stuck:
        if machine == reporter.machine and is_another_rank(pid):
            for number in (signal.SIGUSR2, signal.SIGCONT):  # a stopped process prints its stacks when it goes on
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
            time.sleep(1)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    leave_now(verdict.code)


def say(message: str) -> None:
    """Print one line on standard error, on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print_line(message)


def end(code: int, message: str) -> None:
    """End this process at once, without waiting for its other threads."""
    say(message)
    leave_now(code)


def leave_now(code: int) -> None:
    """End this process without waiting for its main thread, and release the lock of the output folder."""
    with contextlib.suppress(Exception):
        output_folder.release_lock()
    os._exit(code)
