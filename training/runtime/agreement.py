"""Verdicts that all ranks share: what one rank finds wrong, all of them raise."""

import socket
from collections.abc import Callable
from typing import TypeVar

from engine.errors import SharedError, UserError
from training.data.tables import Found, recorded, repeated
from training.runtime.joining import first_of, from_here

Result = TypeVar("Result")


def checked(check: Callable[[], Result]) -> Result:
    """Rank 0's `check()`, for all ranks; where it raises UserError, all ranks do.

    For checks that read files: one process looks, and none goes on before the verdict is known. With several hosts the
    message says on which it looked.
    """
    from engine import distributed  # here, so that a program can quiet libraries before they are imported

    result = message = None
    if distributed.is_main():
        try:
            result = check()
        except UserError as error:
            message = from_here(str(error))
    message = distributed.broadcast_object(message)
    if message is not None:
        raise SharedError(message)
    return distributed.broadcast_object(result)


def agreed(load: Callable[[], Result]) -> Result:
    """This rank's own `load()`; where it raises UserError on any rank, all ranks raise the first one's.

    For what every rank reads for itself: a file that one node lacks ends the run on all, with its message and its
    name. One rank of each node goes first; the others take over what it has found of data sets, with the tables that it
    has put into the cache. They wait for as long as it takes: a rank that dies meanwhile ends the run (heartbeats.py).
    """
    from engine import distributed

    host, result = socket.gethostname(), None
    found: dict[str, Found | None] = {}
    for turn in (True, False):
        message = noted = None
        if (distributed.local_rank() == 0) == turn:
            try:
                if turn:
                    with recorded() as noted:
                        result = load()
                else:
                    result = repeated(load, found.get(host))
            except UserError as error:
                message = str(error)
        messages, hosts = zip(*distributed.all_gather_objects((message, host)), strict=True)
        first = first_of(messages, hosts)
        if first is not None:
            raise SharedError(first)
        if turn:
            found = {name: one for one, name in distributed.all_gather_objects((noted, host)) if one is not None}
    return result
