"""What ranks tell rank 0 of themselves, and what rank 0 does with their letters."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine import distributed
from engine.errors import UserError
from training.flags.arguments import RunFlags
from training.preflight import gathering
from training.preflight.mailbox import BETWEEN, Mailbox
from training.preflight.node import Card, Clock, Node

LINGER = 5.0  # seconds that rank 0 serves answers for at the end


def letter(args: RunFlags, thorough: bool = True) -> dict:
    """What this rank tells of itself, and the first one of each node of the node."""
    local = distributed.local_rank()
    card = gathering.card(local, thorough)
    told = {"rank": distributed.rank(), "host": socket.gethostname(), "card": card and _as_json(card)}
    return told | ({"node": gathering.node(args, thorough).as_json()} if local == 0 else {})


def _as_json(card: Card) -> dict:
    return Node(host="", cards=(card,)).as_json()["cards"][0]


def nodes_of(letters: Mapping[int, dict]) -> list[Node]:
    """The nodes that have told of themselves, in the order of their ranks. letters: by rank.

    Several may have one name, as containers do, and launchers that share a host: each node's first rank is followed by
    its others.

    Raises: UserError for letters that this version has not written.
    """
    try:
        return _nodes_of(letters)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"what ranks tell of themselves cannot be read ({type(error).__name__}: {error}). Another version of this "
            "program runs on a host, or another program writes where they meet (MASTER_PORT)."
        ) from None


def _nodes_of(letters: Mapping[int, dict]) -> list[Node]:
    ranks: dict[int, list[int]] = {}  # of each node, by its first
    latest: dict[str, int] = {}  # first rank of a name
    for rank in sorted(letters):
        host = letters[rank]["host"]
        if "node" in letters[rank]:
            latest[host], ranks[rank] = rank, []
        if host in latest:
            ranks[latest[host]].append(rank)
    found = []
    for first, own in ranks.items():
        cards = tuple(Card(**letters[number]["card"]) for number in own if letters[number]["card"])
        clock = letters[first].get("clock")
        node = Node.of_json(letters[first]["node"])
        found.append(replace(node, ranks=tuple(own), cards=cards, clock=Clock(**clock) if clock else None))
    return found


def collect(box: Mailbox, own: dict, world: int, seconds: float, over: Callable[[], bool] = lambda: False) -> dict:
    """The letters of all ranks, by rank; or of those that have come when for so many seconds no other has, or when
    `over` says that the others need not be waited for.

    Clocks are answered meanwhile.
    """
    letters, deadline = {0: own}, time.monotonic() + seconds
    while len(letters) < world and time.monotonic() < deadline and not over():
        for found in box.letters():
            if found["rank"] not in range(1, world):
                continue
            if "ask" in found:
                box.answer(found["rank"], {"time": time.time()})
            else:
                letters[found["rank"]] = found
            deadline = time.monotonic() + seconds
        time.sleep(BETWEEN)
    return letters


def answer_all(box: Mailbox, letters: Mapping[int, dict], answer: dict) -> None:
    """Tell all other ranks that have written the same."""
    for rank in letters:
        if rank:
            box.answer(rank, answer)


def linger(box: Mailbox, ranks: int) -> None:
    """Serve the store until all have heard the last answer."""
    deadline, heard = time.monotonic() + LINGER, 0
    while heard < ranks and time.monotonic() < deadline:
        heard += sum("heard" in one for one in box.letters())
        time.sleep(BETWEEN)
