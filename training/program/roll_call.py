"""Which ranks are there: rank 0 hears each of them once a second, and finds out which is missing and what of it.

The ranks' watch threads speak to it by a socket each, apart from all collective calls. A rank
    died        its connection ended without a word
    is cut off  its machine has not answered for a while (training/program/lines.py)
    is silent   its machine answers and it does not: a process that is stopped, or one in a call that lets no other
                thread run. Those beside it on its machine say which.
Rounds are counted, not seconds: those in which rank 0 itself did not run do not count against the others.

Nobody else is spoken to: who connects has to prove that it has the run's key (lines.py), which ranks get through the
process group, and once all ranks have come, nobody can connect any more.
"""

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from training.program.hosts import first_of
from training.program.lines import Lines
from training.program.phases import ALONE

ROUND = 1.0  # seconds
SETTLE = 2  # rounds before the first sign of a failure is judged: the cause may come behind its effects
LINE, SILENT = 60, 75  # rounds of silence before a line says so, and before the run is ended
OTHERS_END = 10  # rounds that the other ranks have to end by themselves when one has ended with a message
STOPPED_STATES = ("T", "t")  # of /proc/PID/stat
USER_ERROR = 2  # the exit code of a mistake of the user's
EVERYWHERE = "0.0.0.0"
STRANGERS, PROVE = 64, 10  # connections at once that have not proven to be a rank's, and seconds that they have for it


@dataclass
class Rank:
    """What is known of a rank. quiet: rounds since it was heard. left: its exit code, once it said that it ends."""

    number: int
    beat: dict = field(default_factory=dict)
    quiet: int = 0
    left: int | None = None
    lost: str | None = None
    trouble: str | None = None
    state: str | None = None
    said: set = field(default_factory=set)

    def described(self) -> str:
        """By number, host and process, with phase and step."""
        if not self.beat:
            return f"rank {self.number}"
        return f"rank {self.number} (process {self.beat['pid']} on {self.beat['host']})"

    @property
    def where(self) -> str:
        """Its phase and step."""
        return where(self.beat)


def where(beat: dict) -> str:
    """The phase and step of a rank's last words, and since when."""
    if not beat:
        return "before it could say where"
    step = f" of step {beat['step']}" if beat["step"] else ""
    since, last = time.strftime("%H:%M:%S", time.localtime(beat["since"])), beat.get("last")
    return f"in phase {beat['phase']}{step} (since {since}{f'; last begun: {last}' if last else ''})"


@dataclass(frozen=True)
class Verdict:
    """Why all ranks end. stacks: of the ranks that are asked for theirs. stuck: pids by the machine they are on."""

    message: str
    code: int = 1
    stacks: tuple[int, ...] = ()
    stuck: tuple[tuple[str, int], ...] = ()


