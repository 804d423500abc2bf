"""A socket that carries JSON objects, one a line, and never makes its caller wait."""

import contextlib
import json
import select
import socket
import threading

CUT_OFF = 40  # seconds without an answer of the other machine
HELD_BACK = 1 << 20  # bytes that wait for one who does not read; what is said beyond is dropped


class Lines:
    """One end of a connection. Both methods may be called from several threads."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Have the system report that the other end is cut off, whether something is on the way or not.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("KEEPIDLE", 10), ("KEEPINTVL", 10), ("KEEPCNT", 3), ("USER_TIMEOUT", CUT_OFF * 1000)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        self._unsent = self._unread = b""
        self._sending = threading.Lock()

    def put(self, words: dict) -> None:
        """Send; raises OSError where nobody is at the other end any more."""
        with self._sending:
            if len(self._unsent) < HELD_BACK:
                self._unsent += json.dumps(words).encode() + b"\n"
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def take(self) -> list[dict]:
        """What has come.

        Raises: OSError where nobody is at the other end any more, ConnectionResetError if it was closed; ValueError for
        what is no JSON. What had come before that is returned first: the last words of a process that died.
        """
        while select.select([self.connection], [], [], 0)[0]:
            try:
                data = self.connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
            except OSError:
                if b"\n" in self._unread:
                    break
                raise
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self.connection.close()
