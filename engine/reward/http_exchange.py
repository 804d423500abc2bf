"""One HTTP request and its answer, by the standard library; what went wrong is told apart by whether to ask again.

    body = exchange("http://10.0.0.7:8000/score", b'{"items": [...]}', timeout=180, most_bytes=1 << 20)

Proxies are taken from the environment as urllib does, never for addresses of this machine.
"""

import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, urlsplit

from engine.errors import shortened

PIECE = 1 << 16  # bytes read at once
SHOWN = 300  # bytes of an error's body


class Fault(Exception):
    """What may be over when the server is asked again: it is away, too slow, or says that it is busy or broken.

    retry_after: seconds after which the server asks to be asked again, if it says so.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class Mistake(Exception):
    """What asking again does not help: the server refuses the request, or its answer is none."""


def exchange(url: str, body: bytes | None, timeout: float, most_bytes: int) -> tuple[bytes, bool]:
    """GET, or POST of JSON where there is a body; returns the answer's body, and whether it is known to be whole: that
    of an answer without a length ends where the connection does, however that came.

    timeout: seconds until there is a connection and all of the answer's head, and then until the answer ends.
    most_bytes: of the answer. Raises: Fault, Mistake.
    """
    headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(url, data=body, headers=headers)
    with _sorted_by_remedy(url, timeout), _opened(url, request, timeout) as answer:
        if answer.status != 200 and body is not None:
            raise Mistake(f"answered {answer.status} {_plain(answer.reason)} without scores")
        found = _read(answer, time.monotonic() + timeout, most_bytes)
        whole = answer.headers.get("Content-Length") is not None or answer.headers.get("Transfer-Encoding") is not None
        return found, whole


def is_this_machine(url: str) -> bool:
    """Whether the URL's host is an address of this machine itself."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds, of a Retry-After header (RFC 9110, 10.2.3: seconds or a date); None where it says nothing."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, OverflowError):  # the latter of years and offsets beyond all calendars
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would turn a POST that is sent elsewhere into a GET."""

    def redirect_request(self, *args, **kwargs) -> None:
        return None


class _Breakable(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections, and breaks them off where the answer's head is late: urllib bounds each wait for bytes alone,
    and a server, or a proxy before it, may send some for ever (RFC 9110, 15.2: any number of 1xx answers)."""

    def __init__(self):
        super().__init__()
        self.late, self._made = False, list[http.client.HTTPConnection]()

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._maker(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._maker(http.client.HTTPSConnection), request)

    def _maker(self, kind: type[http.client.HTTPConnection]) -> Callable[..., http.client.HTTPConnection]:
        """Of connections of this kind, as urllib calls it."""

        def make(*args, **kwargs) -> http.client.HTTPConnection:
            self._made.append(kind(*args, **kwargs))
            return self._made[-1]

        return make

    def break_off(self) -> None:
        """Have whoever waits for their bytes wait no longer."""
        self.late = True
        for connection in self._made:
            with contextlib.suppress(OSError, AttributeError):  # not connected yet, or not any more
                connection.sock.shutdown(socket.SHUT_RDWR)


def _opened(url: str, request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """The answer, with its whole head. Raises: TimeoutError where that does not come in time, as urllib otherwise."""
    proxies = urllib.request.ProxyHandler({} if is_this_machine(url) else None)
    connections = _Breakable()
    opener = urllib.request.build_opener(proxies, _NoRedirects, connections)
    alarm = threading.Timer(timeout, connections.break_off)
    alarm.daemon = True
    alarm.start()
    try:
        answer = opener.open(request, timeout=timeout)
    except (OSError, http.client.HTTPException):
        if connections.late:
            raise TimeoutError from None
        raise
    finally:
        alarm.cancel()
    if connections.late:  # a head that breaks off between two lines is taken for a whole one
        answer.close()
        raise TimeoutError
    return answer


def _read(answer: http.client.HTTPResponse, deadline: float, most_bytes: int) -> bytes:
    pieces, size = [], 0
    while piece := answer.read1(PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > most_bytes:
            raise Mistake(f"answered more than {most_bytes} bytes, which begin {shortened(pieces[0][:80])}")
        if time.monotonic() > deadline:
            raise TimeoutError
    if answer.length:  # read1 ends without a word where the connection does
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(pieces)


@contextlib.contextmanager
def _sorted_by_remedy(url: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        with error:
            raise _of_status(error) from None
    except urllib.error.URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else OSError(error.reason)
        raise _of_connection(reason, timeout) from None
    except (OSError, http.client.HTTPException) as error:
        raise _of_connection(error, timeout) from None
    except UnicodeError as error:
        raise Mistake(f"has a host that can be none ({error})") from None


def _of_status(error: urllib.error.HTTPError) -> Fault | Mistake:
    body = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        body = error.read(SHOWN)
    query = urlsplit(error.url).query  # it may hold a key, and be said again
    secrets = [query, *(value for _, value in parse_qsl(query) if len(value) > 3)]
    hidden = re.compile("|".join(re.escape(secret) for secret in secrets if secret) or "(?!)")
    told, reason, elsewhere = (
        hidden.sub("...", text)
        for text in (body.decode(errors="replace"), _plain(error.reason), _plain(error.headers.get("Location")))
    )
    said = f"answered {error.code} {reason}" + (f" {shortened(told)}" if told else "")
    if error.code == 429 or error.code >= 500:
        return Fault(said, retry_after(error.headers.get("Retry-After"), datetime.now(UTC)))
    if 300 <= error.code < 400:
        return Mistake(f"{said}, and would have it asked at {elsewhere}: give that URL")
    return Mistake(said)


def _of_connection(error: OSError | http.client.HTTPException, timeout: float) -> Fault | Mistake:
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return Mistake(f"cannot be spoken to by TLS ({error})")
    if isinstance(error, TimeoutError):
        return Fault(f"did not answer within {timeout:g} s")
    if isinstance(error, socket.gaierror):
        return Fault(f"has a host that is not known ({error.strerror})")
    return Fault(f"cannot be reached, or broke off ({type(error).__name__}: {_plain(error)})")


def _plain(text: object) -> str:
    """What a server has written into a status line or header, without what a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in str(text)).strip()
