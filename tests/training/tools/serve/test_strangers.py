"""Clients that say nothing, read nothing, or come under another name; two services at one address."""

import contextlib
import json
import socket

import pytest

from engine.errors import UserError
from tests.serving import make_endless, serving, until
from training.tools.serve.server import begin_to_listen, is_own_name, listening_socket


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
