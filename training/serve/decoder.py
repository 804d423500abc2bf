"""One model's responses, decoded side by side; others may begin while these are under way.

The parts are those of the rollouts: their cache, in which rows come and go, and their passes, recorded on CPUs and as
CUDA graphs on GPUs. Their loop (engine/rollout/decode.py) is another one: it knows all its prompts when it begins,
draws all of them alike, and looks at what was drawn every few tokens only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.rollout.cache import Batch, SlotCache
from engine.rollout.families import takes_slot_masks
from engine.rollout.passes import passes_of
from engine.rollout.request import rows_to_move
from training.data.tokens import padded
from training.serve.drawing import draw
from training.serve.generation import Generation


class Decoder:
    """Decodes the responses of one model, a token of each at a time. All calls come from one thread.

    living: the responses under way, each in the row of the batch that is its place in the list. drawn: tokens of all so
    far.

    Args:
        model: a causal language model in eval mode.
        vocabulary_size: token ids from this on are never drawn.
        rows: how many responses are decoded side by side.
        context: the most tokens that a prompt and its response have together.
        decoding: how single tokens go through the model, one of engine.rollout.passes.DECODING.
    """

    def __init__(
        self, model: PreTrainedModel, pad_id: int, vocabulary_size: int, rows: int, context: int, decoding: str = "auto"
    ):
        self.pad_id, self.vocabulary_size, self.rows, self.context = pad_id, vocabulary_size, rows, context
        self.device = next(model.parameters()).device
        self.living: list[Generation] = []
        self.drawn = 0
        self.cache = SlotCache()
        with torch.inference_mode():
            self.passes = passes_of(model, self.cache, takes_slot_masks(model), decoding)
            self.cache.reserve(rows, context + max(64, context // 4))
            self.slots = self.cache.room.slots
            self._begin()

    @property
    def room(self) -> int:
        """How many responses can begin now."""
        return self.rows - len(self.living)

    @torch.inference_mode()
    def join(self, generations: Sequence[Generation]) -> None:
        """Read the prompts of new responses, at most `room`, and draw their first tokens."""
        ids, mask = (
            tensor.to(self.device)
            for tensor in padded([generation.prompt_ids for generation in generations], self.pad_id, left=True)
        )
        logits = self.passes.prompts(ids, mask, len(self.living), self.batch.slot)
        self.living += generations
        self.batch.join(mask, self._drawn(generations, logits))
        self._leave()

    @torch.inference_mode()
    def step(self) -> None:
        """Draw the next token of each response under way."""
        living, batch = self.living, self.batch
        if not living:
            return
        batch.make_room(1, self.context)  # so that a prompt of any length fits before the slot
        batch.mask[:, batch.slot] = True
        positions = torch.tensor([[generation.read] for generation in living], device=self.device)
        start = batch.slot - max(generation.read for generation in living)  # no living row has a token before it
        logits = self.passes.tokens(batch.pending, positions, batch.mask, start, batch.slot)
        batch.slot += 1
        batch.pending = self._drawn(living, logits)
        self._leave()

    def fail(self, message: str) -> None:
        """End all responses under way for what went wrong, and begin with an empty batch."""
        for generation in self.living:
            generation.fail(message)
        self._begin()

    def _begin(self) -> None:
        self.living = []
        with torch.inference_mode():
            self.batch = Batch(self.cache, self.rows, self.slots, self.context, self.device)

    def _drawn(self, generations: Sequence[Generation], logits: Tensor) -> Tensor:
        """(B, 1) int64: the tokens that these generations, in the order of the logits (B, V), draw and take."""
        logits = logits[:, : self.vocabulary_size]
        settings = [generation.settings for generation in generations]
        uniforms = [generation.uniforms[len(generation.tokens)] for generation in generations]
        tokens = draw(
            logits,
            torch.tensor(uniforms, dtype=torch.float64, device=self.device),
            torch.tensor([each.temperature for each in settings], device=self.device),
            torch.tensor([each.top_p for each in settings], device=self.device),
        )
        self.drawn += len(generations)
        for generation, token, row in zip(generations, tokens.tolist(), logits, strict=True):
            generation.take(token, row)
        return tokens.unsqueeze(1)

    def _leave(self) -> None:
        """Let go of responses that have ended or that nobody wants any more."""
        stays = [not (generation.ended or generation.cancelled) for generation in self.living]
        if all(stays):
            return
        if not any(stays):
            self._begin()
            return
        longest = max(generation.read for generation in self.living)
        sources, targets, kept = rows_to_move(stays)
        for source, target in zip(sources, targets, strict=True):
            self.living[target] = self.living[source]
        del self.living[kept:]
        self.batch.move(sources, targets, kept, longest)
