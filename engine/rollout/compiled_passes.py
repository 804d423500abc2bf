"""Single tokens by what torch's compiler makes of the model."""

import torch
from torch import Tensor, nn

from engine.rollout.cache import SlotCache
from engine.rollout.passes import Passes, rows_of_shape
from engine.trace import traced


class CompiledPasses(Passes):
    """Passes of single tokens by what torch.compile makes of the model, with CUDA graphs on GPUs.

    Shapes do not change from token to token: passes see all slots, and rows in numbers that halve.
    """

    sees_all_slots, decoding = True, "compiled"

    def __init__(self, model: nn.Module, cache: SlotCache, slot_masks: bool):
        super().__init__(model, cache, slot_masks)

        def step(ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
            return self._forward(ids, mask[:, None, None], positions)

        # Beyond torch's own limit of 8 shapes it would give up for good; rooms may grow, and rows halve, more often.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        self._graphs = next(model.parameters()).is_cuda
        self._step = torch.compile(step, dynamic=False, mode="reduce-overhead" if self._graphs else "default")

    @traced("prompts")
    def prompts(self, ids: Tensor, mask: Tensor, first_row: int, end: int) -> Tensor:
        """As Passes.prompts."""
        logits = super().prompts(ids, mask, first_row, end)
        for tensor in self.cache.tensors() if self._graphs else ():
            torch._dynamo.mark_static_address(tensor)  # else CUDA graphs are not taken of what writes to it
        return logits

    @traced("token")
    def tokens(self, ids: Tensor, positions: Tensor, mask: Tensor, start: int, slot: int) -> Tensor:
        """As Passes.tokens; the rows of the cache that are free compute too, and nobody looks."""
        living, rows = len(ids), rows_of_shape(len(ids), len(mask))
        wide = torch.zeros(rows, 2, dtype=torch.int64, device=ids.device)
        wide[:living, :1], wide[:living, 1:] = ids, positions
        self.cache.window.put_at(slice(0, rows), torch.tensor([slot], device=ids.device), mask.shape[1])
        logits = self._step(wide[:, :1].contiguous(), wide[:, 1:].contiguous(), mask[:rows])
        return logits[:living].clone()  # the next pass writes over it where there are CUDA graphs
