"""The HTTP server: connections and their limits, and the answers.

PUT /               each model's response to a prompt or a chat, with its score; complete or streamed
GET /               the web page, which sends PUT /
POST /v1/scores     scores, for a run's --reward_url
GET /health         which models there are

Each connection has a thread and one request. One lock lets a single request use the models at a time, so that memory is
needed for one request only. Nothing waits for a client while the lock is held.
"""

import contextlib
import io
import ipaddress
import json
import re
import secrets
import select
import socket
import socketserver
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from engine.errors import UserError
from engine.files import rust_panics
from training.reporting.sample_tables import visible
from training.tools.pages.page import sha256
from training.tools.serve.flags import ServeFlags
from training.tools.serve.models import Response, ServedModels, check_length
from training.tools.serve.requests import (
    Comparison,
    RequestError,
    read_comparison,
    read_items,
    read_object,
)

PAGE = Path(__file__).with_name("page.html")
CONNECTIONS = 128  # largest number of connections at once
# Seconds in which a request has to arrive, and again seconds in which a client has to read its answer.
SECONDS = 30.0
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for the bytes of an incomplete character


class Gone(Exception):
    """Raised if the client has closed its connection."""


class Server(socketserver.ThreadingTCPServer):
    """Listens from the start, and answers in `serve`. Connections that come before that wait.

    computing: the lock that a request holds while it uses the models. parsing: the lock that a request holds while its
    body is parsed: a body's objects may take 30 times its memory.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, args: ServeFlags, seconds: float = SECONDS, connections: int = CONNECTIONS):
        self.args, self.seconds = args, seconds
        self.max_body = int(args.max_body_mb * 1e6)
        self.computing = threading.Lock()
        self.parsing = threading.Lock()
        self.free = threading.Semaphore(connections)
        try:
            found = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)
            self.address_family, address = found[0][0], found[0][4]
            super().__init__(address, Handler)
        except OSError as error:
            where = f"--host {args.host} --port {args.port}"
            raise UserError(
                f"{where}: {error.strerror or error}. Give another one, or port 0 for a free one."
            ) from None

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = self.server_address[:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"

    def serve(self, models: ServedModels) -> None:
        """Answer requests until `shutdown`, or an exception such as KeyboardInterrupt."""
        self.models = models
        self.serve_forever(poll_interval=0.1)

    def process_request(self, request, client_address) -> None:
        """Called by socketserver for each connection: start its thread, or refuse it."""
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\ntoo many connections\n")
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        """Called by socketserver in the connection's thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request, client_address) -> None:
        """Called by socketserver: print the error, unless the client has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc(file=sys.stderr)


class InTime(io.RawIOBase):
    """Reads from a connection. From `seconds` after the beginning on, it raises TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float):
        self.connection, self.end = connection, time.monotonic() + seconds

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer) -> int:
        """Read what has arrived; wait if nothing has."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class Handler(BaseHTTPRequestHandler):
    """Answers the request of one connection."""

    server: Server

    def setup(self) -> None:
        """Called by socketserver: open the connection's files."""
        super().setup()
        self.rfile = io.BufferedReader(InTime(self.connection, self.server.seconds))
        self.unsent = bytearray()
        self.is_stream = False

    def respond(self) -> None:
        """Answer the request, whatever happens."""
        try:
            self._check_host()
            self._route()()
        except UserError as error:  # a tokenizer or a chat template may raise it, too
            self._refuse(error if isinstance(error, RequestError) else RequestError(400, str(error)))
        except (Gone, OSError):
            pass
        except Exception:  # no error may end the service
            traceback.print_exc(file=sys.stderr)
            self._refuse(RequestError(500, "the service failed; its own log says where"))

    do_GET = do_PUT = do_POST = respond  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by http.server: answer a request that it cannot read."""
        with contextlib.suppress(OSError):
            self._refuse(RequestError(code, message or "the request cannot be read"))

    def log_message(self, format: str, *args) -> None:
        """Called by http.server for what is no mistake of a client: nothing is printed."""

    def _check_host(self) -> None:
        """Raise RequestError if the request is for another host although the service is for this machine only. Without
        this check, a web page whose host name is resolved to this machine could read answers (DNS rebinding)."""
        host = self.headers.get("Host", "localhost")
        if self.server.args.is_local and not is_own_name(host):
            told = f"this service is for its own machine, and not for {host!r}. A proxy before it: send Host: localhost"
            raise RequestError(421, told)

    def _route(self):
        routes = {
            "/": {"GET": self._page, "PUT": self._compare},
            "/v1/scores": {"POST": self._scores},
            "/health": {"GET": self._health},
            "/v1/health": {"GET": self._health},  # a run with --reward_url looks for it beside /v1/scores
        }
        path = self.path.partition("?")[0]
        if path not in routes:
            raise RequestError(404, f"there is no {path[:200]} here")
        if self.command not in routes[path]:
            raise RequestError(405, f"{path} has no {self.command}")
        return routes[path][self.command]

    # Requests

    def _page(self) -> None:
        """Send the page. Its content security policy allows only its own script, its own style and requests to this
        service."""
        page = PAGE.read_text(encoding="utf-8")
        script, style = (
            " ".join(map(sha256, re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))) for tag in ("script", "style")
        )
        headers = {
            "Content-Security-Policy": f"default-src 'none'; script-src {script}; style-src {style}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
        }
        self._send(200, page.encode(), "text/html; charset=utf-8", headers)

    def _health(self) -> None:
        models = self.server.models
        state = {
            "status": "ok",
            "models": list(models.by_name),
            "chat_models": [name for name, model in models.by_name.items() if model.has_template],
            "reward_model": models.scorer is not None,
        }
        self._send_json(200, state)

    def _compare(self) -> None:
        body = self._body()
        with self.server.parsing:
            asked = read_comparison(read_object(body))
        # 53 bits fit into a number of JavaScript, so the page can send the seed back.
        seed = secrets.randbits(53) if asked.seed is None else asked.seed
        answers = {}
        with self._turn():
            for event in self._events(asked, seed):
                if asked.stream:
                    self._stream(event)
                elif "response" in event:
                    answers[event.pop("model")] = event
        if asked.stream:
            self._stream(None)
            self._flush()
        else:
            given = {"prompt": asked.prompt} if asked.messages is None else {"messages": asked.messages}
            self._send_json(200, {**given, "seed": seed, "models": answers})

    def _events(self, asked: Comparison, seed: int) -> Iterator[dict]:
        """Draw each model's response, one token of each model in turn. Yields the seed, then pieces of the models'
        texts; when a response has ended, the whole response with its score. Raises: RequestError; Gone."""
        served = self.server.models
        if not served.by_name:
            raise RequestError(404, "this service has no models that answer; it was started with a reward model alone")
        drawing: dict[str, Iterator[Response]] = {}
        for name in asked.models or served.by_name:
            if name not in served.by_name:
                raise RequestError(
                    404, f"there is no model {name!r} here. There is: {', '.join(served.by_name)}", "models"
                )
            model = served.by_name[name]
            ids = model.prompt_ids(asked, served.context)
            if served.scorer is not None:
                served.scorer.check_prompt(model, asked)
            most = self.server.args.max_answer_seq_len
            sampling = asked.sampling(seed, len(ids), served.context, most, **model.settings())
            drawing[name] = model.drawn(ids, sampling)
        yield {"seed": seed}
        said = dict.fromkeys(drawing, 0)
        while drawing:
            for name in list(drawing):
                self._check_there()
                response = next(drawing[name])
                if not response.text.endswith(UNFINISHED) and len(response.text) > said[name]:
                    yield {"model": name, "text": response.text[said[name] :]}
                    said[name] = len(response.text)
                if response.reason is not None:
                    del drawing[name]
                    score = None
                    if served.scorer is not None:
                        ids = served.scorer.response_ids(served.by_name[name], asked, response)
                        (score,) = served.scorer.scores([ids], self._check_there)
                    yield {
                        "model": name,
                        "response": response.text,
                        "score": score,
                        "tokens": len(response.tokens),
                        "finish_reason": response.reason,
                    }

    def _scores(self) -> None:
        body = self._body()
        with self.server.parsing:
            items = read_items(read_object(body))
        scorer = self.server.models.scorer
        if scorer is None:
            raise RequestError(404, "this service has no reward model; start it with --reward_model_name_or_path")
        limit = scorer.reader.limit
        with self._turn():
            sequences = []
            for place, item in enumerate(items):
                check_length(item["prompt"] + item["response"], limit, f"items[{place}]")
                ids = scorer.item_ids(item, f"items[{place}]")
                if not 0 < len(ids) <= limit:
                    told = f"items[{place}] has {len(ids)} tokens; it may have 1 to {limit}"
                    raise RequestError(400, told, "items")
                sequences.append(ids)
            found = scorer.scores(sequences, self._check_there)
        scores = [{"id": item["id"], "score": score} for item, score in zip(items, found, strict=True)]
        self._send_json(200, {"scores": scores})

    # The connection

    def _body(self) -> bytes:
        """Read the body. Raises: RequestError; Gone.

        Its content type must be JSON: a browser lets web pages of any origin send bodies of some other types.
        """
        if not self.headers.get_content_type().endswith("json"):
            raise RequestError(400, "send a JSON object, with Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,12}", length):
            raise RequestError(411, "give Content-Length, the number of bytes of the body")
        if int(length) > self.server.max_body:
            told = f"the body is larger than {self.server.max_body:,} bytes, the limit here (--max_body_mb)"
            raise RequestError(413, told)
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise RequestError(408, f"the body did not arrive within {self.server.seconds:g} seconds") from None
        if len(body) < int(length):
            raise Gone
        return body

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Within this block no other request uses the models. Raises: Gone if the client has left while it waited."""
        with self.server.computing, rust_panics():
            self._check_there()
            yield

    def _check_there(self) -> None:
        """Raise Gone if the client has closed its connection."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        if poll.poll(0):
            raise Gone

    def _stream(self, event: dict | None) -> None:
        """Send a server-sent event; None for the last one. What the client does not take now is sent later."""
        if not self.is_stream:
            self.is_stream = True
            self._send_head(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
            self.connection.setblocking(False)
        data = "[DONE]" if event is None else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        self.unsent += f"data: {data}\n\n".encode()
        with contextlib.suppress(BlockingIOError):
            del self.unsent[: self.connection.send(self.unsent)]

    def _flush(self) -> None:
        """Send the rest of a stream. Raises: OSError if the client does not read it in time."""
        self.connection.settimeout(self.server.seconds)
        self.connection.sendall(self.unsent)

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.connection.settimeout(self.server.seconds)
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self._send_head(status, {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _send_json(self, status: int, found: dict) -> None:
        self._send(status, json.dumps(found, ensure_ascii=False).encode(), "application/json")

    def _refuse(self, error: RequestError) -> None:
        """Answer with an error, and print a line. What the client still sends is thrown away until its time is over: if
        the connection were closed at once, a client that sends its whole body before it reads would not get the
        answer."""
        # Messages are cut, since they may repeat what the client has sent.
        told = {"error": {"message": str(error)[:2000], "param": error.param and error.param[:200]}}
        print(
            f"{error.status} {visible(self.requestline[:200])}: {visible(str(error)[:500])}",
            file=sys.stderr,
            flush=True,
        )
        with contextlib.suppress(OSError):
            if self.is_stream:
                self._stream(told)
                self._flush()
                return
            self._send_json(error.status, told)
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(65536):
                pass


def is_own_name(host: str) -> bool:
    """Whether a Host header names this machine: localhost, or an IP address, which is not a name of a web page."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or name.endswith(".localhost") or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
