"""Errors before a run begins: a failed import on this host, which the waiting ranks of other hosts are told; or a
Ctrl-C.

Importing this module installs an exception hook: an unhandled error then also ends the other ranks, with one message
that names the host. `training.runtime.startup.run` handles later errors. The hook needs only torch and numpy, without
which the launchers themselves fail.
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
    """End this process with code 2 and tell the ranks that wait for it; on a single host, act as the default hook does.
    A Ctrl-C ends it with 75.

    For sys.excepthook.
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
        from training.runtime.agreement import MeetingPoint  # which needs torch

        printed = MeetingPoint(environment).announce(message, 2) or printed  # by rank 0, where it is reached
    if not printed:
        print_line(message)
    sys.stdout.flush()
    os._exit(2)


_before, sys.excepthook = sys.excepthook, tell_all_hosts
