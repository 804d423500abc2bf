"""Handles errors before a run begins: an import that fails on this host, or a Ctrl-C.

Importing this module installs an exception hook. An unhandled error then also ends the other ranks, which wait for this
one, with one message that names the host. `training.runtime.launch.run` handles later errors. The hook needs only
torch and numpy, without which the launchers themselves fail.
"""

import contextlib
import os
import socket
import sys
import traceback
from types import TracebackType

from engine.errors import UserError
from training.runtime.environment import of_srun, on_several_hosts, print_line, write_error_file


def tell_all_hosts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The exception hook (sys.excepthook). Ends this process with exit code 2, or 75 for a Ctrl-C, and tells the ranks
    that wait for this one. On a single host it does what Python's default hook does.
    """
    try:
        environment = {**os.environ, **of_srun(os.environ)}
    except UserError:
        environment = dict(os.environ)
    if issubclass(kind, KeyboardInterrupt):
        if environment.get("RANK", "0") == "0":
            print_line("Ctrl-C (SIGINT): ended before the run began; nothing is lost.")
        os._exit(75)
    if not on_several_hosts(environment) or not issubclass(kind, Exception):
        _before(kind, error, trace)
        return
    place = traceback.extract_tb(trace)[-1]
    text = f"{kind.__name__}: {' '.join(str(error).split())} ({place.filename}, line {place.lineno})"
    message = (
        f"error: on {socket.gethostname()}: the program cannot begin: {text}. All hosts need the same environment and "
        "the same version of this project: install them there anew."
    )
    write_error_file(message)
    printed = environment["RANK"] == "0"
    if printed:
        print_line(message)
    with contextlib.suppress(ImportError):
        from training.runtime.ranks import MeetingPoint  # needs torch

        printed = MeetingPoint(environment).announce(message, 2) or printed  # rank 0 prints it, if reached
    if not printed:
        print_line(message)
    sys.stdout.flush()
    os._exit(2)


_before, sys.excepthook = sys.excepthook, tell_all_hosts
