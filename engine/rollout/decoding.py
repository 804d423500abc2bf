"""The ways single tokens may go through a model."""

from torch import nn

from engine.rollout.cache import SlotCache
from engine.rollout.compiled_passes import CompiledPasses
from engine.rollout.graphed_passes import GraphedPasses
from engine.rollout.passes import Passes
from engine.rollout.recorded_passes import RecordedPasses

DECODING = ("auto", "plain", "recorded", "graphs", "compiled")


def passes_of(model: nn.Module, cache: SlotCache, slot_masks: bool, decoding: str) -> Passes:
    """The passes of this way of decoding (one of DECODING); plain ones where a model cannot do with others, with a
    warning. "auto" takes graphs on GPUs and recorded ones on CPUs. Arguments as in Passes."""
    if decoding == "auto":
        decoding = "graphs" if next(model.parameters()).is_cuda else "recorded"
    kind = {"plain": Passes, "recorded": RecordedPasses, "graphs": GraphedPasses, "compiled": CompiledPasses}[decoding]
    try:
        if kind is not Passes and not slot_masks:
            raise ValueError("it makes the mask of each token itself")
        return kind(model, cache, slot_masks)
    except ValueError as reason:
        plain = Passes(model, cache, slot_masks)
        plain.fall_back(decoding, reason)
        return plain
