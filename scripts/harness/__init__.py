"""What trials (scripts/trial_*.py and their like) and tests of whole programs share; it imports nothing of the tests.

models          tiny models, adapters and a tokenizer, saved as Hugging Face folders
ranks           several processes that form a group: a function in them, or a whole program; forked on CPUs
programs        the three programs, in this process, forked or by a launcher, and files for them; what differs in runs
step3_rlhf      step 3 that writes down what it does, and that something happens to at a given place
kills, faults   runs that are killed at any instant, and those of which a process gets a signal
hosts           two network hosts on this machine; host_launches starts programs on them
..._damages     what can have happened to models' and adapters' folders and to checkpoints
"""

import itertools
import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTS = 100  # of one process
_count = itertools.count()


def free_port() -> int:
    """A port that nobody listens at, and that is not given again soon.

    Processes that run at the same time have each their own; and they lie below those that systems give to outgoing
    connections, which might be taken between choice and use.
    """
    first = 12000 + os.getpid() % 200 * PORTS
    while True:
        port = first + next(_count) % PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                return port
            except OSError:
                continue
