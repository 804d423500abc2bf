"""Heartbeats: each rank sends its phase and step to rank 0 once a second, so that rank 0 can tell which rank is
missing, and why.

Watch threads send heartbeats over separate sockets, independent of the collective calls of main threads. A rank
    died        if its connection ended without notice
    is cut off  if its machine has not answered for CUT_OFF seconds, as TCP's keepalive found
    is silent   if its machine answers but the rank does not: its process is stopped, or is in a call that lets no other
                thread run. Other ranks on the same machine report which of the two it is.
torch does not distinguish these cases: gloo names an address or nothing, NCCL's watchdog names the collective call.
Silence is counted in rounds, not in seconds: while rank 0 itself does not run, the other ranks' silence does not grow.

Other programs are kept out: each message has to prove that its sender has the run's key, which ranks get through the
process group. Once all ranks have connected, no further connection is accepted.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from engine import trace
from engine.errors import UserError
from training.runtime.environment import print_line, write_error_file
from training.runtime.processes import ALONE, place, state_of, this_machine
from training.runtime.ranks import USER_ERROR, first_of

ROUND = 1.0  # seconds between two heartbeats
SETTLE = 2  # rounds from the first sign of a failure to the verdict: the cause may be reported after its effects
LINE, SILENT = 60, 75  # rounds of silence after which a line about it is printed, and after which the run is ended
OTHERS_END = 10  # rounds that the other ranks have to end by themselves when one has ended with a message
STOPPED = {"T": "is stopped (a signal stopped its process)", "t": "is stopped (by a debugger)"}  # by /proc/PID/stat
CUT_OFF = 40  # seconds without an answer of the other machine, after which it counts as cut off
EVERYWHERE = "0.0.0.0"
STRANGERS, PROVE = 64, 10  # limits for connections not yet proven to be a rank's: their number, and their seconds
HELD_BACK = 1 << 20  # limit of bytes that wait for a receiver who does not read; further messages are dropped
LONGEST = 1 << 20  # limit of a line, in bytes


class Connection:
    """One end of a connection that carries JSON objects, one per line. `send` and `receive` never block. `send` may be
    called from several threads.

    Each line carries an HMAC-SHA256 (RFC 2104) over its content, the sending side and the line's number, which proves
    that the sender has the key. The key itself is never sent. listens: whether the other end opened the connection.
    """

    def __init__(self, connection: socket.socket, key: bytes, listens: bool = False):
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Have the system report if the other end is cut off, whether unacknowledged data are on the way or not.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("KEEPIDLE", 10), ("KEEPINTVL", 10), ("KEEPCNT", 3), ("USER_TIMEOUT", CUT_OFF * 1000)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        self._key, self._listens = key, listens
        self._sent = self._received = 0  # lines
        self._unsent = self._unread = b""
        self._sending = threading.Lock()

    def send(self, message: dict) -> None:
        """Send a message, or drop it if too many bytes wait to be sent. Raises: OSError if the connection has ended."""
        with self._sending:
            if len(self._unsent) < HELD_BACK:
                text = json.dumps(message).encode()
                self._unsent += self._proof(self._listens, self._sent, text) + b" " + text + b"\n"
                self._sent += 1
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[dict]:
        """The messages that have arrived since the last call.

        If the connection has ended, messages that arrived before its end are returned first.

        Raises: ConnectionResetError if the other end closed the connection; another OSError if the connection was lost;
        ValueError for a line without a valid proof, or a line that is too long.
        """
        while len(self._unread) <= LONGEST:
            try:
                data = self.socket.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
            except BlockingIOError:
                break
            except OSError:
                if b"\n" in self._unread:
                    break
                raise
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LONGEST:
            raise ValueError(f"a line of more than {LONGEST} bytes")
        return [self._proven(line) for line in lines]

    def _proven(self, line: bytes) -> dict:
        proof, _, text = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(not self._listens, self._received, text)):
            raise ValueError("a line without proof")
        self._received += 1
        return json.loads(text)

    def _proof(self, of_listener: bool, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %d %b" % (of_listener, number, text), "sha256").hex().encode()


def lost_by(error: OSError | ValueError) -> str:
    """Text that says what happened to a rank if its connection ended with this error."""
    died = isinstance(error, (ConnectionResetError, BrokenPipeError, ValueError))
    return "has died" if died else f"is cut off ({getattr(error, 'strerror', None) or error})"


@dataclass
class Rank:
    """What rank 0 knows about a rank. beat: the rank's last heartbeat. quiet: number of rounds since this heartbeat.
    left: the rank's exit code, if it has reported that it ends. lost: how its connection ended. trouble: the error that
    it reported. state: the kernel's state of its process. announced: whether a line about its silence was printed."""

    number: int
    beat: dict = field(default_factory=dict)
    quiet: int = 0
    left: int | None = None
    lost: str | None = None
    trouble: str | None = None
    state: str | None = None
    announced: bool = False

    def __str__(self) -> str:
        return f"rank {self.number}" + (f" (process {self.beat['pid']} on {self.beat['host']})" if self.beat else "")

    @property
    def where(self) -> str:
        """Text with the rank's phase and step, their start time, and what the rank began last."""
        if not self.beat:
            return "before it could say where"
        step = f" of step {self.beat['step']}" if self.beat["step"] else ""
        since, last = time.strftime("%H:%M:%S", time.localtime(self.beat["since"])), self.beat.get("last")
        return f"in phase {self.beat['phase']}{step} (since {since}{f'; last begun: {last}' if last else ''})"

    @property
    def silence(self) -> str:
        """Text that says in what way the rank is silent, in which phase, and for how long."""
        how = STOPPED.get(self.state or "", "says nothing, though its process lives" if self.state else "is silent")
        return f"{self} {how} {self.where} for {self.quiet} s"

    @property
    def missing(self) -> bool:
        """Whether the rank has been silent for too long, and its process is not known to be running."""
        return self.quiet >= SILENT and self.left is None and self.state in (None, *STOPPED)

    @property
    def process(self) -> tuple[str, int]:
        """(the rank's machine, its process id there)."""
        return self.beat["machine"], self.beat["pid"]


