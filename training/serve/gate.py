"""What stands before the app: how large a body may be, how long it may take, and whether new requests are taken."""

import asyncio
import contextlib
import ipaddress
import json
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from training.serve.errors import error_body, say

HELD = 8  # bodies of the largest size that may be there at once
LINGERING = 5.0  # seconds, and bytes, of a body that is too large and thrown away after the answer: a client that
LINGERING_BYTES = 64 << 20  # writes all before it reads would lose the answer if its connection were closed at once


class Gate:
    """Refuses requests before the app sees them, and knows how many it has let in.

    A body over the limit is answered 413, by its announced length before any of it is read; one that does not arrive in
    time 408; one for which others leave no room 503, and so is any request once `closing` is set. One whose length is
    told in two ways, of which a proxy may have taken the other, is answered 400. Where the service is for this machine
    alone, a request for another host is answered 421: a page whose own name leads to this machine (DNS rebinding) could
    read the answers.

    open: requests that were let in and are not answered whole. held: bytes of their bodies.
    """

    def __init__(self, app: ASGIApp, max_body: int, body_seconds: float, is_local: bool = False):
        self.app, self.max_body, self.body_seconds, self.is_local = app, max_body, body_seconds, is_local
        self.open, self.held, self.closing = 0, 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
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
                await self.app(scope, _Given(bytes(body), receive), send)
        finally:
            self.open -= 1
            self.held -= len(body)

    async def _arrived(self, body: bytearray, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the whole body has come, into `body`; otherwise the request has been answered, or its client has
        gone."""
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
            told = f"the body is larger than the {self.max_body:,} bytes that are taken here (--max_body_mb)"
            await _refuse(scope, send, 413, told, linger=receive)
        else:
            told = "the bodies of other requests leave no room for this one's. Try again"
            await _refuse(scope, send, 503, told, {"retry-after": "1"}, linger=receive)
        return False


def is_own_name(host: str) -> bool:
    """Whether a Host header may be that of a request to this machine: localhost, or an address, which no page's name
    is."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class _Given:
    """A body that is there already, and then what else comes: that the client has gone."""

    def __init__(self, body: bytes, receive: Receive):
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _refuse(
    scope: Scope,
    send: Send,
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
    linger: Receive | None = None,
) -> None:
    """Answer without the app, and close the connection; linger: throw away what still comes, for a while."""
    say(f"{scope['method']} {scope['path']}", status, message)
    content = json.dumps(error_body(status, message)).encode()
    named = {"content-type": "application/json", "content-length": str(len(content)), "connection": "close"}
    pairs = [(name.encode(), value.encode()) for name, value in (named | (headers or {})).items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    if linger is not None:
        await _thrown_away(linger)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _thrown_away(receive: Receive) -> None:
    left = LINGERING_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGERING):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
