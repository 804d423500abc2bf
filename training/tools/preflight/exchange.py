"""How ranks send their facts to rank 0 before the process group exists, through the key-value store where they meet.

    rank 0                                          another rank
    exchange = Exchange.served("preflight")         exchange = Exchange.reached("preflight", seconds)
    exchange.publish("look", {...})                 exchange.published("look")
    exchange.facts(own, world, seconds)  <--------  exchange.post({...})
    exchange.publish("verdict", {...})              exchange.published("verdict")

The exchange uses no collective call and no library but torch, so a rank with another version of a library can still
report that. Anybody who reaches the port of torch's store can write to the store, and the ranks have no shared key yet
(docs/security.md). So the store's content is not trusted: it is parsed and never executed, and wrong content can only
end the run with a message and exit code 2.
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

BETWEEN = 0.1  # seconds between looks, of each rank
ANSWER = 45.0  # seconds in which the store answers each of many ranks that ask at once
LINGER = 5.0  # seconds that rank 0 goes on serving the store for others to read its verdict
WORLD_INFO = "--world_info="  # a flag of DeepSpeed's launcher on each node


class Exchange:
    """One rank's side of the exchange: ranks post facts, and rank 0 publishes objects that all ranks read.

    store: torch's key-value store. name: the name of this exchange, part of its keys. Each start of the ranks has keys
    of its own, because torchrun keeps the store when it restarts the ranks.
    """

    def __init__(self, store, name: str, environment: Mapping[str, str]):
        self._store, self._name, self._environment = store, start_key(name, environment), environment

    @classmethod
    def served(cls, name: str, environment: Mapping[str, str] = os.environ) -> "Exchange":
        """Rank 0's side; raises UserError where another process listens at MASTER_PORT."""
        try:
            return cls(open_store(environment, serve=True, seconds=ANSWER), name, environment)
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"MASTER_PORT {environment['MASTER_PORT']} cannot be listened at ({str(error).splitlines()[0]}). Give "
                "another port (--master_port)."
            ) from None

    @classmethod
    def reached(cls, name: str, seconds: float, environment: Mapping[str, str] = os.environ) -> "Exchange":
        """Another rank's side; raises UserError where rank 0 does not serve it within so many seconds."""
        deadline, reason = time.monotonic() + seconds, "nobody listens there"
        while time.monotonic() < deadline:
            try:
                return cls(open_store(environment, seconds=ANSWER), name, environment)
            except (RuntimeError, OSError) as error:
                reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            time.sleep(0.2)
        raise UserError(f"no answer from rank 0 at {_place(environment)} within {seconds:.0f} s ({reason})")

    def post(self, own: dict) -> None:
        """Send the facts of this rank to rank 0; raises UserError if rank 0 has ended or cannot be reached."""
        self._ask(self._store.set, f"{self._name}/{self._environment['RANK']}", json.dumps(own))
        self._ask(self._store.add, f"{self._name}/posted", 1)

    def facts(self, own: dict, world: int, seconds: float, over: Callable[[], bool] = lambda: False) -> dict[int, dict]:
        """{rank: facts} of all ranks, rank 0 included (rank 0 calls this). If no further rank posts within `seconds`,
        or `over` returns True, ranks that have not posted are missing."""
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
        """Serve the store until so many ranks have read the object, at most LINGER seconds (rank 0 calls this before it
        ends)."""
        deadline = time.monotonic() + LINGER
        while self._store.add(f"{self._name}/heard {what}", 0) < ranks and time.monotonic() < deadline:
            time.sleep(BETWEEN)

    def _read(self, what: str) -> dict | None:
        """The object at a key; None if the key has no value, or a value that is no JSON object."""
        key = f"{self._name}/{what}"
        if not self._ask(self._store.check, [key]):
            return None
        try:
            found = parsed_json(self._ask(self._store.get, key))
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _ask(self, call: Callable, *words):
        """The store's answer to a call. If the host is cut off, torch waits for ever. So another thread makes the call,
        and this thread raises UserError after ANSWER seconds."""
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
    """What this rank posts: its host; its GPU if `thorough`; and, on a host's first rank, the facts of the node."""
    own: dict = {"host": socket.gethostname()}
    if thorough and on_gpu():
        own["gpu"] = asdict(own_gpu(distributed.local_rank()))
    if distributed.local_rank() == 0:
        own["facts"] = {row: asdict(fact) for row, fact in facts_of_node(args, thorough).items()}
    return own


def nodes_of(posted: Mapping[int, dict]) -> list[Node]:
    """The nodes whose facts were posted, in the order of their ranks. posted: facts by rank.

    Several nodes may have the same host name, for example containers. Their ranks are told apart by their order: the
    first rank of a node is followed by the node's other ranks.

    Raises: UserError for facts of another form, for example from another version of this program.
    """
    ranks: dict[int, list[int]] = {}  # of each node, by its first
    latest: dict[str, int] = {}  # first rank of a name
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
            if found := [Fact(**posted[rank]["gpu"]) for rank in own if "gpu" in posted[rank]]:  # the worst is shown
                facts["GPU memory"] = min(found, key=lambda gpu: (not gpu.problem, gpu.warning, gpu.amount or 0))
            nodes.append(Node(str(posted[first]["host"]), tuple(own), facts))
        return nodes
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"the facts that ranks have posted cannot be read ({type(error).__name__}: {error}). Another version of "
            "this program runs on a host, or another program writes where they meet (MASTER_PORT)."
        ) from None


def hosts_by_rank(world: int, lines: Iterable[list[str]] | None = None) -> dict[int, str]:
    """The host of each rank according to the launcher, to name the hosts of ranks that post nothing; "" if not known.

    lines: the command lines of the processes above this one; None to look them up.
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
    return found | tasks if len(tasks) == world else found  # of another launcher, which srun has started


def _command_lines_above() -> list[list[str]]:
    found = []
    for process in psutil.Process().parents():
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue
    return found
