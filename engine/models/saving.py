"""Policies and Scorers written as Hugging Face folders."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase, modeling_utils

from engine.files import os_errors
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.safetensors_files import file_order, write_safetensors


def save_model(module: Policy | Scorer, state: dict, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) from gathered weights; one process calls this.

    Raises: OSError, of a full disk too, which the libraries call otherwise.

    Args:
        state: full weights by the names of `module.model`, tied ones once. `Lazy` ones are fetched one after the other,
            but those that a family's files hold in another arrangement than its model (experts of a layer, say), which
            are fetched together.
    """
    model = module.model
    silenced = {name: getattr(model.config, name) for name in module.dropouts}
    vars(model.config).update(module.dropouts)
    try:
        with os_errors():
            with _a_tensor_at_a_time():
                model.save_pretrained(folder, state_dict=dict(state))  # which it takes apart
            tokenizer.save_pretrained(folder)
    finally:
        vars(model.config).update(silenced)


@contextlib.contextmanager
def _a_tensor_at_a_time() -> Iterator[None]:
    """Within this context `save_pretrained` has a file's tensors fetched and written one after the other, where the
    safetensors library takes all of them at once."""
    whole = modeling_utils.safe_save_file
    modeling_utils.safe_save_file = _write
    try:
        yield
    finally:
        modeling_utils.safe_save_file = whole


def _write(tensors: Mapping[str, Tensor], file: str, metadata: Mapping[str, str]) -> None:
    order = sorted(tensors, key=lambda name: file_order(name, tensors[name].dtype))
    with Path(file).open("wb") as opened:
        write_safetensors(opened.write, {name: tensors[name] for name in order}, metadata)
