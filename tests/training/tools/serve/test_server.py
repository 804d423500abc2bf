"""What clients may do: bodies that are too large, slow or costly to read, clients that leave, say nothing or come under
another name; and how the service begins and ends.
"""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.harness.models import make_causal_lm, make_scorer
from tests.training.tools.serve.conftest import flags, serving, until
from training.tools.serve.__main__ import main
from training.tools.serve.server import CONNECTIONS, is_own_name

LONG = {"prompt": "w05 w09", "temperature": 0, "max_tokens": 3900}


@pytest.fixture(scope="module")
def slow(endless):
    """A service whose responses take seconds."""
    with serving(*endless) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(endless):
    """A service that waits a second, for three clients."""
    with serving(*endless, seconds=1.0, connections=3) as running:
        yield running


def connected(service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), 30)


def test_64_clients_at_once_are_answered_as_they_would_be_alone(service):
    bodies = [{"prompt": f"w{4 + i % 60:02d} w09", "seed": i, "max_tokens": 2 + i % 5} for i in range(64)]
    alone = [service.request("PUT", "/", body) for body in bodies[::8]]
    with ThreadPoolExecutor(64) as clients:
        together = list(clients.map(lambda body: service.request("PUT", "/", body), bodies))
    assert together[::8] == alone and {status for status, _ in together} == {200}
    assert [found["prompt"] for _, found in together] == [body["prompt"] for body in bodies]


def test_health_is_answered_while_a_response_is_drawn(slow):
    with contextlib.closing(slow.begin(LONG)):
        until(lambda: not slow.is_free)
        assert slow.request("GET", "/health")[0] == 200 and not slow.is_free
    until(lambda: slow.is_free)


