"""Single tokens by CUDA graphs of the model's own pass."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.rollout.cache import SlotCache
from engine.rollout.passes import Passes, rows_of_shape
from engine.trace import traced

SLOT_SHAPES = 4  # in how many numbers of slots passes occur: quarters of the cache's room

# Has a step's operations run once and returns what runs them again, on the same tensors, and gives the same output.
Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]


class GraphedPasses(Passes):
    """Launches the operations of a pass over single tokens as one graph, without Python or launches between them.

    A graph is captured, in seconds and without a compiler, for each number of rows (halves of the cache's rows) and of
    slots (quarters of its slots) that occurs. What it gives is compared with the model's own pass when it is captured.
    Where a capture fails, or gives something else, the model's own code reads tokens from then on, with a warning that
    says why. Graphs are made anew where weights or the cache have moved.

    Raises: ValueError for a model that is not on a GPU, unless another capture is given.
    """

    sees_all_slots = True

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool, capture: Capture | None = None):
        super().__init__(model, cache, slot_masks)
        if capture is None:
            if not next(model.parameters()).is_cuda:
                raise ValueError("it is not on a GPU")
            capture = _CudaCapture()
        self._capture, self._failed = capture, False
        self._graphs: dict[tuple[int, int], Callable[[], Tensor]] = {}
        self._places: list[int] = []
        self._inputs: _Inputs | None = None

    @traced("prompts")
    def prompts(self, ids: Tensor, mask: Tensor, first_row: int, end: int) -> Tensor:
        """As Passes.prompts."""
        logits = super().prompts(ids, mask, first_row, end)
        tensors = [*self.model.parameters(), *self.cache.parts(slice(None), slice(None))]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._graphs.clear()
            self._places, self._inputs = places, None
        return logits

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens; the rows of the cache that are free compute too, and nobody looks. What is returned is
        written over by the next pass."""
        if self._failed:
            return super().tokens(ids, positions, mask, start, slot)
        if self._inputs is None:
            self._inputs = _Inputs(mask.shape, mask.device)
        width = mask.shape[1]
        rows, slots = rows_of_shape(len(ids), len(mask)), _slots_of_shape(slot + 1, width)
        self._inputs.put(ids, positions, mask, slot)
        if (rows, slots) not in self._graphs:
            expected = super().tokens(ids, positions, mask, start, slot)
            try:
                self._graphs[rows, slots] = self._checked(rows, slots, expected)
            except Exception as reason:  # whatever a family's code, or the driver, trips over
                self._failed = True
                self._graphs.clear()
                warnings.warn(
                    f"single tokens of {type(self.model).__name__} cannot be graphs ({_first_line(reason)}); "
                    "its own code reads them",
                    stacklevel=2,
                )
                return expected
        return self._graphs[rows, slots]()[: len(ids)]

    def _checked(self, rows: int, slots: int, expected: Tensor) -> Callable[[], Tensor]:
        """A graph of this shape, which gives what is expected of the inputs as they stand."""
        inputs = self._inputs
        assert inputs is not None

        def step() -> Tensor:
            self.cache.window.put_at(slice(0, rows), inputs.at, slots)
            return self._forward(inputs.ids[:rows], inputs.mask[:rows, None, None, :slots], inputs.positions[:rows])

        replay = self._capture(step)
        found, tolerance = replay()[: len(expected)], torch.finfo(expected.dtype).eps ** 0.5
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            raise ValueError("its graph computes something else")
        return replay


class _Inputs:
    """What graphs read, in places that stay: ids and positions (rows, 1), mask (rows, slots) and the slot to write."""

    def __init__(self, shape: torch.Size, device: torch.device):
        self.ids, self.positions = torch.zeros(2, shape[0], 1, dtype=torch.int64, device=device)
        self.mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)

    def put(self, ids: Tensor, positions: Tensor, mask: Tensor, slot: int) -> None:
        self.ids[: len(ids)] = ids
        self.positions[: len(ids)] = positions
        self.mask.copy_(mask)
        self.at.fill_(slot)


class _CudaCapture:
    """Captures with torch.cuda.graph; all graphs share one pool of memory, as one of them runs at a time."""

    def __init__(self):
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        beside = torch.cuda.Stream()  # libraries set themselves up in the first runs, which no graph may hold
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def _slots_of_shape(slots: int, most: int) -> int:
    """The least number that occurs and is not below `slots`."""
    part = -(-most // SLOT_SHAPES)
    return min(most, -(-slots // part) * part)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
