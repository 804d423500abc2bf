"""Lets ranks send their facts to rank 0 before the process group exists, through the key-value store at which they
meet.

    rank 0                                          another rank
    exchange = Exchange.served("preflight")         exchange = Exchange.reached("preflight", seconds)
    exchange.publish("look", {...})                 exchange.published("look")
    exchange.facts(own, world, seconds)  <--------  exchange.post({...})
    exchange.publish("verdict", {...})              exchange.published("verdict")

The exchange uses no collective call and no library but torch. Therefore a rank that has another version of a library
can still report this version. Anybody who reaches the port of torch's store can write to the store, and the ranks have
no shared key yet (docs/security.md). Therefore the store's content is not trusted: it is parsed and never executed, and
wrong content can only end the run with a message and exit code 2.
"""

import base64
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import psutil

from engine import distributed
from engine.errors import UserError
from engine.files import parsed_json
from engine.zero.accelerator import on_gpu
from training.config.flags import RunFlags
from training.runtime.agreement import open_store, start_key
from training.runtime.environment import slurm_hosts
from training.tools.preflight.facts import Fact, facts_of_node, own_gpu
from training.tools.preflight.table import Node

BETWEEN = 0.1  # seconds between two looks of a rank into the store
ANSWER = 45.0  # longest wait in seconds for an answer of the store, which many ranks may ask at the same time
LINGER = 5.0  # seconds for which rank 0 goes on serving the store, so that others can read its verdict
WORLD_INFO = "--world_info="  # a flag of DeepSpeed's launcher on each node


