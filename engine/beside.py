"""Work that goes on beside this thread's own: in a stream of its own on a GPU, in a thread on a CPU."""

import threading
from collections.abc import Callable

import torch

from engine.zero.accelerator import on_gpu


class Beside:
    """A call that has been begun, and goes on beside what follows, until `wait`.

    On GPUs all of it is queued at once, in a stream of its own, so that all ranks queue their collective calls in one
    order, as NCCL wants it; that of a GPU's memory which it takes for a while comes from that stream's own. On CPUs a
    thread makes the call: its collective calls need process groups that nothing else uses meanwhile.

    Raises, in `wait`: what the call raised.
    """

    def __init__(self, call: Callable[[], object]):
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        if on_gpu():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._made(call)
        else:
            self._thread = threading.Thread(target=self._made, args=(call,), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for its end, on a GPU in the current stream."""
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        if self._error is not None:
            raise self._error

    def _made(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error