class RollCall(threading.Thread):
    """Rank 0's side. host: the address at which it listens; EVERYWHERE where ranks know this host by several."""

    def __init__(self, world: int, timeout_minutes: float, host: str = "127.0.0.1"):
        super().__init__(name="roll call", daemon=True)
        self.key, self.timeout = secrets.token_bytes(32), timeout_minutes * 60 / ROUND
        self.ranks = [Rank(number) for number in range(world)]
        self._listener = _listener(host, max(world, 128))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[Lines, Rank] = {}
        self._strangers: dict[Lines, float] = {}  # since when
        self._still = self._trouble_since = 0
        self._moves: list[tuple] = []
        self._over = threading.Event()

    def close(self) -> None:
        """Stop hearing."""
        self._over.set()
        self.join()
        for open_one in [self._listener, *self._strangers, *self._lines]:
            open_one.close()

    def pass_on(self, beat: dict) -> None:
        """Tell all ranks at once where rank 0 is: the next moment it may be gone, and this thread with it."""
        self.ranks[0].beat = beat
        self._tell({})

    def run(self) -> None:
        """Hear the ranks until all have left, or one is missing."""
        verdict = None
        while not self._over.is_set() and verdict is None:
            self._hear(time.monotonic() + ROUND)
            verdict = self._judge()
            self._tell({} if verdict is None else {"end": verdict.__dict__})

    def _hear(self, until: float) -> None:
        heard: set[int] = set()
        while (left := until - time.monotonic()) > 0 and not self._over.is_set():
            for key, _ in self._selector.select(min(left, 0.2)):
                if key.data is None:
                    self._accept()
                elif key.data in self._lines or key.data in self._strangers:  # not dropped meanwhile
                    self._read(key.data, heard)
            for lines in [lines for lines, since in self._strangers.items() if since < time.monotonic() - PROVE]:
                self._drop(lines)
        for rank in self.ranks:
            rank.quiet = 0 if rank.number in heard else rank.quiet + 1

    def _accept(self) -> None:
        """Let one in who is still to prove that it is a rank, in the place of the oldest of too many."""
        if len(self._strangers) >= STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            lines = Lines(self._listener.accept()[0], self.key, listens=True)
        except OSError:  # gone again, or no more files can be open
            time.sleep(0.01)
            return
        self._strangers[lines] = time.monotonic()
        self._selector.register(lines.connection, selectors.EVENT_READ, lines)

    def _read(self, lines: Lines, heard: set[int]) -> None:
        beats = []
        try:
            beats = lines.take()
        except (ConnectionResetError, ValueError):
            self._drop(lines, "has died")
        except OSError as error:
            self._drop(lines, f"is cut off ({error.strerror})")
        for beat in beats:
            if lines in self._strangers:
                rank = self.ranks[beat["rank"]]
                if any(rank is known for known in self._lines.values()):  # its words, heard and said again by another
                    self._drop(lines)
                    return
                self._know(lines, rank)
            rank = self._lines[lines]
            heard.add(rank.number)
            rank.beat = beat
            rank.left, rank.trouble = beat.get("left", rank.left), rank.trouble or beat.get("trouble")
            for number, state in beat.get("states", {}).items():
                self.ranks[int(number)].state = state

    def _know(self, lines: Lines, rank: Rank) -> None:
        """A stranger is this rank; the last to come shuts the door."""
        del self._strangers[lines]
        self._lines[lines] = rank
        if len(self._lines) == len(self.ranks):
            self._selector.unregister(self._listener)
            self._listener.close()
            for other in list(self._strangers):
                self._drop(other)

    def _drop(self, lines: Lines, lost: str = "") -> None:
        self._selector.unregister(lines.connection)
        lines.close()
        self._strangers.pop(lines, None)
        rank = self._lines.pop(lines, None)
        if rank is not None and rank.left is None:
            rank.lost = rank.lost or lost

    def _tell(self, words: dict) -> None:
        """A line for every rank: where rank 0 is, whose state is to be looked at, and whether to end."""
        asked = [[rank.number, rank.beat["machine"], rank.beat["pid"]] for rank in self.ranks if _asked_about(rank)]
        left = any(rank.left or rank.lost or rank.trouble for rank in self.ranks)
        for lines in list(self._lines):
            with contextlib.suppress(OSError):  # reading finds it lost
                lines.put({**words, "first": self.ranks[0].beat, "look": asked, "left": left})

    def _judge(self) -> Verdict | None:
        return self._failed() or self._silent() or self._stuck()

    def _failed(self) -> Verdict | None:
        """A rank that died, was cut off, or met an error."""
        lost = [rank for rank in self.ranks if rank.lost]
        troubled = [rank for rank in self.ranks if rank.trouble]
        ended = [rank for rank in self.ranks if rank.left]
        if not (lost or troubled or ended):
            return None
        self._trouble_since += 1
        if self._trouble_since <= (SETTLE if lost or troubled else OTHERS_END):
            return None
        if ended:
            return Verdict("", code=ended[0].left or 1)
        if lost:
            return Verdict("\n".join(f"{rank.described()} {rank.lost} {rank.where}: the run ends." for rank in lost))
        return Verdict(self._quoted(troubled[0]), code=troubled[0].beat.get("code", 1))

    def _quoted(self, rank: Rank) -> str:
        """What a rank has met, with its host where not all have met the same. A user's mistake, which is told in the
        same words by each rank that it befalls, has no rank's number."""
        hosts = [other.beat.get("host", "") for other in self.ranks]
        if rank.beat.get("code") == USER_ERROR:
            return f"error: {first_of([other.trouble for other in self.ranks], hosts)}"
        if len(set(hosts)) > 1 and any(other.trouble is None for other in self.ranks):
            return f"rank {rank.number} on {rank.beat['host']}: {rank.trouble}"
        return (f"rank {rank.number}: " if rank.number else "") + (rank.trouble or "")

    def _silent(self) -> Verdict | None:
        """Ranks whose machine answers and which do not."""
        silent = [rank for rank in self.ranks if rank.quiet >= LINE and rank.left is None]
        for rank in silent:
            if "silent" not in rank.said:
                rank.said.add("silent")
                self._tell({"say": f"{_silence(rank)} for {rank.quiet} s"})
        missing = [rank for rank in silent if rank.quiet >= SILENT and rank.state in (None, *STOPPED_STATES)]
        if not missing:
            return None
        return Verdict(
            "\n".join(f"{_silence(rank)} for {rank.quiet} s: the run ends." for rank in missing),
            stuck=tuple((rank.beat["machine"], rank.beat["pid"]) for rank in missing if rank.beat),
        )

    def _stuck(self) -> Verdict | None:
        """All ranks there, and none of them moving: no pass through a model, no phase begun."""
        moves = [(rank.beat.get("moves"), rank.beat.get("phase"), rank.beat.get("step")) for rank in self.ranks]
        alone = any(phase in ALONE for _, phase, _ in moves)
        self._still = 0 if moves != self._moves or alone else self._still + 1
        self._moves = moves
        behind = self._behind()
        if self._still == LINE and behind and all(rank.quiet < LINE // 2 for rank in self.ranks):
            names = ", ".join(f"{rank.described()} {rank.where}" for rank in behind)
            self._tell({"say": f"no rank has moved for {LINE} s; the others wait for {names}"})
        if self._still < self.timeout:
            return None
        named = behind or list({rank.beat.get("last"): rank for rank in reversed(self.ranks)}.values())[::-1]
        return Verdict(
            f"no rank has moved for {self.timeout * ROUND / 60:g} minutes (--timeout_minutes): "
            + ", ".join(f"{rank.described()} is {rank.where}" for rank in named)
            + ". The run ends; stacks follow.",
            stacks=tuple(rank.number for rank in named),
        )

    def _behind(self) -> list[Rank]:
        """The ranks in the phase that fewest are in, of two of these in the older one, where they are not all in the
        same."""
        groups: dict[tuple, list[Rank]] = {}
        for rank in self.ranks:
            groups.setdefault((rank.beat.get("step"), rank.beat.get("phase")), []).append(rank)
        return min(groups.values(), key=lambda group: (len(group), _since(group))) if len(groups) > 1 else []


def meeting_address() -> str:
    """Where this rank finds rank 0: on this machine where all ranks are, or else at MASTER_ADDR, as it knows it."""
    here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    name = "127.0.0.1" if here == os.environ.get("WORLD_SIZE") else os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


def _listener(host: str, backlog: int) -> socket.socket:
    with contextlib.suppress(OSError):  # an address that leads here and is not this machine's own
        return socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
        )
    return socket.create_server((EVERYWHERE, 0), backlog=backlog)


def _since(ranks: list[Rank]) -> float:
    return min(rank.beat.get("since", 0.0) for rank in ranks)


def _asked_about(rank: Rank) -> bool:
    return rank.quiet > 5 and bool(rank.beat) and rank.left is None


def _silence(rank: Rank) -> str:
    what = {"T": "is stopped (a signal stopped its process)", "t": "is stopped (by a debugger)", None: "is silent"}
    return f"{rank.described()} {what.get(rank.state, 'says nothing, though its process lives')} {rank.where}"
