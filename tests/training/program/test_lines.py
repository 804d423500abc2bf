"""A socket that carries JSON objects: what is said just before an end is heard."""

import socket
import struct
import time

import pytest

from training.program.lines import Lines


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def reset(connection: socket.socket) -> None:
    """End a connection as the system does for a process that is killed while something stands unread."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("end", [reset, socket.socket.close], ids=["reset", "closed"])
def test_last_words_are_heard_before_the_end(end):
    one, other = connected()
    with one, other:
        Lines(one, b"key").put({"step": 3})
        end(one)
        time.sleep(0.2)
        lines = Lines(other, b"key", listens=True)
        assert lines.take() == [{"step": 3}]
        with pytest.raises(OSError):
            lines.take()


def test_a_line_counts_once_and_not_for_the_one_who_said_it():
    for again in ("to the same", "to the sender"):
        one, other = connected()
        with one, other:
            said, heard = Lines(one, b"key"), Lines(other, b"key", listens=True)
            said.put({"step": 3})
            line = other.recv(1 << 16, socket.MSG_PEEK)
            assert heard.take() == [{"step": 3}] and b"key" not in line
            (one if again == "to the same" else other).sendall(line)
            time.sleep(0.2)
            with pytest.raises(ValueError, match="without proof"):
                (heard if again == "to the same" else said).take()
