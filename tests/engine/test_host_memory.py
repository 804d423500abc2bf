"""Memory that the C library keeps goes back to the system now and then."""

import multiprocessing
import os
from pathlib import Path

import torch

from engine.host_memory import GIVEN_BACK_EVERY, give_back_at, keep_freed_memory

MB = 1 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _readings(answers) -> None:
    """Resident bytes: with 200 tensors of half an MB, when those between others were freed, after the last step before
    memory goes back, and after that at which it does."""
    keep_freed_memory()
    tensors = [torch.ones(MB // 8) for _ in range(200)]
    found = [_resident()]
    tensors = tensors[::2]  # what is freed lies in between
    found.append(_resident())
    for step in (GIVEN_BACK_EVERY - 1, GIVEN_BACK_EVERY):
        give_back_at(step)
        found.append(_resident())
    assert len(tensors) == 100
    answers.put(found)


def test_freed_memory_is_kept_for_some_steps_and_then_given_back():
    """In a process of its own: how the C library keeps memory is set for good."""
    context = multiprocessing.get_context("forkserver")
    answers = context.SimpleQueue()
    process = context.Process(target=_readings, args=(answers,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    all_held, freed, before, after = answers.get()
    assert abs(freed - all_held) < 5 * MB and abs(before - all_held) < 5 * MB
    assert abs(all_held - after - 50 * MB) < 5 * MB  # 100 tensors of half an MB
