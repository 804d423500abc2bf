"""What ends a program before its run: what this host cannot import, said to the ranks of other hosts, which wait for it
where all ranks are to meet; or a Ctrl-C.

A program imports this module for what that does: it has an error that no one handles end the other ranks, too, with one
message that names the host. `training.runtime.startup.run` sees to errors that come later. Of what may be broken on
this host nothing is needed but torch and numpy, without which the launchers end by themselves.
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
    """End this process with code 2 and tell those that wait for it; on one host, do as before. A Ctrl-C ends with 75.

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
