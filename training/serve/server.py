"""The service from its first connection to its last."""

import asyncio
import errno
import logging
import signal
import socket
import sys
import time

import uvicorn

from engine.errors import UserError
from training.serve.app import make_app
from training.serve.connection import Connection
from training.serve.flags import ServeFlags
from training.serve.gate import Gate
from training.serve.service import Service

NOT_FINISHED = 1  # exit code, where requests that were accepted took longer than --drain_seconds


class Server(uvicorn.Server):
    """A uvicorn server that ends in good order: at TERM or Ctrl-C new requests get 503, those that were accepted are
    finished, for --drain_seconds at most; a second signal ends it at once.

    lost: how many were not finished.
    """

    def __init__(self, service: Service, args: ServeFlags):
        self.service, self.drain_seconds = service, args.drain_seconds
        self.gate = Gate(make_app(service), int(args.max_body_mb * 1e6), args.body_seconds, args.is_local)
        self.lost = 0
        self._draining: asyncio.Task | None = None
        config = uvicorn.Config(
            self.gate,
            host=args.host,
            port=args.port,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=args.max_connections + 1,
            timeout_graceful_shutdown=5,
            lifespan="on",
            ws="none",
            http=Connection.with_patience(args.body_seconds),
            loop="asyncio",
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame) -> None:
        """Begin to end; called in the main thread. The signal is not raised again, as uvicorn's own server would, so
        that the exit code says how it ended."""
        if self.gate.closing:
            self.should_exit = self.force_exit = True
        self.gate.closing = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether all is done."""
        if self.gate.closing and self._draining is None:
            print(f"ends: {self.gate.open} requests are under way, new ones get 503", flush=True)
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        end = time.monotonic() + self.drain_seconds
        while self.gate.open and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.lost = self.gate.open
        if self.lost:
            print(
                f"not finished within --drain_seconds {self.drain_seconds:g}: {self.lost}", file=sys.stderr, flush=True
            )
            self.service.abort()
        self.should_exit = True


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket of this address, which does not listen before the models are there. Raises: UserError where it cannot be
    had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(port) from None
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}. Give another one.") from None
    return found


def begin_to_listen(found: socket.socket) -> None:
    """Have a socket of `listening_socket` listen. Raises: UserError where another program was faster, which may have
    had its own socket of the address by then."""
    try:
        found.listen(2048)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(found.getsockname()[1]) from None


def _taken(port: int) -> UserError:
    return UserError(f"--port {port}: another program listens there. Give another one, or 0 for a free one.")


def serve(service: Service, args: ServeFlags, listening: socket.socket) -> int:
    """Answer until TERM or Ctrl-C; returns the exit code."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each write to a client that has gone
    server = Server(service, args)
    server.run(sockets=[listening])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("ended" if not server.lost else f"ended, {server.lost} requests unfinished", flush=True)
    return NOT_FINISHED if server.lost else 0
