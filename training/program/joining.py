"""A rank that fails before the process group stands, and the others, which wait there for all ranks to come.

They meet at a key-value store at MASTER_ADDR:MASTER_PORT, which rank 0 serves, or torchrun. Whoever cannot join says
why there, the watch threads of the others look for that every few seconds, and rank 0 prints it.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping

from engine import distributed
from training.program.environment import AGENTS_STORE
from training.program.roll_call import USER_ERROR

NAMES = ("failed", "printed", "heard")
LOOK_EVERY = 5.0  # seconds; with a connection of its own each time, which rank 0 need not hold for every rank
PATIENCE = 30.0  # seconds; the imports of others may take longer than this rank's
BETWEEN, LINGER = 0.2, 1.0  # seconds between looks of one who waits, and for which rank 0 then goes on serving
START = "TORCHELASTIC_RESTART_COUNT"  # torchrun keeps the store when it starts the ranks anew


class MeetingPoint:
    """Where the ranks meet, as this one sees it.

    environment: with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A process alone says and hears nothing.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._environment = environment
        start = environment.get(START, "0")
        self._failed, self._printed, self._heard = (f"four_engine_rlhf/{start}/{name}" for name in NAMES)
        self._next_look = time.monotonic() + LOOK_EVERY

    def failure(self) -> tuple[str, int] | None:
        """The message and the exit code of a rank that cannot join; None while none is known.

        It is to be printed by rank 0, which then calls `let_others_hear`.
        """
        if self._world == 1 or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY
        try:
            store = self._store()
            if not store.check([self._failed]):
                return None
            message, code = json.loads(store.get(self._failed))
            store.add(self._heard, 1)
        except (OSError, RuntimeError, ValueError, TypeError):  # nobody serves it now, or no rank has written that
            return None
        return str(message), code if code in (1, USER_ERROR) else 1

    def let_others_hear(self) -> None:
        """By rank 0, which may serve the store: say that the failure is printed, and wait until all have heard of it,
        but not for longer than they take for a look or two."""
        deadline = time.monotonic() + 2 * LOOK_EVERY
        with contextlib.suppress(OSError, RuntimeError):
            store = self._store()
            store.set(self._printed, "")
            while time.monotonic() < deadline and store.add(self._heard, 0) < self._world:
                time.sleep(BETWEEN)
            time.sleep(LINGER)

    def announce(self, message: str, code: int) -> bool:
        """Say why this rank does not come; returns whether rank 0 has printed a failure, so that this rank need not.

        Waits at most PATIENCE: for rank 0 to print a failure, or, on rank 0, for all others to hear of its own, which
        it has printed. What was said first stays.
        """
        store, said, deadline = None, False, time.monotonic() + PATIENCE
        while self._world > 1 and time.monotonic() < deadline:
            try:
                store = store or self._store(serve=self._serves)
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

    @property
    def _rank(self) -> int:
        return int(self._environment.get("RANK", 0))

    @property
    def _world(self) -> int:
        return int(self._environment.get("WORLD_SIZE", 1))

    @property
    def _serves(self) -> bool:
        return self._rank == 0 and self._environment.get(AGENTS_STORE) != "True"

    def _store(self, serve: bool = False):
        host, port = self._environment["MASTER_ADDR"], int(self._environment["MASTER_PORT"])
        if not serve:
            socket.create_connection((host, port), timeout=1.0).close()  # torch warns of each try that fails
        return distributed.key_value_store(host, port, serve)