def test_a_body_that_is_too_large_is_refused_by_its_announced_length(service):
    with connected(service) as connection:
        head = b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 10000000\r\n\r\n{")
        answer = http.client.HTTPResponse(connection)
        answer.begin()  # while none of the rest was sent
        assert answer.status == 413 and b"--max_body_mb" in answer.read()


def test_a_client_that_writes_all_before_it_reads_sees_why(service):
    status, found = service.request("POST", "/v1/scores", b"x" * 30_000_000)
    assert status == 413 and "4,000,000 bytes" in found["error"]["message"]


@pytest.mark.parametrize("length", [b"", b"Content-Length: -1\r\n", b"Content-Length: 0x10\r\n"])
def test_a_body_without_a_length_is_refused(service, length):
    with connected(service) as connection:
        head = b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + length + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.0 411 ")


def test_a_body_of_380000_fields_is_refused_and_others_are_answered(service):
    """It is 4 MB as bytes, and far more as objects."""
    costly = (
        '{"items": [' + ",".join(["{}"] * 900_000) + '], "x": {' + ",".join(f'"{i}":0' for i in range(60_000)) + "}}"
    )
    fields = '{"prompt": "w05", ' + ",".join(f'"{i:x}":0' for i in range(380_000)) + "}"
    with ThreadPoolExecutor(4) as clients:
        bad = [clients.submit(service.request, "POST", "/v1/scores", costly) for _ in range(2)]
        bad += [clients.submit(service.request, "PUT", "/", fields) for _ in range(2)]
        assert service.request("GET", "/health")[0] == 200
        told = [each.result() for each in bad]
    assert [status for status, _ in told] == [400] * 4
    assert "at most 1000 items" in told[0][1]["error"]["message"]
    assert "0 is not supported" in told[-1][1]["error"]["message"]


@pytest.mark.parametrize("pause", [None, 0.3])
def test_a_body_that_never_comes_is_not_waited_for(impatient, pause):
    """Nor is one that comes byte by byte."""
    with connected(impatient) as connection:
        head = b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert impatient.request("PUT", "/", {"prompt": "w05", "max_tokens": 1})[0] == 200  # others do not wait
        if pause:
            connection.settimeout(pause)
            answer = b""
            for _ in range(20):
                with contextlib.suppress(TimeoutError):
                    answer = connection.recv(65536)
                    break
                connection.sendall(b" ")
        else:
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.0 408 ")


def test_what_is_no_http_does_no_harm(service, capfd):
    with connected(service) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x1b[2J\x03" * 20 + b"\r\n\r\n")
        assert connection.recv(65536)
    assert service.request("GET", "/health")[0] == 200
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error[:-1].isprintable()


def test_what_follows_a_request_is_no_other_request(service):
    """A proxy that goes by the other length would not have seen it."""
    head = b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = head + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with connected(service) as connection:
        connection.sendall(sent + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    assert found.startswith(b"HTTP/1.0 400 ") and found.count(b"HTTP/1.0") == 1


@contextlib.contextmanager
def passes_counted(service):
    """Yields a list that grows with each forward pass of the service's model."""
    (model,) = service.server.models.by_name.values()
    passes: list[int] = []
    handle = model.model.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    handle.remove()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_costs_no_more(slow, stream):
    with passes_counted(slow) as passes:
        connection = slow.begin({**LONG, "stream": stream})
        until(lambda: passes)
        connection.close()
        until(lambda: slow.is_free)
    assert len(passes) < LONG["max_tokens"]


def test_a_client_that_waits_and_leaves_is_never_begun(slow):
    with passes_counted(slow) as passes:
        with slow.server.computing:  # as if a request were under way
            slow.begin(LONG).close()
            until(lambda: slow.server.free._value < CONNECTIONS)
        until(lambda: slow.server.free._value == CONNECTIONS)
    assert not passes


def test_a_client_that_does_not_read_holds_nobody_up(endless):
    """Its answer is larger than what the sockets' buffers hold. The next request is answered before it is given up."""
    body = json.dumps({**LONG, "max_tokens": 500, "stream": True}).encode()
    head = "PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(*endless, seconds=3.0) as running, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", running.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: not running.is_free)
        assert running.request("PUT", "/", {"prompt": "w05", "max_tokens": 1})[0] == 200
        until(lambda: running.server.free._value == CONNECTIONS - 1, 2.0)  # the first one is still connected
        until(lambda: running.server.free._value == CONNECTIONS)


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_connections_without_a_request_do_not_keep_others_out(impatient, said):
    until(lambda: impatient.server.free._value == 3)
    connections = [connected(impatient) for _ in range(3)]
    try:
        for each in connections:
            each.sendall(said)
        until(lambda: impatient.server.free._value == 0)
        with connected(impatient) as further:
            assert b" 503 " in further.recv(65536)
        for each in connections:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        until(lambda: impatient.server.free._value == 3)
        assert impatient.request("GET", "/health")[0] == 200
    finally:
        for each in connections:
            each.close()


def test_another_name_is_refused(service):
    status, found = service.request("GET", "/health", headers={"Host": f"evil.example:{service.port}"})
    assert status == 421 and "evil.example" in found["error"]["message"]
    assert service.request("GET", "/health", headers={"Host": f"localhost:{service.port}"})[0] == 200


@pytest.mark.parametrize(
    "host, own",
    [
        ("localhost:8000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.0.0.7", True),
        ("a.localhost", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_which_hosts_a_request_to_this_machine_names(host, own):
    assert is_own_name(host) == own


def test_an_error_of_a_model_fails_its_request_alone(service, capfd, monkeypatch):
    model = service.server.models.by_name["one"]
    monkeypatch.setattr(type(model.encoder), "prompt", lambda *_: [10**6])  # no such embedding
    status, found = service.request("PUT", "/", {"prompt": "w05", "models": ["one"]})
    monkeypatch.undo()
    assert status == 500 and "its own log says where" in found["error"]["message"]
    assert "IndexError" in capfd.readouterr().err
    assert service.request("PUT", "/", {"prompt": "w05", "models": ["one"]})[0] == 200


@pytest.mark.slow
def test_the_program_serves_until_it_is_told_to_end(models, tmp_path):
    command = [sys.executable, "-m", "training.tools.serve", "--models", f"one={models['one']}", "--port", "0"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    try:
        until(lambda: "serves one at" in log.read_text() or process.poll() is not None, 120)
        port = int(re.search(r"http://127.0.0.1:(\d+)", log.read_text())[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        with socket.create_connection(("127.0.0.1", port)):  # which nobody waits for
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    finally:
        process.kill()
    assert log.read_text().endswith("ended\n") and "Traceback" not in log.read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    make_causal_lm(folder / "one")
    make_scorer(folder / "reward")
    return folder


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to serve: give --models"),
        (["--models", "a={0}/one", "a={0}/reward"], "two models are called a"),
        (["--models", "a={0}/none/none"], "--models a: there is no folder"),
        (["--models", "a={0}/reward"], "--models a: .* is not a language model"),
        (["--reward_model_name_or_path", "{0}/one"], "is not a reward model"),
        (["--models", "a={0}/one", "--port", "70000"], "--port 70000: must be at most 65535"),
        (["--models", "a={0}/one", "--host", "no.such.host.invalid"], "--host no.such.host.invalid --port 0: "),
        (["--models", "a={0}/one", "--max_body_mb", "inf"], "--max_body_mb inf"),
        (["--models", "a={0}/one", "--chat_template", "{0}/none"], "--chat_template .* cannot be read"),
    ],
)
def test_a_mistake_ends_it_before_it_begins(folder, capfd, words, message):
    port = [] if "--port" in words else ["--port", "0"]
    code = main([*(word.format(folder) for word in words), *port])
    error = capfd.readouterr().err.splitlines()[-1]
    assert code == 2 and error.startswith("error: ") and re.search(message, error), error


def test_a_port_that_is_taken(folder, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--models", f"a={folder}/one", "--port", str(port)]) == 2
    assert f"--port {port}: Address already in use. Give another one" in capfd.readouterr().err


def test_flags_of_ipv6():
    assert flags("a=b", host="::1").is_local and not flags("a=b", host="::").is_local
