"""A client's connection: how long it may be without a request, and how long a client may leave an answer unread."""

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from training.serve.errors import GONE, say


class Connection(H11Protocol):
    """uvicorn's, which waits for both without end: connections that say nothing would take all places, and answers that
    nobody reads the room of others' responses.

    seconds: for each of the two; beyond, the connection is broken off.
    """

    seconds: ClassVar[float] = 30.0

    @classmethod
    def with_patience(cls, seconds: float) -> type["Connection"]:
        """The class with so many seconds."""
        return type(cls.__name__, (cls,), {"seconds": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """As asyncio has it."""
        self._head: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio has it."""
        self._head, self._reading = _ended(self._head), _ended(self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio has it."""
        super().data_received(data)
        self._await_head()

    def pause_writing(self) -> None:
        """Called once the client is far behind with reading."""
        super().pause_writing()
        self._reading = self.loop.call_later(self.seconds, self._unread)

    def resume_writing(self) -> None:
        """Called once it has caught up."""
        self._reading = _ended(self._reading)
        super().resume_writing()

    def _await_head(self) -> None:
        """After an answer uvicorn's own, shorter time runs until the next request begins."""
        if self.conn.their_state is not h11.IDLE:
            self._head = _ended(self._head)
        elif self._head is None:
            self._head = self.loop.call_later(self.seconds, self.transport.abort)

    def _unread(self) -> None:
        say("an answer", GONE, f"its client read nothing of it for {self.seconds:g} seconds")
        self.transport.abort()


def _ended(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
