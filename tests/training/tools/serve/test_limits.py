"""Bodies that are too large or never come, more than there is room for, clients that leave."""

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from scripts.harness.models import make_causal_lm
from tests.serving import make_endless, serving, until

pytestmark = pytest.mark.slow
LONG = {"prompt": "w05 w09", "temperature": 0, "max_tokens": 3000}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A service of one model, two responses at once, six asked for, thousands of tokens each."""
    folder = tmp_path_factory.mktemp("slow")
    words = ("--rows_at_once", "2", "--queue_size", "6", "--max_seq_len", "4096", "--max_answer_seq_len", "4000")
    with serving({"endless": make_endless(folder / "endless")}, folder / "log", *words) as running:
        yield running


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A service whose chat template misbehaves with some messages; and its model's folder."""
    folder = tmp_path_factory.mktemp("hostile")
    template = folder / "chat.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'w05' %}{% for i in range(4000) %}"
        "{% for j in range(4000) %}{% endfor %}{% endfor %}{% elif m.content == 'w06' %}{{ 'x' * 10 ** 11 }}{% endif %}"
        "{% endfor %}"
    )
    path = make_causal_lm(folder / "model", seed=3)
    with serving({"model": path}, folder / "log", "--chat_template", str(template)) as running:
        yield running, path


def health(service) -> dict:
    return service.request("GET", "/health")[1]


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


def test_a_body_that_is_too_large_is_refused_by_its_announced_length(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n{")
        answer = http.client.HTTPResponse(connection)
        answer.begin()  # while none of the rest was sent
        assert answer.status == 413 and b"--max_body_mb" in answer.read()


def test_a_client_that_writes_all_before_it_reads_sees_why(service):
    status, found, _ = service.request("POST", "/v1/scores", b"x" * 10_000_000)
    assert status == 413 and "100,000 bytes" in found["error"]["message"]


def test_a_body_without_length_is_read_up_to_the_limit(service):
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=30)
    pieces = (b"x" * 10_000 for _ in range(100))
    connection.request("POST", "/v1/scores", pieces, {"Content-Type": "application/json"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_a_body_that_never_comes_is_not_waited_for(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"POST /v1/scores HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_what_is_no_http_does_no_harm(service):
    with socket.create_connection(("127.0.0.1", service.port), 30) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")
    assert health(service)["status"] == "ok"


def test_beyond_the_queue_requests_are_sent_away_and_the_others_answered(slow):
    body = {**LONG, "max_tokens": 1500}
    with ThreadPoolExecutor(6) as clients:
        taken = [clients.submit(slow.request, "PUT", "/", body) for _ in range(6)]
        until(lambda: health(slow)["asked_for"] == 6, 30)
        status, refused, headers = slow.request("PUT", "/", body)
        assert health(slow)["asked_for"] > 0, "they had ended before the seventh was asked for"
        assert status == 429 and int(headers["retry-after"]) >= 1
        assert "have no room" in refused["error"]["message"]
        answers = [each.result() for each in taken]
    assert [(status, found["endless"]["tokens"]) for status, found, _ in answers] == [(200, 1500)] * 6


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


def test_a_template_that_takes_time_or_memory_holds_up_nobody_else(hostile):
    service, path = hostile

    def asked(content: str) -> tuple[int, dict, dict]:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        return service.request("PUT", "/", body)

    with ThreadPoolExecutor(1) as client:
        slow = client.submit(asked, "w05")
        until(lambda: health(service)["asked_for"] == 1, 30)
        body = {"prompt": "w07", "max_tokens": 2}
        assert service.request("PUT", "/", body)[0] == 200 and not slow.done()
        assert slow.result()[0] == 200
    status, found, _ = asked("w06")
    assert status == 400 and "the chat template of model takes more than 1 GB" in found["error"]["message"]
    assert path not in json.dumps(found) and asked("w07")[0] == 200


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
