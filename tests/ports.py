"""Ports for the process groups of tests."""

import itertools
import os
import socket

EACH = 100  # ports of one process of tests
_count = itertools.count()


def free_port() -> int:
    """A port that nobody listens at, and that is not given again soon.

    Tests that run at the same time have each their own; and they lie below those that systems give to outgoing
    connections, which might be taken between choice and use.
    """
    first = 12000 + os.getpid() % 200 * EACH
    while True:
        port = first + next(_count) % EACH
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
