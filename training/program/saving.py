"""Trained models as Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path

from engine import distributed
from engine.models.saving import save_model
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_state


def save_trained(
    model: TrainedModel, tokenizer, folder: str | Path, edit: Callable[[dict], None] | None = None
) -> Path:
    """Write a trained model as a Hugging Face folder (all ranks call this); returns the folder.

    edit: may change the weights on the way.
    """
    state = full_state(model.module.model)
    if distributed.is_main():
        if edit is not None:
            edit(state)
        save_model(model.module, state, tokenizer, Path(folder))
    distributed.barrier()
    return Path(folder)
