"""The most memory of a GPU that a check's own process took."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from scripts.gpu_checks.trial import Trial


@contextlib.contextmanager
def peaks(trial: Trial) -> Iterator[None]:
    """Note the most bytes that tensors held, and that torch reserved for them, whoever begins torch's counts anew."""
    if trial.dry:
        yield
        return
    import torch  # takes seconds

    allocated = reserved = 0

    def look() -> None:
        nonlocal allocated, reserved
        allocated = max(allocated, torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())

    begin_anew = torch.cuda.reset_peak_memory_stats

    def looked_at_first(*args) -> None:
        look()
        begin_anew(*args)

    with mock.patch("torch.cuda.reset_peak_memory_stats", looked_at_first):
        yield
    look()
    if reserved:
        trial.figures["most GB, allocated / reserved"] = f"{allocated / 1e9:.2f} / {reserved / 1e9:.2f}"
