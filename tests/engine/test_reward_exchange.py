"""Answers of reward servers that are odd to the byte."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from engine.reward.server import Fault, Item, Mistake, WrongAnswer, decoded_scores, exchange

ITEMS = [Item("7.0", "What is 2 + 2?", " 4", {})]


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers one request with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while not connection.recv(65536).endswith(b"{}"):
                    pass
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/score"
        thread.join()


@pytest.mark.parametrize(
    "answer, kind, told",
    [
        (b"HTTP/1.1 500 \x1b[31mred\r\nContent-Length: 0\r\n\r\n", Fault, "answered 500 [31mred"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: /a\x1b[2J\r\nContent-Length: 0\r\n\r\n",
            Mistake,
            "answered 302 Found, and would have it asked at /a [2J: give that URL",
        ),
        (b"HTTP/1.1 204 No\x1b]0;Content\r\n\r\n", Mistake, "answered 204 No ]0;Content without scores"),
        (b"\x1b[2Jno HTTP\r\n\r\n", Fault, "cannot be reached, or broke off (BadStatusLine: [2Jno HTTP)"),
    ],
)
def test_what_a_terminal_would_obey_is_left_out(answer, kind, told):
    with answering(answer) as url, pytest.raises(kind) as caught:
        exchange(url, b"{}", timeout=30.0, most_bytes=100)
    assert str(caught.value) == told


@pytest.mark.parametrize(
    "head, body",
    [
        ("404 Not Found", b"no POST /score?key=SECRET"),
        ("302 Found\r\nLocation: https://a/score?key=SECRET", b""),
        ("403 no SECRET", b"SECRET at /score?... is none"),
    ],
)
def test_a_key_that_a_server_says_again_is_left_out(head, body):
    answer = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with answering(answer) as url, pytest.raises(Mistake, match=r"/score\?\.\.\.") as caught:
        exchange(f"{url}?key=SECRET", b"{}", timeout=30.0, most_bytes=100)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("trickle", [b"HTTP/1.1 100 Continue\r\n\r\n", b"X-Wait: 1\r\n"])
def test_a_head_that_goes_on_and_on_is_not_waited_for(trickle):
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"" if trickle.startswith(b"HTTP") else b"HTTP/1.1 200 OK\r\n")
                for _ in range(600):  # a minute, longer than the test waits for
                    if over.wait(0.1):
                        break
                    connection.sendall(trickle)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(Fault, match="did not answer within 1 s"):
                exchange(f"http://127.0.0.1:{listening.getsockname()[1]}/score", b"{}", timeout=1.0, most_bytes=100)
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    "body",
    [b'{"scores": [{"id": "7.0", "score": 1, "score": 2}]}', b'{"scores": [], "scores": [{"id": "7.0", "score": 1}]}'],
)
def test_a_score_that_is_given_twice_within_an_object_is_none(body):
    with pytest.raises(WrongAnswer, match="stood 2 times"):
        decoded_scores("items", body, ITEMS)
