"""A service for tests: tiny models, a real server on a free port of this machine."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.ports import free_port
from tests.tiny_models import EOS, make_causal_lm, make_scorer

ROOT = Path(__file__).parents[1]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w60{% endif %}"


def make_models(folder: Path) -> dict[str, str]:
    """Two language models, the second one with a chat template, and a reward model; their folders by name."""
    found = {
        "one": make_causal_lm(folder / "one", seed=3),
        "two": make_causal_lm(folder / "two", seed=4),
        "reward": make_scorer(folder / "reward", offset=-0.3),
    }
    (folder / "two" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return found


def make_endless(folder: Path, positions: int = 4096) -> str:
    """A language model whose greedy responses never end by themselves, and may be long; its folder."""
    path = Path(make_causal_lm(folder, seed=3))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[EOS] = 0.0  # a logit of 0, while the largest of 60 random ones is far above
    model.config.max_position_embeddings = positions
    model.save_pretrained(path)
    return str(path)


@dataclass
class Running:
    """A service under way. log: its two outputs as one file."""

    process: subprocess.Popen
    port: int
    log: Path

    def request(self, method: str, path: str, body=None, headers: dict | None = None) -> tuple[int, dict, dict]:
        """(status, the answer's JSON, headers) of one request; a body that is no text is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = body if isinstance(body, (str, bytes, type(None))) else json.dumps(body)
            connection.request(method, path, given, headers or {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), dict(answer.getheaders())
        finally:
            connection.close()

    def open_stream(self, path: str, body: dict) -> http.client.HTTPConnection:
        """A connection whose answer has begun; to be closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def end(self, sig: int = signal.SIGTERM) -> int:
        """Have it end; returns the exit code."""
        self.process.send_signal(sig)
        return self.process.wait(60)


def command(models: dict[str, str], port: int, *words: str) -> list[str]:
    """The command line of a service with these models, the one called reward as reward model."""
    named = [f"{name}={path}" for name, path in models.items() if name != "reward"]
    reward = ["--reward_model_name_or_path", models["reward"]] if "reward" in models else []
    served = ["--models", *named] if named else []
    return [sys.executable, "-m", "training.serve", *served, *reward, "--port", str(port), *words]


@contextlib.contextmanager
def serving(models: dict[str, str], log: Path, *words: str) -> Iterator[Running]:
    """A service that is ready, and is killed at the end if it has not ended by then."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command(models, port, *words), stdout=output, stderr=output, env=environment)
    try:
        until(lambda: "serves " in log.read_text() or process.poll() is not None, 120)
        running = Running(process, port, log)
        until(lambda: process.poll() is not None or reachable(running), 30)
        assert process.poll() is None, log.read_text()
        yield running
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def reachable(running: Running) -> bool:
    """Whether it answers."""
    with contextlib.suppress(OSError):
        return running.request("GET", "/health")[0] == 200
    return False


def until(met, seconds: float) -> None:
    """Wait until `met()`; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
