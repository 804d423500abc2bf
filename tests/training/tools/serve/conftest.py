"""A service for tests: tiny models, and a real server on a free port of this machine, in a thread of this process."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.harness.models import EOS, make_causal_lm, make_scorer
from training.tools.serve.flags import ServeFlags
from training.tools.serve.models import ServedModels, load_models
from training.tools.serve.server import Server

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


class Running:
    """A service under way."""

    def __init__(self, server: Server):
        self.server, self.port = server, server.server_address[1]

    def request(self, method: str, path: str, body=None, headers: dict | None = None) -> tuple[int, dict]:
        """(status, the answer's JSON) of one request; a body that is not a text is sent as JSON."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            given = body if isinstance(body, (str, bytes, type(None))) else json.dumps(body)
            connection.request(method, path, given, headers or {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def begin(self, body: dict) -> http.client.HTTPConnection:
        """A connection on which PUT / was sent; to be closed."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", "/", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def events(self, body: dict) -> list[dict]:
        """The events of a streamed answer, without the last."""
        with contextlib.closing(self.begin({**body, "stream": True})) as connection:
            lines = [line for line in connection.getresponse().read().decode().split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    @property
    def is_free(self) -> bool:
        """Whether no request uses the models."""
        return not self.server.computing.locked()


def flags(*models: str, **given) -> ServeFlags:
    """The flags of a service on the CPU, at a free port."""
    args = ServeFlags(models=list(models), port=0, **given)
    args.validate()
    return args


@contextlib.contextmanager
def serving(args: ServeFlags, models: ServedModels, **limits) -> Iterator[Running]:
    """A service that answers within this context."""
    server = Server(args, **limits)
    thread = threading.Thread(target=server.serve, args=(models,), daemon=True)
    thread.start()
    try:
        yield Running(server)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def until(met, seconds: float = 60.0) -> None:
    """Wait until `met()`; fails after so many seconds."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def loaded(models) -> tuple[ServeFlags, ServedModels]:
    names = [f"{name}={models[name]}" for name in ("one", "two")]
    args = flags(
        *names, reward_model_name_or_path=models["reward"], max_answer_seq_len=40, max_body_mb=4.0, dtype="fp32"
    )
    return args, load_models(args)


@pytest.fixture(scope="session")
def service(loaded):
    """A service that all tests leave as it is."""
    with serving(*loaded) as running:
        yield running


@pytest.fixture(scope="session")
def endless(tmp_path_factory) -> tuple[ServeFlags, ServedModels]:
    """One model, thousands of tokens each response. Its name makes each event of a stream long."""
    path = make_endless(tmp_path_factory.mktemp("endless"))
    args = flags(path, max_seq_len=4096, max_answer_seq_len=4000, dtype="fp32")
    found = load_models(args)
    found.by_name["long-" * 4000] = found.by_name.pop(Path(path).name)
    return args, found
