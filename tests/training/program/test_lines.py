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
        Lines(one).put({"step": 3})
        end(one)
        time.sleep(0.2)
        lines = Lines(other)
        assert lines.take() == [{"step": 3}]
        with pytest.raises(OSError):
            lines.take()
