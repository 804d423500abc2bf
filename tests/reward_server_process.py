"""A reward server in a process of its own, which may die in the middle of a run, and be started again."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.harness import free_port

ROOT = Path(__file__).resolve().parents[1]


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
