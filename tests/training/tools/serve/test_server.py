"""What clients may do: bodies that are too large, slow or costly to read, more requests than there is room for, clients
that leave, say nothing or come under another name; and how the service ends, and how it does not begin.
"""

import contextlib
import http.client
import importlib.util
import json
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.errors import UserError
from scripts.harness.models import make_causal_lm, make_scorer
from tests.serving import make_endless, serving, until
from training.tools.serve.__main__ import main
from training.tools.serve.server import begin_to_listen, is_own_name, listening_socket

pytest.importorskip("fastapi", reason="the service needs fastapi: pip install .[serve]")

LONG = {"prompt": "w05 w09", "temperature": 0, "max_tokens": 3000}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A service of one model, two responses at once, six asked for, thousands of tokens each."""
    folder = tmp_path_factory.mktemp("slow")
    words = ("--rows_at_once", "2", "--queue_size", "6", "--max_seq_len", "4096", "--max_answer_seq_len", "4000")
    with serving({"endless": make_endless(folder / "endless")}, folder / "log", *words) as running:
        yield running


def health(service) -> dict:
    return service.request("GET", "/health")[1]


@pytest.mark.slow
def test_64_clients_at_once_are_answered_as_they_would_be_alone(service):
    bodies = [{"prompt": f"w{4 + i % 60:02d} w09", "seed": i, "max_tokens": 5 + i % 30} for i in range(64)]
    alone = [service.request("PUT", "/", body) for body in bodies[::8]]
    with ThreadPoolExecutor(64) as clients:
        together = list(clients.map(lambda body: service.request("PUT", "/", body), bodies))
    assert [status for status, _, _ in together] == [200] * 64
    assert [found["prompt"] for _, found, _ in together] == [body["prompt"] for body in bodies]
    for (_, one, _), (_, other, _) in zip(alone, together[::8], strict=True):
        scores = [(one[name].pop("score"), other[name].pop("score")) for name in ("one", "two")]
        assert one == other and all(a == pytest.approx(b, abs=1e-5) for a, b in scores)


@pytest.mark.slow
def test_a_body_that_is_too_large_is_refused_by_its_announced_length(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n{")
        answer = http.client.HTTPResponse(connection)
        answer.begin()  # while none of the rest was sent
        assert answer.status == 413 and b"--max_body_mb" in answer.read()


@pytest.mark.slow
def test_a_client_that_writes_all_before_it_reads_sees_why(service):
    status, found, _ = service.request("POST", "/v1/scores", b"x" * 10_000_000)
    assert status == 413 and "100,000 bytes" in found["error"]["message"]


@pytest.mark.slow
def test_a_body_without_length_is_read_up_to_the_limit(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    pieces = (b"x" * 10_000 for _ in range(100))
    connection.request("POST", "/v1/scores", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.slow
def test_a_body_that_never_comes_is_not_waited_for(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_what_is_no_http_does_no_harm(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    assert health(service)["status"] == "ok"


@pytest.mark.slow
def test_beyond_the_queue_requests_are_sent_away_and_the_others_answered(slow):
    body = {**LONG, "max_tokens": 1500}
    with ThreadPoolExecutor(6) as clients:
        taken = [clients.submit(slow.request, "PUT", "/", body) for _ in range(6)]
        until(lambda: health(slow)["asked_for"] == 6, 30)
        status, refused, headers = slow.request("PUT", "/", body)
        assert health(slow)["asked_for"] > 0, "they had ended before the seventh was asked for"
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert "no room for 1 more" in refused["error"]["message"]
        answers = [each.result() for each in taken]
    assert [(status, found["endless"]["tokens"]) for status, found, _ in answers] == [(200, 1500)] * 6


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_costs_no_more(slow, stream):
    before = health(slow)["tokens_drawn"]
    connection = slow.open_stream("/", {**LONG, "stream": stream})
    if stream:
        answer = connection.getresponse()
        assert list(json.loads(answer.readline().removeprefix(b"data: "))) == ["seed"]
        answer.close()
    until(lambda: health(slow)["tokens_drawn"] > before, 30)
    connection.close()
    until(lambda: health(slow)["decoding"] == 0, 60)
    state = health(slow)
    assert 0 < state["tokens_drawn"] - before < LONG["max_tokens"] and state["asked_for"] == 0


@pytest.mark.slow
def test_a_client_that_waits_and_leaves_is_never_begun(slow):
    before = health(slow)["tokens_drawn"]
    first = [slow.open_stream("/", LONG) for _ in range(2)]
    until(lambda: health(slow)["decoding"] == 2, 30)
    slow.open_stream("/", LONG).close()
    until(lambda: health(slow)["asked_for"] == 2, 30)
    for connection in first:
        connection.close()
    until(lambda: health(slow)["decoding"] == 0, 60)
    assert health(slow)["tokens_drawn"] - before < 2 * LONG["max_tokens"]


@pytest.mark.slow
def test_at_term_what_was_accepted_is_finished_and_nothing_new_begun(slow):
    """The last test of this service, which it ends."""
    body = {**LONG, "max_tokens": 2000}
    kept = http.client.HTTPConnection("127.0.0.1", slow.port, timeout=60)
    kept.request("GET", "/health")
    kept.getresponse().read()
    with ThreadPoolExecutor(4) as clients:
        taken = [clients.submit(slow.request, "PUT", "/", body) for _ in range(4)]
        until(lambda: health(slow)["asked_for"] == 4, 30)
        slow.process.terminate()
        until(lambda: "ends: " in slow.log.read_text(), 30)
        kept.request("PUT", "/", json.dumps(body), {"Content-Type": "application/json"})
        assert kept.getresponse().status == 503
        answers = [each.result() for each in taken]
    assert [(status, found["endless"]["tokens"]) for status, found, _ in answers] == [(200, 2000)] * 4
    assert slow.process.wait(60) == 0
    log = slow.log.read_text()
    assert log.rstrip().endswith("ended") and "Traceback" not in log


@pytest.fixture(scope="module")
def impatient(tmp_path_factory):
    """A service that waits a second, for three clients; of one model, whose name makes each event of a stream long."""
    folder = tmp_path_factory.mktemp("impatient")
    words = ("--body_seconds", "1", "--max_connections", "3", "--max_seq_len", "4096", "--max_answer_seq_len", "4000")
    with serving({"long-" * 600: make_endless(folder / "endless")}, folder / "log", *words) as running:
        yield running


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


def test_of_two_services_at_one_address_the_later_one_says_so():
    first = listening_socket("127.0.0.1", 0)
    port = first.getsockname()[1]
    with first, listening_socket("127.0.0.1", port) as second:  # neither listens yet: both load their models
        begin_to_listen(first)
        with pytest.raises(UserError, match=f"--port {port}: another program listens there"):
            begin_to_listen(second)


@pytest.mark.slow
def test_another_name_is_refused(impatient):
    status, found, _ = impatient.request("GET", "/health", headers={"Host": f"evil.example:{impatient.port}"})
    assert status == 421 and "evil.example" in found["error"]["message"]
    assert impatient.request("GET", "/health", headers={"Host": f"localhost:{impatient.port}"})[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
def test_connections_without_a_request_do_not_keep_others_out(impatient, said):
    connections = [socket.create_connection(("127.0.0.1", impatient.port), 30) for _ in range(6)]
    try:
        for each in connections:
            each.sendall(said)
        for each in connections:
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""
        assert impatient.request("GET", "/health")[0] == 200
    finally:
        for each in connections:
            each.close()


@pytest.mark.slow
def test_after_a_request_with_two_lengths_the_connection_is_closed(impatient):
    """By one of them its body is the next request, which a proxy that goes by the other has not seen."""
    head = b"POST /get_reward HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", impatient.port), 30) as connection:
        connection.sendall(head + b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b"".join(iter(lambda: connection.recv(65536), b""))
    assert found.startswith(b"HTTP/1.1 400 ") and b"not both" in found and found.count(b"HTTP/1.1") == 1


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_given_up(impatient):
    body = json.dumps({"prompt": "w05", "temperature": 0, "max_tokens": 3900, "stream": True}).encode()
    head = "PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", impatient.port))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: impatient.request("GET", "/health")[1]["asked_for"] == 1, 30)
        until(lambda: impatient.request("GET", "/health")[1]["asked_for"] == 0, 60)
    assert "its client read nothing of it for 1 seconds" in impatient.log.read_text()
    until(lambda: impatient.request("GET", "/health")[1]["decoding"] == 0, 30)


@pytest.mark.slow
def test_what_is_not_finished_in_time_is_told_so(tmp_path):
    words = ("--drain_seconds", "0.3", "--max_seq_len", "200000", "--max_answer_seq_len", "100000")
    body = {"prompt": "w05", "temperature": 0, "max_tokens": 50_000}
    models = {"endless": make_endless(tmp_path / "endless", positions=200_000)}
    with serving(models, tmp_path / "log", *words, "--rows_at_once", "1") as running:
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(running.request, "PUT", "/", body)
            until(lambda: running.request("GET", "/health")[1]["decoding"] == 1, 30)
            assert running.end(signal.SIGINT) == 1
            status, found, _ = answer.result()
        assert status == 503 and "not done in time" in found["error"]["message"]
        log = running.log.read_text()
        assert "not finished within --drain_seconds 0.3: 1" in log and "Traceback" not in log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds")
    make_causal_lm(folder / "one")
    make_scorer(folder / "reward")
    make_scorer(folder / "other")
    tokenizer = folder / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"w50"', '"x50"'))
    return folder


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to serve: give --models"),
        (["--models", "one"], "--models one: give NAME=PATH"),
        (["--models", "seed={0}/one"], "seed is taken"),
        (["--models", "a={0}/one", "a={0}/one"], "the name a is given twice"),
        (["--models", "a={0}/none/none"], "--models a: there is no folder"),
        (["--models", "a={0}/reward"], "--models a: .* is no language model"),
        (["--reward_model_name_or_path", "{0}/one"], "is no reward model"),
        (["--models", "a={0}/one", "--reward_model_name_or_path", "{0}/other"], "gives other ids"),
        (["--models", "a={0}/one", "--port", "70000"], "--port 70000: must be at most 65535"),
        (["--models", "a={0}/one", "--device", "tpu"], "--device tpu: give cpu"),
        (["--models", "a={0}/one", "--device", "cuda:99"], "--device cuda:99: torch sees"),
        (["--models", "a={0}/one", "--max_body_mb", "inf"], "--max_body_mb inf"),
        (["--models", "a={0}/one", "--chat_template", "{0}/none"], "--chat_template .* cannot be read"),
        (["--modles", "a={0}/one"], "Did you mean --models"),
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
    assert f"--port {port}: another program listens there" in capfd.readouterr().err


def test_packages_that_are_missing_are_named_with_the_command(folder, capfd, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "uvicorn" else find(name))
    assert main(["--models", f"a={folder}/one"]) == 2
    assert (
        "the service needs uvicorn, and it is not installed" in (error := capfd.readouterr().err)
        and "pip install '.[serve]'" in error
    )
