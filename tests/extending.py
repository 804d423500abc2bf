"""docs/extending.md as a user has it: the page's code in a folder of their own, and a reward server beside it."""

import contextlib
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
PAGES_URL = "http://127.0.0.1:8000/score"


def blocks() -> tuple[list[str], str, str]:
    """The page's code: the parts of extensions.py, the loop, the script."""
    *parts, loop, script = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return parts, loop, script


def write(folder: Path, url: str = PAGES_URL) -> None:
    """The page's files, with the server's address in place of the page's."""
    parts, loop, script = blocks()
    source = "\n\n".join(parts)
    assert source.count(PAGES_URL) == 1
    (folder / "extensions.py").write_text(source.replace(PAGES_URL, url))
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)  # it would pass for this one's, written in one second
    (folder / "own_loop.py").write_text(loop)
    (folder / "own_step3.py").write_text(script)


class Server:
    """A reward server: a response scores the number of the word that it begins with ("w07 w09": 7), without one -1.

    asked: what it was sent, in order.
    """

    def __init__(self):
        self.asked: list[dict] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(given)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps({"scores": [score(text) for text in given["responses"]]}).encode())

            def log_message(self, *args):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score"

    def responses(self) -> list[str]:
        """All that it has scored."""
        return [text for asked in self.asked for text in asked["responses"]]


def score(response: str) -> float:
    """What the server says of a response."""
    words = [word for word in response.split() if re.fullmatch(r"w\d\d", word)]
    return float(words[0][1:]) if words else -1.0


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server that answers within this context."""
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()
        thread.join()