class Exchange:
    """One rank's side of the exchange: ranks post facts, and rank 0 publishes objects that all ranks read.

    store: torch's key-value store. name: the name of this exchange, which is part of its keys in the store. Each start
    of the ranks uses other keys, because torchrun keeps the store when it restarts the ranks.
    """

    def __init__(self, store, name: str, environment: Mapping[str, str]):
        self._store, self._name, self._environment = store, start_key(name, environment), environment

    @classmethod
    def served(cls, name: str, environment: Mapping[str, str] = os.environ) -> "Exchange":
        """Rank 0's side, which serves the store. Raises UserError if another process listens at MASTER_PORT."""
        try:
            return cls(open_store(environment, serve=True, seconds=ANSWER), name, environment)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"MASTER_PORT {environment['MASTER_PORT']} cannot be listened at ({str(error).splitlines()[0]}). Give "
                "another port (--master_port)."
            ) from None

    @classmethod
    def reached(cls, name: str, seconds: float, environment: Mapping[str, str] = os.environ) -> "Exchange":
        """The side of any other rank, which connects to the store. Raises UserError if rank 0 does not serve the store
        within this many seconds."""
        deadline, reason = time.monotonic() + seconds, "nobody listens there"
        while time.monotonic() < deadline:
            try:
                return cls(open_store(environment, seconds=ANSWER), name, environment)
            except (RuntimeError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            time.sleep(0.2)
        raise UserError(f"no answer from rank 0 at {_place(environment)} within {seconds:.0f} s ({reason})")

    def post(self, own: dict) -> None:
        """Send the facts of this rank to rank 0. Raises UserError if rank 0 has ended or cannot be reached."""
        self._ask(self._store.set, f"{self._name}/{self._environment['RANK']}", json.dumps(own))
        self._ask(self._store.add, f"{self._name}/posted", 1)

    def facts(self, own: dict, world: int, seconds: float, over: Callable[[], bool] = lambda: False) -> dict[int, dict]:
        """Wait for the facts of all ranks; returns {rank: facts}, with rank 0's `own` facts (rank 0 calls this). The
        wait ends early if no further rank posts its facts within `seconds`, or if `over` returns True; the result then
        lacks the ranks that have not posted."""
        found, deadline, counted = {0: own}, time.monotonic() + seconds, 0
        while len(found) < world and time.monotonic() < deadline and not over():
            posted = self._ask(self._store.add, f"{self._name}/posted", 0)
            for rank in set(range(world)) - set(found) if posted != counted else ():
                if (text := self._read(str(rank))) is not None:
                    found[rank], deadline = text, time.monotonic() + seconds
            counted = posted
            time.sleep(BETWEEN)
        return found

    def publish(self, what: str, words: dict) -> None:
        """Let the other ranks read an object under the name `what` (rank 0 calls this)."""
        self._store.set(f"{self._name}/{what}", json.dumps(words))

    def published(self, what: str) -> dict:
        """Wait for the object that rank 0 publishes under this name, and return it.

        Raises: UserError if rank 0 has ended or cannot be reached."""
        while (words := self._read(what)) is None:
            time.sleep(BETWEEN)
        self._ask(self._store.add, f"{self._name}/heard {what}", 1)
        return words

    def linger(self, what: str, ranks: int) -> None:
        """Keep serving the store until `ranks` ranks have read the object `what`, for LINGER seconds at most (rank 0
        calls this before it ends)."""
        deadline = time.monotonic() + LINGER
        while self._store.add(f"{self._name}/heard {what}", 0) < ranks and time.monotonic() < deadline:
            time.sleep(BETWEEN)

    def _read(self, what: str) -> dict | None:
        """The object that is stored under a key; None if the key has no value, or if its value is no JSON object."""
        key = f"{self._name}/{what}"
        if not self._ask(self._store.check, [key]):
            return None
        try:
            found = parsed_json(self._ask(self._store.get, key))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _ask(self, call: Callable, *words):
        """Make a call to the store; returns its answer. If rank 0's host is cut off, torch waits for ever. Therefore
        another thread makes the call, and this thread raises UserError after ANSWER seconds."""
        answers: queue.SimpleQueue = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((call(*words), None))
            except RuntimeError as error:
                answers.put((None, str(error).splitlines()[0]))

        threading.Thread(target=ask, daemon=True).start()
        try:
            answer, reason = answers.get(timeout=ANSWER)
        except queue.Empty:
            where = _place(self._environment)
            raise UserError(f"no answer from rank 0 at {where} within {ANSWER:.0f} s") from None
        if reason is not None:
            raise UserError(f"rank 0 has gone ({reason}). Look at what it has printed.")
        return answer


def _place(environment: Mapping[str, str]) -> str:
    return f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"


def facts_of_rank(args: RunFlags, thorough: bool = True) -> dict:
    """The facts that this rank posts: its host; if `thorough`, its GPU; and, on a host's first rank, the facts about
    the node."""
    own: dict = {"host": socket.gethostname()}
    if thorough and on_gpu():
        own["gpu"] = asdict(own_gpu(distributed.local_rank()))
    if distributed.local_rank() == 0:
        own["facts"] = {row: asdict(fact) for row, fact in facts_of_node(args, thorough).items()}
    return own


def nodes_of(posted: Mapping[int, dict]) -> list[Node]:
    """The nodes whose facts were posted, in the order of their ranks. posted: {rank: facts}.

    Several nodes may have the same host name, for example containers. The ranks of such nodes are told apart by their
    order: the first rank of a node is followed by the node's other ranks.

    Raises: UserError for facts of another form, for example from another version of this program.
    """
    ranks: dict[int, list[int]] = {}  # {first rank of a node: all ranks of the node}
    latest: dict[str, int] = {}  # {host name: first rank of the latest node of this name}
    try:
        for rank in sorted(posted):
            host = posted[rank]["host"]
            if "facts" in posted[rank]:
                latest[host], ranks[rank] = rank, []
            if host in latest:
                ranks[latest[host]].append(rank)
        nodes = []
        for first, own in ranks.items():
            facts = {row: Fact(**fact) for row, fact in posted[first]["facts"].items()}
            if found := [Fact(**posted[rank]["gpu"]) for rank in own if "gpu" in posted[rank]]:  # show the worst GPU
                facts["GPU memory"] = min(found, key=lambda gpu: (not gpu.problem, gpu.warning, gpu.amount or 0))
            nodes.append(Node(str(posted[first]["host"]), tuple(own), facts))
        return nodes
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the facts that ranks have posted cannot be read ({type(error).__name__}: {error}). Another version of "
            "this program runs on a host, or another program writes where they meet (MASTER_PORT)."
        ) from None


def hosts_by_rank(world: int, lines: Iterable[list[str]] | None = None) -> dict[int, str]:
    """{rank: host} according to the launcher. It serves to name the hosts of ranks that post nothing. The host is "" if
    it is not known. world: number of ranks.

    lines: the command lines of the parent processes of this process; None to look them up.
    """
    found = dict.fromkeys(range(world), "")
    for words in _command_lines_above() if lines is None else lines:
        for word in words:
            if word.startswith(WORLD_INFO):  # {host: [slots]}, as JSON in base 64
                try:
                    slots = json.loads(base64.urlsafe_b64decode(word.removeprefix(WORLD_INFO)))
                    return found | dict(enumerate(host for host, numbers in slots.items() for _ in numbers))
                except (ValueError, AttributeError, TypeError):
                    return found
    tasks = slurm_hosts(os.environ)
    return found | tasks if len(tasks) == world else found  # else srun has started another launcher


def _command_lines_above() -> list[list[str]]:
    found = []
    for process in psutil.Process().parents():
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue
    return found
