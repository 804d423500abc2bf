"""Where the time of a token goes: to the model's pass, to the draw, and to the host between them."""

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from engine.rollout.draws import Draws
from engine.rollout.passes import Passes, RecordedPasses

# What reads a token, by the way of decoding: of a graph its launch alone, without what the host does before it.
READS = {
    "plain": (Passes, "tokens"),
    "recorded": (RecordedPasses, "tokens"),
    "graphs": (torch.cuda.CUDAGraph, "replay"),
}


class TokenTimes:
    """When passes and draws began and ended, on the GPU's clock where there is a GPU.

    The host's time is what is left from the first pass to the last draw: the GPU waits, or does what is neither.
    """

    def __init__(self):
        self.marks: dict[str, list[tuple]] = {"pass": [], "draw": []}

    def around(self, name: str, function: Callable) -> Callable:
        """The function, whose calls are noted under this name."""

        def call(*args, **kwargs):
            begun = _mark()
            result = function(*args, **kwargs)
            self.marks[name].append((begun, _mark()))
            return result

        return call

    def words(self) -> str:
        """Milliseconds a token, in words."""
        passes, draws = self.marks["pass"], self.marks["draw"][-len(self.marks["pass"]) :]  # the first follows a prompt
        read, drawn = (sum(_milliseconds(*each) for each in spans) / len(passes) for spans in (passes, draws))
        left = _milliseconds(passes[0][0], draws[-1][1]) / len(passes) - read - drawn
        return f"{read:.3f} pass + {drawn:.3f} draw + {left:.3f} host"


@contextlib.contextmanager
def token_times(decoding: str) -> Iterator[TokenTimes]:
    """Note the tokens that are decoded in this way within."""
    times, (owner, name) = TokenTimes(), READS[decoding]
    with (
        mock.patch.object(owner, name, times.around("pass", getattr(owner, name))),
        mock.patch.object(Draws, "draw", times.around("draw", Draws.draw)),
    ):
        yield times
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _mark():
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begun, ended) -> float:
    return begun.elapsed_time(ended) if isinstance(begun, torch.cuda.Event) else 1e3 * (ended - begun)
