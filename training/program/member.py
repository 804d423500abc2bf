"""A rank's side of the roll call: it says once a second where it is, and hears whether the run ends."""

import contextlib
import os
import socket
import sys
import time

from engine import trace
from engine.errors import UserError
from training.program.error_file import write_error_file
from training.program.lines import Lines
from training.program.phases import place
from training.program.processes import state_of, this_machine
from training.program.roll_call import LINE, ROUND, SETTLE, SILENT, STOPPED_STATES, Verdict, where


class Member:
    """One rank.

    verdict: why all ranks end, once that is known. others_left: whether another rank has ended or is lost.
    """

    def __init__(self, rank: int, address: tuple[str, int], key: bytes):
        self.rank, self.machine = rank, this_machine() or socket.gethostname()
        self.verdict: Verdict | None = None
        self.others_left = False
        self.words: dict = {}  # what is said of this rank beside its place: "left", "trouble"
        self._first: dict = {}  # the last that is known of rank 0
        self._states: dict[int, str] = {}
        self._quiet, self._lost_for, self._round = 0, 0, 0.0
        self._lost: str | None = None
        try:
            self._lines = Lines(socket.create_connection(address, timeout=60), key)
        except OSError as error:
            raise UserError(
                f"rank {rank} cannot connect to rank 0 at {address[0]}:{address[1]} ({error.strerror or error}), where "
                "the ranks are watched. Open the ports of the nodes to each other."
            ) from None
        self.say()

    def say(self, **words) -> dict:
        """Tell rank 0 where this rank is, and more if there is more; returns what was said."""
        self.words |= words
        beat = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "machine": self.machine,
            "pid": os.getpid(),
            "phase": place.phase,
            "step": place.step,
            "since": place.since,
            "moves": trace.moves(),
            "last": trace.last(),
            "states": self._states,
            **self.words,
        }
        if self._lost is None:
            try:
                self._lines.put(beat)
            except OSError as error:
                self._lose(error)
        return beat

    def look(self) -> list[str]:
        """Say and hear, at most once a round; returns lines to be printed. `verdict` is set where the run ends."""
        if "left" in self.words:  # others end when they have ended, this one too
            return []
        now = time.monotonic()
        self.hear()
        if now - self._round < ROUND * 0.9 or self.verdict is not None:
            return []
        self._round = now
        self.say()
        self._quiet += 1
        if self._lost is not None:
            self._lost_for += 1
            if self._lost_for > SETTLE:
                self._conclude(f"rank 0 {self._place_of_first()} {self._lost} {where(self._first)}: the run ends.")
            return []
        return self._silence_of_first()

    def hear(self) -> None:
        """Read what rank 0 has said, its last words too where speaking to it has failed."""
        try:
            heard = self._lines.take()
        except (OSError, ValueError) as error:
            if self._lost is None:
                self._lose(error)
            return
        for words in heard:
            self._quiet = 0
            self._take(words)

    def close(self) -> None:
        """Leave the roll call."""
        self._lines.close()

    def _take(self, words: dict) -> None:
        if words.get("say") and self.rank == 0:
            print_line(words["say"])
        self._first, self.others_left = words["first"] or self._first, self.others_left or words["left"]
        self._states = {number: state_of(pid) for number, machine, pid in words["look"] if machine == self.machine}
        if words.get("end"):
            self.verdict = Verdict(**words["end"])

    def _lose(self, error: OSError | ValueError) -> None:
        died = isinstance(error, (ConnectionResetError, BrokenPipeError))
        self._lost = "has died" if died else f"is cut off ({getattr(error, 'strerror', None) or error})"
        self.others_left = True

    def _silence_of_first(self) -> list[str]:
        """What is to be said of a rank 0 that has not been heard; it is judged as rank 0 judges the others."""
        if self._quiet < LINE or not self._first:
            return []
        state = state_of(self._first["pid"]) if self._first["machine"] == self.machine else None
        stopped = "is stopped (a signal stopped its process)" if state in STOPPED_STATES else "is silent"
        line = f"rank 0 {self._place_of_first()} {stopped} {where(self._first)} for {self._quiet} s"
        if self._quiet >= SILENT and state in (None, *STOPPED_STATES):
            stuck = ((self._first["machine"], self._first["pid"]),)
            self._conclude(f"{line}: the run ends.", stuck)
        return [line] if self._quiet == LINE and self.rank == 1 else []

    def _conclude(self, message: str, stuck: tuple = ()) -> None:
        """Without rank 0: rank 1 says why, or after a while the first rank of each machine."""
        if self.rank > 1:
            time.sleep(3)
        told = self.rank == 1 or int(os.environ.get("LOCAL_RANK", 0)) == 0
        if told:
            print_line(message)
        write_error_file(message)
        self.verdict = Verdict("", stuck=stuck)

    def _place_of_first(self) -> str:
        return f"(process {self._first['pid']} on {self._first['host']})" if self._first else ""


def print_line(message: str) -> None:
    """On standard error, if somebody is there to read it. What a terminal would obey, it shows: another process may
    have said it."""
    shown = "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in message)
    with contextlib.suppress(OSError):
        print(shown, file=sys.stderr, flush=True)
