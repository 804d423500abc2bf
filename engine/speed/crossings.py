"""How often gloo sends bytes from host to host, when ranks gather and sum."""


def tree_crossings(hosts: int, ranks: int) -> float:
    """How many times as many bytes as are gathered go to a host, where ranks gather by broadcasts.

    gloo broadcasts along a binomial tree of the ranks as numbered from the sender, and so crosses between hosts more
    often than it has to (pytorch/gloo, gloo/broadcast.cc). The host that receives most counts.
    """
    world = hosts * ranks
    received = [0] * hosts
    for sender in range(world):
        span = 1
        while span < world:
            for place in range(min(span, world - span)):
                start, end = (place + sender) % world, (place + span + sender) % world
                if start // ranks != end // ranks:
                    received[end // ranks] += 1
            span *= 2
    return max(received) / world


def ring_crossings(hosts: int, ranks: int) -> float:
    """The same of a sum over all ranks: twice around the ring, which enters each host once (gloo/allreduce.cc)."""
    world = hosts * ranks
    return 2 * (world - 1) / world if hosts > 1 else 0.0
