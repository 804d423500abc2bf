"""A socket that carries JSON objects, one a line, and never makes its caller wait.

Each line bears a proof that it is from one who has the run's key, of the side that says it and of the line's place
among the others: HMAC-SHA256 (RFC 2104). The key itself is never sent.
"""

import contextlib
import hmac
import json
import socket
import threading

CUT_OFF = 40  # seconds without an answer of the other machine
HELD_BACK = 1 << 20  # bytes that wait for one who does not read; what is said beyond is dropped
LONGEST = 1 << 20  # bytes of a line


class Lines:
    """One end of a connection. Both methods may be called from several threads.

    key: the run's. listens: whether this is the end that was connected to.
    """

    def __init__(self, connection: socket.socket, key: bytes, listens: bool = False):
        self.connection = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Have the system report that the other end is cut off, whether something is on the way or not.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("KEEPIDLE", 10), ("KEEPINTVL", 10), ("KEEPCNT", 3), ("USER_TIMEOUT", CUT_OFF * 1000)):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{option}"), value)
        self._key, self._listens = key, listens
        self._said = self._heard = 0  # lines
        self._unsent = self._unread = b""
        self._sending = threading.Lock()

    def put(self, words: dict) -> None:
        """Send; raises OSError where nobody is at the other end any more."""
        with self._sending:
            if len(self._unsent) < HELD_BACK:
                said = json.dumps(words).encode()
                self._unsent += self._proof(self._listens, self._said, said) + b" " + said + b"\n"
                self._said += 1
            with contextlib.suppress(BlockingIOError):
                self._unsent = self._unsent[self.connection.send(self._unsent) :]

    def take(self) -> list[dict]:
        """What has come.

        Raises: OSError where nobody is at the other end any more, ConnectionResetError if it was closed; ValueError for
        what bears no proof, or has no end. What had come before that is returned first: the last words of a process
        that died.
        """
        while len(self._unread) <= LONGEST:
            try:
                data = self.connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
            except BlockingIOError:
                break
            except OSError:
                if b"\n" in self._unread:
                    break
                raise
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LONGEST:
            raise ValueError(f"a line of more than {LONGEST} bytes")
        return [self._proven(line) for line in lines]

    def close(self) -> None:
        """End the connection."""
        self.connection.close()

    def _proven(self, line: bytes) -> dict:
        proof, _, said = line.partition(b" ")
        if not hmac.compare_digest(proof, self._proof(not self._listens, self._heard, said)):
            raise ValueError("a line without proof")
        self._heard += 1
        return json.loads(said)

    def _proof(self, of_listener: bool, number: int, said: bytes) -> bytes:
        return hmac.digest(self._key, b"%d %d %b" % (of_listener, number, said), "sha256").hex().encode()
