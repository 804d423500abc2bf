"""The HTTP server: its socket, its connections, and its end.

Before a request reaches the app, it passes a connection with time limits (`Connection`), and a gate that checks the
request's host, size and time (`Gate`).
"""

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import signal
import socket
import sys
import time
from typing import ClassVar
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import UserError
from training.tools.serve.app import make_app
from training.tools.serve.flags import ServeFlags
from training.tools.serve.service import Service, error_body, log_error

GONE = 499  # status in the log for an answer that its client did not read
NOT_FINISHED = 1  # exit code if accepted requests took longer than --drain_seconds
HELD = 8  # how many bodies of the largest size may be in memory at once
# After the answer to a body that is too large, the rest of the body is read and thrown away, up to so many seconds and
# bytes. If the connection were closed immediately, a client that sends the whole body before it reads would not get the
# answer.
LINGERING = 5.0
LINGERING_BYTES = 64 << 20


def listening_socket(host: str, port: int) -> socket.socket:
    """Make a socket with this address. It does not listen yet, because models are loaded first. Raises: UserError if
    the address is not available."""
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
    """Make a socket from `listening_socket` listen. Raises: UserError if another program has begun to listen at the
    address in the meantime."""
    try:
        found.listen(2048)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise _taken(found.getsockname()[1]) from None


def _taken(port: int) -> UserError:
    return UserError(f"--port {port}: another program listens there. Give another one, or 0 for a free one.")


def serve(service: Service, args: ServeFlags, listening: socket.socket) -> int:
    """Answer requests until TERM or Ctrl-C; returns the exit code."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # no warnings about clients that have disconnected
    server = Server(service, args)
    server.run(sockets=[listening])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    print("ended" if not server.lost else f"ended, {server.lost} requests unfinished", flush=True)
    return NOT_FINISHED if server.lost else 0


class Server(uvicorn.Server):
    """A uvicorn server that ends gracefully. After TERM or Ctrl-C, new requests are answered with 503, and accepted
    requests have --drain_seconds to finish. A second signal ends the server immediately.

    lost: number of accepted requests that did not finish.
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
        """Begin to end the server (called in the main thread). uvicorn's own method would raise the signal again at the
        end, and the exit code would be the signal's. Here the exit code shows whether requests were lost."""
        if self.gate.closing:
            self.should_exit = self.force_exit = True
        self.gate.closing = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether the server has to exit."""
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


class Connection(H11Protocol):
    """uvicorn's connection with two more time limits: one for the arrival of a request's head, and one for a client
    that does not read its answer. Without them, silent connections could use up --max_connections, and unread answers
    could fill the queue.

    seconds: the value of both limits; when it has passed, the connection is closed.
    """

    seconds: ClassVar[float] = 30.0

    @classmethod
    def with_patience(cls, seconds: float) -> type["Connection"]:
        """A subclass with this limit."""
        return type(cls.__name__, (cls,), {"seconds": seconds})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio: start the time limit of the first request's head."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: stop the time limits."""
        self._end("head")
        self._end("unread")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: stop or start the time limit of a head."""
        super().data_received(data)
        self._await_head()

    def pause_writing(self) -> None:
        """Called by asyncio when the client is far behind with reading: start the time limit of reading."""
        super().pause_writing()
        self._timers["unread"] = self.loop.call_later(self.seconds, self._unread)

    def resume_writing(self) -> None:
        """Called by asyncio when the client has caught up: stop the time limit of reading."""
        self._end("unread")
        super().resume_writing()

    def _await_head(self) -> None:
        """Stop the time limit for a head if the head has arrived; otherwise start it. Between an answer and the next
        request, uvicorn's own limit applies, which is shorter."""
        if self.conn.their_state is not h11.IDLE:
            self._end("head")
        elif "head" not in self._timers:
            self._timers["head"] = self.loop.call_later(self.seconds, self.transport.abort)

    def _unread(self) -> None:
        log_error("an answer", GONE, f"its client read nothing of it for {self.seconds:g} seconds")
        self.transport.abort()

    def _end(self, timer: str) -> None:
        if timer in self._timers:
            self._timers.pop(timer).cancel()


