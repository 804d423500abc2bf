"""Lets all ranks end with the same error and exit code, also before the process group exists.

Ranks meet at a key-value store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun serves. A rank that cannot join the
process group writes the reason into the store. The watch threads of the other ranks look for such reasons every few
seconds, and rank 0 prints them. Once the process group exists, all ranks raise an error that one of them finds
(`checked`, `agreed`).
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from engine import distributed
from engine.errors import SharedError, UserError
from training.runtime.environment import AGENTS_STORE, USER_ERROR, from_here

LOOK_EVERY = 5.0  # seconds between looks; each opens a new connection, so that rank 0 need not hold one for each rank
PATIENCE = 30.0  # seconds for which a rank tries to reach rank 0; rank 0's imports may take longer than this rank's
BETWEEN, LINGER = 0.2, 1.0  # seconds between looks while waiting, and seconds for which rank 0 then goes on serving


def first_of(messages: Sequence[str | None], hosts: Sequence[str]) -> str | None:
    """The first message that is not None; None if there is no message. If only some hosts have it, their names are put
    before it.

    messages, hosts: one for each rank.
    """
    first = next((message for message in messages if message is not None), None)
    if first is None:
        return None
    having = list(dict.fromkeys(host for host, message in zip(hosts, messages, strict=True) if message == first))
    return first if len(having) == len(set(hosts)) else f"on {', '.join(having)}: {first}"


def start_key(name: str, environment: Mapping[str, str]) -> str:
    """The key `name`, made unique to this start of the ranks, since torchrun keeps the store when it restarts them."""
    return f"four_engine_rlhf/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}/{name}"


def open_store(environment: Mapping[str, str], serve: bool = False):
    """Open torch's store at which the ranks meet. serve: True for rank 0, which serves the store unless torchrun does.

    Raises: OSError or RuntimeError if nobody serves the store; RuntimeError if this process cannot serve it.
    """
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    serve = serve and environment.get(AGENTS_STORE) != "True"
    if not serve:
        socket.create_connection((host, port), timeout=1.0).close()  # torch warns of each try that fails
    return distributed.key_value_store(host, port, serve)


class MeetingPoint:
    """Gives this rank access to the store at which the ranks meet.

    environment: variables with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. If WORLD_SIZE is 1, the store is not
    used.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._environment = environment
        self._rank, self._world = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
        self._failed, self._printed, self._heard = (
            start_key(name, environment) for name in ("failed", "printed", "heard")
        )
        self._next_look = time.monotonic() + LOOK_EVERY

    def failure(self) -> tuple[str, int] | None:
        """(message, exit code) of a rank that cannot join; None if no such rank is known.

        Rank 0 prints the message, and then calls `let_others_hear`.
        """
        if self._world == 1 or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY
        try:
            store = open_store(self._environment)
            if not store.check([self._failed]):
                return None
            message, code = json.loads(store.get(self._failed))
            store.add(self._heard, 1)
        except (OSError, RuntimeError, ValueError, TypeError):  # nobody serves the store, or no rank wrote the value
            return None
        return str(message), code if code in (1, USER_ERROR) else 1

    def let_others_hear(self) -> None:
        """Called by rank 0, which may serve the store. Notes in the store that the failure was printed. Then waits
        until all ranks have read this, at most a few seconds."""
        deadline = time.monotonic() + 2 * LOOK_EVERY
        with contextlib.suppress(OSError, RuntimeError):
            store = open_store(self._environment)
            store.set(self._printed, "")
            while time.monotonic() < deadline and store.add(self._heard, 0) < self._world:
                time.sleep(BETWEEN)
            time.sleep(LINGER)

    def announce(self, message: str, code: int) -> bool:
        """Write into the store why this rank cannot join. Returns whether rank 0 has printed a failure; if not, this
        rank has to print its own.

        Tries for PATIENCE to have rank 0 print a failure. Rank 0 prints its own failure before it calls this, and
        then waits here until the other ranks have read it. A failure that is already in the store is not replaced.
        """
        store = None
        said = False
        deadline = time.monotonic() + PATIENCE
        while self._world > 1 and time.monotonic() < deadline:
            try:
                store = store or open_store(self._environment, serve=self._rank == 0)
                if not said:
                    if not store.check([self._failed]):
                        store.set(self._failed, json.dumps([message, code]))
                    if self._rank == 0:
                        store.set(self._printed, "")
                    store.add(self._heard, 1)
                    said = True
                if self._rank != 0 and store.check([self._printed]):
                    return True
                if self._rank == 0 and store.add(self._heard, 0) >= self._world:
                    time.sleep(LINGER)
                    return True
            except (OSError, RuntimeError):
                store = None
            time.sleep(BETWEEN)
        return False


Result = TypeVar("Result")


def checked(check: Callable[[], Result]) -> Result:
    """The result of rank 0's `check()`, on all ranks (all ranks call this). If it raises UserError, all ranks raise it.

    Used for checks that read files: one process reads them, and the others wait for its result. If there are several
    hosts, the message names the host.
    """
    result = message = None
    if distributed.is_main():
        try:
            result = check()
        except UserError as error:
            message = from_here(str(error))
    message, result = distributed.broadcast_object((message, result))
    if message is not None:
        raise SharedError(message)
    return result


def agreed(load: Callable[[], Result]) -> Result:
    """The result of this rank's own `load()` (all ranks call this). If it raises UserError on any rank, all ranks raise
    the first one.

    Used for data that every rank reads: if one node lacks a file, all ranks end with the message and the node's name.
    One rank of each node loads first. The node's other ranks wait for it without a time limit, and then use the rows
    that it found and the tables that it put into the cache. If a rank dies meanwhile, the run ends (heartbeats.py).
    """
    from training.data.token_cache import (
        recorded,
        repeated,
    )  # imported late: a host that lacks packages must be able to say so

    host, result = socket.gethostname(), None
    found: dict = {}
    for turn in (True, False):
        message = noted = None
        if (distributed.local_rank() == 0) == turn:
            try:
                if turn:
                    with recorded() as noted:
                        result = load()
                else:
                    result = repeated(load, found.get(host))
            except UserError as error:
                message = str(error)
        messages, hosts = zip(*distributed.all_gather_objects((message, host)), strict=True)
        first = first_of(messages, hosts)
        if first is not None:
            raise SharedError(first)
        if turn:
            found = {name: one for one, name in distributed.all_gather_objects((noted, host)) if one is not None}
    return result
