"""Which hosts a message is from, where a run has several."""

import os
import socket
from collections.abc import Mapping, Sequence


def on_several_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (deepspeed, torchrun, srun) has started ranks on other hosts, too; a dry run has no rank."""
    here = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE")
    return "RANK" in environment and here is not None and here != environment.get("WORLD_SIZE", here)


def from_here(message: str) -> str:
    """The message with this host's name, where there are others: "on gpu07: there is no folder X"."""
    return f"on {socket.gethostname()}: {message}" if on_several_hosts() else message


def first_of(messages: Sequence[str | None], hosts: Sequence[str]) -> str | None:
    """The first rank's message that is one, with the names of the hosts that have it, unless all have; None without.

    messages, hosts: of each rank.
    """
    first = next((message for message in messages if message is not None), None)
    if first is None:
        return None
    having = list(dict.fromkeys(host for host, message in zip(hosts, messages, strict=True) if message == first))
    return first if len(having) == len(set(hosts)) else f"on {', '.join(having)}: {first}"
