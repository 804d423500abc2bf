"""Policies and Scorers written as Hugging Face folders."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.files import os_errors
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.zero.engines import TrainedModel
from engine.zero.gathering import full_state


def save_model(module: Policy | Scorer, state: dict, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) from gathered weights; one process calls this.

    Raises: OSError, of a full disk too, which the libraries call otherwise.

    Args:
        state: full weights by the names of `module.model`, tied ones once.
    """
    model = module.model
    silenced = {name: getattr(model.config, name) for name in module.dropouts}
    vars(model.config).update(module.dropouts)
    try:
        with os_errors():
            model.save_pretrained(folder, state_dict=state)
            tokenizer.save_pretrained(folder)
    finally:
        vars(model.config).update(silenced)


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
