"""What the service withstands: real clients, many of them, bad ones, those that leave, and its own end under load.

    python scripts/trial_serve.py base=BASE sft=SFT ppo=PPO --reward REWARD       # a minute on two cores
    python scripts/trial_serve.py sft=SFT --reward REWARD --requests 2000         # whether memory grows, for longer

Starts `python -m training.serve` with these models, asks it by OpenAI's own client and by plain sockets, and ends it
with TERM while requests are under way. Prints a table of what was tried, what came, and whether that is as it should
be; the exit code is 0 where all is.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"  # for tokenizers that have none
CLIENTS, GROWTH = 64, 8.0  # at once; MB that the second half of the requests may add
TEXT = "the film was a story of two friends who found each other in town and never left again"

Row = tuple[str, str, bool]


class Service:
    """A service under way, and how it is asked."""

    def __init__(self, models: Sequence[str], reward: str, folder: Path):
        template = folder / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        self.port, self.log = _free_port(), folder / "log"
        command = [sys.executable, "-m", "training.serve", "--models", *models, "--port", str(self.port)]
        command += ["--reward_model_name_or_path", reward, "--chat_template", str(template), "--max_body_mb", "1"]
        with self.log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=dict(os.environ))
        _until(self._ready, 300)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        """(status, JSON) of a request; status 0 where there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            given = body if isinstance(body, (bytes, type(None))) else json.dumps(body)
            connection.request(method, path, given, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()

    def health(self) -> dict:
        """What GET /health says."""
        return self.ask("GET", "/health")[1]

    def resident(self) -> float:
        """Resident memory, MB."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            sys.exit(f"the service did not begin: {self.log.read_text()}")
        return self.ask("GET", "/health")[0] == 200


def main() -> int:
    """Try everything and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME=PATH, as for --models")
    parser.add_argument("--reward", required=True, help="the reward model")
    parser.add_argument("--requests", type=int, default=300, help="after which memory is looked at (300)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = Service(options.models, options.reward, Path(folder))
        name = options.models[0].partition("=")[0]
        try:
            rows = [
                *by_openai(service, name),
                many_clients(service),
                bad_json(service),
                large_body(service),
                leaves(service, name),
                memory(service, options.requests),
                ends_under_load(service, name),
                log(service),
            ]
        finally:
            service.process.kill()
    print(table(rows))
    return 0 if all(well for _, _, well in rows) else 1


def by_openai(service: Service, model: str) -> list[Row]:
    """Chat, completion and both streamed, by OpenAI's client as it is."""
    import openai

    found: list[Row] = []
    with openai.OpenAI(base_url=f"http://127.0.0.1:{service.port}/v1", api_key="none", max_retries=0) as client:
        prompt, drawn = "The film was", {"model": model, "max_tokens": 24, "seed": 1}
        whole = client.completions.create(prompt=prompt, **drawn).choices[0].text
        chunks = list(client.completions.create(prompt=prompt, stream=True, **drawn))
        streamed = "".join(chunk.choices[0].text for chunk in chunks)
        found.append(("openai: completion", repr(whole[:40]), bool(whole)))
        found.append(("openai: completion, streamed", f"{len(chunks)} chunks, the same text", streamed == whole))
        messages = [{"role": "user", "content": prompt}]
        chat = client.chat.completions.create(messages=messages, **drawn)
        said = chat.choices[0].message.content
        same = said == whole  # by the template, which adds nothing
        found.append(("openai: chat", f"{chat.usage.completion_tokens} tokens, {chat.choices[0].finish_reason}", same))
        chunks = list(client.chat.completions.create(messages=messages, stream=True, **drawn))
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        found.append(("openai: chat, streamed", f"{len(chunks)} chunks, the same text", streamed == said))
        try:
            client.chat.completions.create(messages=messages, frequency_penalty=0.5, **drawn)
            told = "taken in silence"
        except openai.BadRequestError as error:
            told = f"400, param {error.param}"
        found.append(("openai: a parameter that there is not", told, told == "400, param frequency_penalty"))
    return found


def many_clients(service: Service) -> Row:
    """All models' continuations and scores for 64 clients at once, each as it is alone."""
    bodies = [{"prompt": _prompt(i), "max_tokens": 32, "seed": i} for i in range(CLIENTS)]
    alone = [service.ask("PUT", "/", body)[1] for body in bodies[::16]]
    start = time.monotonic()
    together = _at_once(lambda body: service.ask("PUT", "/", body), bodies)
    seconds = time.monotonic() - start
    answered = sum(status == 200 for status, _ in together)
    same = all(_texts(one) == _texts(other) for one, (_, other) in zip(alone, together[::16], strict=True))
    told = (
        f"{answered} answered in {seconds:.1f} s; {len(alone)} asked alone before: {'the same' if same else 'others'}"
    )
    return f"{CLIENTS} clients at once", told, answered == CLIENTS and same


def bad_json(service: Service) -> Row:
    """Bodies that are no JSON, and others that are not what is asked for: 400 each."""
    bodies = [b'{"prompt": ', b"[" * 100_000, b"\xff\xfe", b"null", b'{"prompt": 3}', b'{"prompt": "\\ud800"}', b"{}"]
    found = [service.ask("PUT", "/", body)[0] for body in bodies]
    return "bad JSON", f"{len(bodies)} kinds: {sorted(set(found))}", set(found) == {400}


def large_body(service: Service) -> Row:
    """10 MB, announced and sent: 413, and memory stays."""
    before = service.resident()
    found = [service.ask("PUT", "/", b'"' + b"x" * 10_000_000 + b'"')[0] for _ in range(10)]
    grown = service.resident() - before
    return "10 bodies of 10 MB", f"{sorted(set(found))}, {grown:+.1f} MB", set(found) == {413} and grown < GROWTH


def leaves(service: Service, model: str) -> Row:
    """Clients that leave while their responses are drawn: these are drawn no further."""
    asked, before = 20, service.health()["tokens_drawn"]
    body = json.dumps({"model": model, "prompt": "The film was", "max_tokens": 200, "stream": True, "n": 4}).encode()
    for _ in range(asked):
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().readline()
        connection.sock.close()
        connection.close()
    _until(lambda: service.health()["asked_for"] == service.health()["decoding"] == 0, 120)
    drawn = service.health()["tokens_drawn"] - before
    told = f"{asked} clients left {4 * asked} responses: {drawn} tokens drawn of {4 * asked * 200} asked for"
    return "clients that leave in the middle", told, drawn < 4 * asked * 200 / 4


def memory(service: Service, requests: int) -> Row:
    """Resident memory after so many requests, and after as many again."""
    readings = []
    for part in range(2):
        bodies = [{"prompt": _prompt(i), "max_tokens": 1 + i % 40, "seed": i} for i in range(part, requests + part)]
        for first in range(0, requests, 16):
            _at_once(lambda body: service.ask("PUT", "/", body), bodies[first : first + 16])
        readings.append(service.resident())
    grown = readings[1] - readings[0]
    told = f"{readings[0]:.0f} MB after {requests} requests, {grown:+.1f} MB after as many again"
    return "memory", told, grown < GROWTH


def ends_under_load(service: Service, model: str) -> Row:
    """TERM while 64 requests are under way or wait: all are answered whole, and new ones are not taken."""
    body = {"model": model, "prompt": "The film was", "max_tokens": 60, "n": 2}
    with ThreadPoolExecutor(CLIENTS) as clients:
        taken = [clients.submit(service.ask, "POST", "/v1/completions", body) for _ in range(CLIENTS)]
        _until(lambda: service.health().get("asked_for") == 2 * CLIENTS, 60)
        service.process.terminate()
        _until(lambda: "ends: " in service.log.read_text(), 60)
        refused = service.ask("POST", "/v1/completions", body)[0]
        answers = [each.result() for each in taken]
    code = service.process.wait(120)
    whole = sum(
        status == 200 and all(choice["finish_reason"] for choice in found["choices"]) for status, found in answers
    )
    told = f"{whole} of {CLIENTS} accepted requests finished, a new one: {refused or 'no connection'}, exit code {code}"
    return "TERM under load", told, whole == CLIENTS and refused in (0, 503) and code == 0


def log(service: Service) -> Row:
    """What the service has said: a line for each problem."""
    text = service.log.read_text()
    lines = text.splitlines()
    return "its log", f"{len(lines)} lines, {text.count('Traceback')} stack traces", "Traceback" not in text


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown."""
    lines = [
        f"| {what} | {told} | {'as it should be' if well else 'NOT as it should be'} |" for what, told, well in rows
    ]
    return "\n".join(["| tried | came | |", "| --- | --- | --- |", *lines])


def _prompt(number: int) -> str:
    words = TEXT.split()
    return " ".join(words[(number * 7 + place) % len(words)] for place in range(2 + number % 12))


def _texts(found: dict) -> dict[str, str]:
    return {name: value["response"] for name, value in found.items() if isinstance(value, dict)}


def _at_once(ask: Callable, bodies: Sequence) -> list:
    with ThreadPoolExecutor(len(bodies)) as clients:
        return list(clients.map(ask, bodies))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _until(met: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            sys.exit(f"waited {seconds:.0f} seconds in vain")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