class Gate:
    """Refuses requests before the app sees them, and counts those that it lets through. It refuses with these statuses:

    413: the body is larger than `max_body`; if its length is announced, it is refused before it is read.
    408: the body did not arrive in time.
    503: the bodies of other requests take all the memory for bodies, or `closing` is set.
    400: the request gives its length in two ways, of which a proxy may have used the other one.
    421: the request is for another host name, although the service is for this machine only. Without this check, a web
        page whose host name is resolved to this machine (DNS rebinding) could read answers.

    open: number of requests that were let through and are not completely answered yet. held: size of their bodies
    together, in bytes.
    """

    def __init__(self, app: ASGIApp, max_body: int, body_seconds: float, is_local: bool = False):
        self.app, self.max_body, self.body_seconds, self.is_local = app, max_body, body_seconds, is_local
        self.open, self.held, self.closing = 0, 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by uvicorn for each request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.closing:
            await _refuse(scope, send, 503, "the service is ending; ask another one", {"retry-after": "5"})
            return
        headers = dict(scope["headers"])
        if b"content-length" in headers and b"transfer-encoding" in headers:
            await _refuse(scope, send, 400, "give Content-Length or Transfer-Encoding, not both")
            return
        host = headers.get(b"host", b"localhost").decode("latin-1")
        if self.is_local and not is_own_name(host):
            told = f"this service is for its own machine, and not for {host!r}. A proxy before it: send Host: localhost"
            await _refuse(scope, send, 421, told)
            return
        self.open += 1
        body = bytearray()
        try:
            if await self._arrived(body, scope, receive, send):
                await self._answered(bytes(body), scope, receive, send)
        finally:
            self.open -= 1
            self.held -= len(body)

    async def _answered(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the app answer the request. The app is cancelled if the client disconnects."""
        given = False

        async def received() -> Message:
            nonlocal given
            if given:
                await asyncio.Event().wait()  # forever: `until_gone` notices when the client disconnects
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        task, gone = asyncio.ensure_future(self.app(scope, received, send)), asyncio.ensure_future(until_gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()  # raises an exception of the app, which uvicorn logs
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    async def _arrived(self, body: bytearray, scope: Scope, receive: Receive, send: Send) -> bool:
        """Read the request's body into `body`; returns whether it has arrived completely. If not, the request has been
        refused, or the client has disconnected."""
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        too_large, no_room, more = announced.isdigit() and int(announced) > self.max_body, False, True
        try:
            async with asyncio.timeout(self.body_seconds):
                while more and not (too_large or no_room):
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    piece = message.get("body", b"")
                    body += piece
                    self.held += len(piece)
                    too_large, more = len(body) > self.max_body, message.get("more_body", False)
                    no_room = bool(piece) and self.held > HELD * self.max_body
        except TimeoutError:
            told = f"the body did not arrive within {self.body_seconds:g} seconds"
            await _refuse(scope, send, 408, told)
            return False
        if not (too_large or no_room):
            return True
        self.held -= len(body)
        body.clear()
        if too_large:
            told = f"the body is larger than {self.max_body:,} bytes, the limit here (--max_body_mb)"
            await _refuse(scope, send, 413, told, linger=receive)
        else:
            told = "there is no memory for the body beside those of other requests. Try again"
            await _refuse(scope, send, 503, told, {"retry-after": "1"}, linger=receive)
        return False


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine: localhost, or an IP address, which is no name of a web page."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


async def _refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    linger: Receive | None = None,
) -> None:
    """Answer without the app, and close the connection. linger: function that receives the rest of a body. The rest is
    thrown away after the answer, for up to LINGERING seconds and up to LINGERING_BYTES bytes."""
    log_error(f"{scope['method']} {scope['path']}", status, message)
    content = json.dumps(error_body(message)).encode()
    named = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
    pairs = [(name.encode(), value.encode()) for name, value in (named | (headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    if linger is not None:
        left = LINGERING_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGERING):
                while left > 0:
                    piece = await linger()
                    left -= len(piece.get("body", b""))
                    if piece["type"] == "http.disconnect" or not piece.get("more_body", False):
                        break
    await send({"type": "http.response.body", "body": b"", "more_body": False})
