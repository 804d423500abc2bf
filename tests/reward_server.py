"""A reward server that behaves as it is told to, in a thread of a test or in a process of its own, which may die in the
middle of a run and be started again.

    with serving({2: "500"}) as server:             # its second request is answered 500, all others as they should be
        Servers([server.url], "items", ...)

    python -m tests.reward_server PORT '{"5": "die"}'     # says "ready" when it listens

It scores the words of a response, w20 as 20: their mean, and -1 without any.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from scripts.harness import ROOT, free_port

HUGE = 200 << 20  # bytes
BAD_SCORES = {"nan": float("nan"), "infinite": float("inf"), "text": "1.0", "truth": True, "null": None}


def score(response: str) -> float:
    """What it says of a response."""
    words = [int(word) for word in re.findall(r"w(\d\d)", response)]
    return sum(words) / len(words) if words else -1.0


class Server:
    """behaviours: what becomes of a POST, by its number from 1: "slow SECONDS", "reversed", "short", "double",
    "unknown", one of BAD_SCORES, "not json", "cut", "huge", "busy SECONDS", "redirect", "die" (the whole process), or a
    status. 0 is said of all that are not named. asked: what it was sent. health: what GET of /health is answered.
    """

    def __init__(self, behaviours: Mapping[int, str] | None = None, port: int = 0):
        self.behaviours, self.asked, self.health = dict(behaviours or {}), [], 200
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_error(server.health if self.path == "/health" else 404)

            def do_POST(self):
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.asked.append(given)
                    number = len(server.asked)
                with contextlib.suppress(ConnectionError):
                    server.behave(self, given, server.behaviours.get(number, server.behaviours.get(0, "well")))

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"

    def behave(self, handler: BaseHTTPRequestHandler, given: dict, behaviour: str) -> None:
        """Answer a request so."""
        what, _, number = behaviour.partition(" ")
        if what == "die":
            os._exit(9)
        if what == "slow":
            time.sleep(float(number))
        headers = {"busy": {"Retry-After": number}, "redirect": {"Location": "/elsewhere"}}.get(what, {})
        status = {"busy": 429, "redirect": 302}.get(what, int(what) if what.isdecimal() else 200)
        body = json.dumps(answer(given, behaviour)).encode()
        body = {"not json": b"<html>", "cut": body[: len(body) // 2]}.get(behaviour, body)
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        if what not in ("huge", "cut"):
            handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body if what != "huge" else b"[" * HUGE)


def answer(given: dict, behaviour: str) -> dict:
    """The answer's JSON to a request of either form, or to one of docs/extending.md."""
    if "responses" in given:
        return {"scores": [score(text) for text in given["responses"]]}
    if "query" in given:
        rewards = [score(query[len(prompt) :]) for query, prompt in zip(given["query"], given["prompts"], strict=True)]
        rewards = rewards[:-1] if behaviour == "short" else rewards
        rewards[0] = BAD_SCORES.get(behaviour, rewards[0]) if rewards else None
        return {"rewards": rewards, "scores": [0.0] * len(rewards), "extra_logs": {}}
    scores = [{"id": item["id"], "score": score(item["response"])} for item in given["items"]]
    if behaviour in BAD_SCORES:
        scores[0]["score"] = BAD_SCORES[behaviour]
    if behaviour == "unknown":
        scores[0]["id"] = "another"
    changed = {"reversed": scores[::-1], "short": scores[:-1], "double": [*scores, scores[0]]}
    return {"scores": changed.get(behaviour, scores)}


@contextlib.contextmanager
def serving(behaviours: Mapping[int, str] | None = None, port: int = 0) -> Iterator[Server]:
    """A server that answers within this context."""
    server = Server(behaviours, port)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()


class ServerProcess:
    """url: where it is asked. deaths: exit codes of the processes that have ended by themselves."""

    def __init__(self, behaviours: Mapping[int, str], comes_back: bool):
        self.port, self.comes_back, self.deaths = free_port(), comes_back, []
        self.url = f"http://127.0.0.1:{self.port}/score"
        self._closed = False
        self._process = self._started(behaviours)
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def _started(self, behaviours: Mapping[int, str]) -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.reward_server", str(self.port), json.dumps(dict(behaviours))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    def _look(self) -> None:
        code = self._process.wait()
        if not self._closed:
            self.deaths.append(code)
            if self.comes_back:
                self._process = self._started({})

    def close(self) -> None:
        """End it."""
        self._closed = True
        self._process.kill()
        self._process.wait()
        self._watch.join()


@contextlib.contextmanager
def process_serving(behaviours: Mapping[int, str], comes_back: bool) -> Iterator[ServerProcess]:
    """A server process within this context; one that dies is started again as a well one, if it comes back."""
    server = ServerProcess(behaviours, comes_back)
    try:
        yield server
    finally:
        server.close()


if __name__ == "__main__":
    told = {int(number): behaviour for number, behaviour in json.loads(sys.argv[2]).items()}
    process = Server(told, int(sys.argv[1]))
    print("ready", flush=True)
    process.http.serve_forever()
