"""Which host each rank is to be on, as far as the launcher tells: for ranks that do not tell it themselves."""

import base64
import json
import os
from collections.abc import Iterable, Mapping

import psutil

from training.program import slurm

WORLD_INFO = "--world_info="  # a flag of DeepSpeed's launcher on each node


def hosts_by_rank(world: int, lines: Iterable[list[str]] | None = None) -> dict[int, str]:
    """The host of each rank, "" where it is not known.

    lines: command lines of the launchers above this process, by default those that there are.
    """
    found = dict.fromkeys(range(world), "")
    for words in _above() if lines is None else lines:
        for word in words:
            if word.startswith(WORLD_INFO):
                return found | dict(enumerate(_hosts(word.removeprefix(WORLD_INFO))))
    tasks = slurm.hosts_by_rank(os.environ)
    return found | tasks if len(tasks) == world else found  # of another launcher, which srun has started


def _hosts(told: str) -> list[str]:
    """The host of each process, from DeepSpeed's own account of them: {host: [slots]}, as JSON in base 64."""
    try:
        slots: Mapping[str, list[int]] = json.loads(base64.urlsafe_b64decode(told))
        return [host for host, numbers in slots.items() for _ in numbers]
    except (ValueError, AttributeError, TypeError):
        return []


def _above() -> list[list[str]]:
    lines = []
    for process in psutil.Process(os.getpid()).parents():
        try:
            lines.append(process.cmdline())
        except psutil.Error:
            continue
    return lines
