"""Policies and Scorers written as Hugging Face folders."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine.files import os_errors
from engine.models.policy import Policy
from engine.models.scorer import Scorer


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