@dataclass(frozen=True)
class Verdict:
    """The decision that all ranks end, and what they do before. message: the reason. stacks: the ranks that print their
    stack traces. stuck: (machine, process id) of the processes to kill."""

    message: str
    code: int = 1
    stacks: tuple[int, ...] = ()
    stuck: tuple[tuple[str, int], ...] = ()


class Monitor(threading.Thread):
    """Rank 0's side of the heartbeats: receives them and decides when the run ends. host: the address at which it
    listens; EVERYWHERE if the ranks reach this host by different addresses."""

    def __init__(self, world: int, timeout_minutes: float, host: str = "127.0.0.1"):
        super().__init__(name="heartbeats", daemon=True)
        self.key, self.timeout = secrets.token_bytes(32), timeout_minutes * 60 / ROUND
        self.ranks = [Rank(number) for number in range(world)]
        self._listener = _listener(host, max(world, 128))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._known: dict[Connection, Rank] = {}
        self._strangers: dict[Connection, float] = {}  # {connection not yet proven to be a rank's: its start time}
        self._still = self._failing = 0  # rounds without a move of any rank; rounds since the first sign of a failure
        self._moves: list[tuple] = []
        self._over = threading.Event()

    def close(self) -> None:
        """Stop the thread, and close all connections."""
        self._over.set()
        self.join()
        self._listener.close()
        for connection in (*self._strangers, *self._known):
            connection.socket.close()

    def pass_on(self, beat: dict) -> None:
        """Send rank 0's heartbeat to all ranks immediately, because rank 0 may end at any moment, and this thread with
        it."""
        self.ranks[0].beat = beat
        self._tell({})

    def run(self) -> None:
        """Read heartbeats, look for failures once a round, and send all ranks the result, until there is a verdict or
        the thread is stopped."""
        verdict = None
        while not self._over.is_set() and verdict is None:
            self._hear(time.monotonic() + ROUND)
            verdict = self._failed() or self._silent() or self._stuck()
            self._tell({} if verdict is None else {"end": verdict.__dict__})

    # Connections

    def _hear(self, until: float) -> None:
        heard: set[int] = set()
        while (left := until - time.monotonic()) > 0 and not self._over.is_set():
            for key, _ in self._selector.select(min(left, 0.2)):
                if key.data is None:
                    self._accept()
                elif key.data in self._known or key.data in self._strangers:  # not dropped meanwhile
                    self._read(key.data, heard)
            for connection in [one for one, since in self._strangers.items() if since < time.monotonic() - PROVE]:
                self._drop(connection)
        for rank in self.ranks:
            rank.quiet = 0 if rank.number in heard else rank.quiet + 1

    def _accept(self) -> None:
        """Accept a connection, which then has to prove that it is a rank's. If there are too many unproven connections,
        the oldest of them is closed."""
        if len(self._strangers) >= STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            connection = Connection(self._listener.accept()[0], self.key, listens=True)
        except OSError:  # the other end has closed it again, or too many files are open
            time.sleep(0.01)
            return
        self._strangers[connection] = time.monotonic()
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection, heard: set[int]) -> None:
        beats = []
        try:
            beats = connection.receive()
        except (OSError, ValueError) as error:
            self._drop(connection, lost_by(error))
        for beat in beats:
            if connection in self._strangers:
                rank = self.ranks[beat["rank"]]
                if rank in self._known.values():  # somebody repeats a rank's message
                    self._drop(connection)
                    return
                self._know(connection, rank)
            rank = self._known[connection]
            heard.add(rank.number)
            rank.beat = beat
            rank.left, rank.trouble = beat.get("left", rank.left), rank.trouble or beat.get("trouble")
            for number, state in beat.get("states", {}).items():
                self.ranks[int(number)].state = state

    def _know(self, connection: Connection, rank: Rank) -> None:
        """Note that this connection belongs to this rank. When all ranks are connected, stop listening, and close all
        other connections."""
        del self._strangers[connection]
        self._known[connection] = rank
        if len(self._known) == len(self.ranks):
            self._selector.unregister(self._listener)
            self._listener.close()
            for other in list(self._strangers):
                self._drop(other)

    def _drop(self, connection: Connection, lost: str = "") -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._strangers.pop(connection, None)
        rank = self._known.pop(connection, None)
        if rank is not None and rank.left is None:
            rank.lost = rank.lost or lost

    def _tell(self, words: dict) -> None:
        """Send every rank a message: rank 0's heartbeat, the ranks whose processes it has to look at, whether a rank
        has left, and `words`."""
        quiet = [rank for rank in self.ranks if rank.quiet > 5 and rank.beat and rank.left is None]
        look = [[rank.number, *rank.process] for rank in quiet]
        left = any(rank.left or rank.lost or rank.trouble for rank in self.ranks)
        for connection in list(self._known):
            with contextlib.suppress(OSError):  # `_read` will notice that the connection has ended
                connection.send({**words, "first": self.ranks[0].beat, "look": look, "left": left})

    # Verdicts

    def _failed(self) -> Verdict | None:
        """The verdict if a rank died, was cut off, or reported an error; None before some rounds have passed."""
        lost = [rank for rank in self.ranks if rank.lost]
        troubled = [rank for rank in self.ranks if rank.trouble]
        ended = [rank for rank in self.ranks if rank.left]
        if not (lost or troubled or ended):
            return None
        self._failing += 1
        if self._failing <= (SETTLE if lost or troubled else OTHERS_END):
            return None
        if ended:
            return Verdict("", code=ended[0].left or 1)
        if lost:
            return Verdict("\n".join(f"{rank} {rank.lost} {rank.where}: the run ends." for rank in lost))
        return Verdict(self._quoted(troubled[0]), code=troubled[0].beat.get("code", 1))

    def _quoted(self, rank: Rank) -> str:
        """Text with the error that a rank reported; it names the rank's host unless all ranks reported an error. For a
        user's mistake the rank's number is left out, since all ranks report the same text."""
        hosts = [other.beat.get("host", "") for other in self.ranks]
        if rank.beat.get("code") == USER_ERROR:
            return f"error: {first_of([other.trouble for other in self.ranks], hosts)}"
        if len(set(hosts)) > 1 and any(other.trouble is None for other in self.ranks):
            return f"rank {rank.number} on {rank.beat['host']}: {rank.trouble}"
        return (f"rank {rank.number}: " if rank.number else "") + (rank.trouble or "")

    def _silent(self) -> Verdict | None:
        """The verdict if ranks are silent although their machines answer; else None. Prints a line about each rank that
        has been silent for LINE rounds."""
        for rank in self.ranks:
            if rank.quiet >= LINE and rank.left is None and not rank.announced:
                rank.announced = True
                self._tell({"say": rank.silence})
        missing = [rank for rank in self.ranks if rank.missing]
        if not missing:
            return None
        message = "\n".join(f"{rank.silence}: the run ends." for rank in missing)
        return Verdict(message, stuck=tuple(rank.process for rank in missing if rank.beat))

    def _stuck(self) -> Verdict | None:
        """The verdict if no rank has moved for as long as the time limit allows; else None. A rank moves if it passes
        through a model or enters a phase."""
        moves = [(rank.beat.get("moves"), rank.beat.get("phase"), rank.beat.get("step")) for rank in self.ranks]
        alone = any(phase in ALONE for _, phase, _ in moves)
        self._still = 0 if moves != self._moves or alone else self._still + 1
        self._moves = moves
        behind = self._behind()
        if self._still == LINE and behind and all(rank.quiet < LINE // 2 for rank in self.ranks):
            names = ", ".join(f"{rank} {rank.where}" for rank in behind)
            self._tell({"say": f"no rank has moved for {LINE} s; the others wait for {names}"})
        if self._still < self.timeout:
            return None
        alike: dict[str | None, list[Rank]] = {}  # {what they began last: ranks}, of which no one is behind
        for rank in self.ranks:
            alike.setdefault(rank.beat.get("last"), []).append(rank)
        named = [[rank] for rank in behind] or list(alike.values())
        told = [f"{rank} is {rank.where}{f', like {len(more)} more' if more else ''}" for rank, *more in named]
        return Verdict(
            f"no rank has moved for {self.timeout * ROUND / 60:g} minutes (--timeout_minutes): {', '.join(told)}. The "
            "run ends; stacks follow.",
            stacks=tuple(rank.number for rank, *_ in named),
        )

    def _behind(self) -> list[Rank]:
        """The ranks that are probably behind: those in the phase that has the fewest ranks. If several phases have
        equally few, the phase that began first counts. [] if all ranks are in the same phase."""
        groups: dict[tuple, list[Rank]] = {}
        for rank in self.ranks:
            groups.setdefault((rank.beat.get("step"), rank.beat.get("phase")), []).append(rank)
        if len(groups) == 1:
            return []
        return min(groups.values(), key=lambda group: (len(group), min(rank.beat.get("since", 0.0) for rank in group)))


class Reporter:
    """Each rank's side of the heartbeats: sends them to rank 0, and reads rank 0's messages.

    verdict: the decision that all ranks end; None until there is one. others_left: whether another rank has ended or is
    lost.
    """

    def __init__(self, rank: int, address: tuple[str, int], key: bytes):
        self.rank, self.machine = rank, this_machine() or socket.gethostname()
        self.verdict: Verdict | None = None
        self.others_left = False
        self._words: dict = {}  # further fields of the heartbeats: "left", "trouble"
        self._first = Rank(0)  # what this rank knows about rank 0, which it watches in the same way
        self._states: dict[int, str | None] = {}
        self._lost_for, self._round = 0, 0.0
        try:
            self._connection = Connection(socket.create_connection(address, timeout=60), key)
        except OSError as error:
            raise UserError(
                f"rank {rank} cannot connect to rank 0 at {address[0]}:{address[1]} ({error.strerror or error}), where "
                "the ranks are watched. Open the ports of the nodes to each other."
            ) from None
        self.say()

    def say(self, **words) -> dict:
        """Send a heartbeat to rank 0; returns it. words: fields that this heartbeat and all later ones get."""
        self._words |= words
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
            **self._words,
        }
        if self._first.lost is None:
            try:
                self._connection.send(beat)
            except OSError as error:
                self._lose(error)
        return beat

    def look(self) -> None:
        """Read rank 0's messages, and send a heartbeat if a round has passed. Sets `verdict` if the run ends."""
        if "left" in self._words:  # this rank has reported that it ends
            return
        self.hear()
        now, first = time.monotonic(), self._first
        if now - self._round < ROUND * 0.9 or self.verdict is not None:
            return
        self._round = now
        self.say()
        first.quiet += 1
        if first.lost is not None:
            self._lost_for += 1
            if self._lost_for > SETTLE:
                self._conclude(f"{first} {first.lost} {first.where}: the run ends.")
        elif first.quiet >= LINE and first.beat:
            first.state = state_of(first.beat["pid"]) if first.beat["machine"] == self.machine else None
            if first.missing:
                self._conclude(f"{first.silence}: the run ends.", (first.process,))
            elif first.quiet == LINE and self.rank == 1:
                print_line(first.silence)

    def hear(self) -> None:
        """Read rank 0's messages, including those that arrived before the connection ended."""
        try:
            heard = self._connection.receive()
        except (OSError, ValueError) as error:
            self._lose(error)
            return
        for words in heard:
            self._first.quiet = 0
            if words.get("say") and self.rank == 0:
                print_line(words["say"])
            self._first.beat = words["first"] or self._first.beat
            self.others_left = self.others_left or words["left"]
            self._states = {number: state_of(pid) for number, machine, pid in words["look"] if machine == self.machine}
            if words.get("end"):
                self.verdict = Verdict(**words["end"])

    def close(self) -> None:
        """Close the connection."""
        self._connection.socket.close()

    def _lose(self, error: OSError | ValueError) -> None:
        self._first.lost, self.others_left = self._first.lost or lost_by(error), True

    def _conclude(self, message: str, stuck: tuple = ()) -> None:
        """End the run without rank 0. Rank 1 prints the reason; 3 seconds later, the first rank of each machine prints
        it."""
        if self.rank > 1:
            time.sleep(3)
        if self.rank == 1 or int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print_line(message)
        write_error_file(message)
        self.verdict = Verdict("", stuck=stuck)


def meeting_address() -> str:
    """The address at which this rank reaches rank 0: 127.0.0.1 if all ranks are on this machine, else MASTER_ADDR."""
    here = os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE")
    name = "127.0.0.1" if here == os.environ.get("WORLD_SIZE") else os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return name


def _listener(host: str, backlog: int) -> socket.socket:
    with contextlib.suppress(OSError):  # the address may be forwarded to this machine without being its own
        return socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=backlog
        )
    return socket.create_server((EVERYWHERE, 0), backlog=backlog)
