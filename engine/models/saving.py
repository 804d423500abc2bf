"""Policies and Scorers written as Hugging Face folders: whole models, or adapters alone."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase, modeling_utils

from engine.files import os_errors
from engine.models.adapter_folders import PREFIX, WEIGHTS, peft_files
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.safetensors_files import file_order, write_safetensors


def save_model(module: Policy | Scorer, state: dict, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) from gathered weights; one process calls this.

    Raises: OSError, of a full disk too, which the libraries call otherwise.

    Args:
        state: full weights by the names of `module.model`, tied ones once; of a model with adapters what `merged_state`
            gives, or none. `Lazy` ones are fetched one after the other, but those that a family's files hold in another
            arrangement than its model (experts of a layer, say), which are fetched together.
    """
    model = module.model
    untied = {} if module.adapters is None or module.adapters.tied_head is None else {"tie_word_embeddings": False}
    as_saved = module.replaced | untied
    as_computed = {name: getattr(model.config, name) for name in as_saved}
    vars(model.config).update(as_saved)
    try:
        with os_errors():
            with _as_given():
                model.save_pretrained(folder, state_dict=dict(state))  # which it takes apart
            save_tokenizer(tokenizer, folder)
    finally:
        vars(model.config).update(as_computed)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer's files into a folder that has no folders: several named chat templates, which would get one
    of their own, go into tokenizer_config.json."""
    tokenizer.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))


def save_adapter(
    module: Policy | Scorer, state: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write a folder of the adapter alone, as peft and what builds on it open it; one process calls this.

    Args:
        state: what `adapter_state` gives.

    Raises: OSError, of a full disk too.
    """
    folder = Path(folder)
    with os_errors():
        folder.mkdir(parents=True, exist_ok=True)
        _write({f"{PREFIX}{name}": tensor for name, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})
        for name, text in adapter_files(module).items():
            (folder / name).write_text(text, encoding="utf-8")
        save_tokenizer(tokenizer, folder)


def adapter_files(module: Policy | Scorer) -> dict[str, str]:
    """What stands in an adapter's folder beside weights and tokenizer, by name; {} for a model without adapters."""
    if module.adapters is None:
        return {}
    assert module.base is not None, "an adapter of a model that was not loaded"
    config, score = module.model.config, None
    if isinstance(module, Scorer):
        score = {"score_offset": getattr(config, "score_offset", 0.0)}
        score |= {"score_position": module.score_position, "pad_token_id": config.pad_token_id}
    return peft_files(module.adapters.configs[module.adapters.own], module.base, score, module.base_contents)


@contextlib.contextmanager
def _as_given() -> Iterator[None]:
    """Within this context `save_pretrained` has a file's tensors fetched and written one after the other, where the
    safetensors library takes all of them at once; and it leaves none out as tied, since such come once, and two are to
    be written where the model has one with an adapter beside it."""
    whole, without_tied = modeling_utils.safe_save_file, modeling_utils.remove_tied_weights_from_state_dict
    modeling_utils.safe_save_file = _write
    modeling_utils.remove_tied_weights_from_state_dict = lambda state_dict, model: state_dict
    try:
        yield
    finally:
        modeling_utils.safe_save_file = whole
        modeling_utils.remove_tied_weights_from_state_dict = without_tied


def _write(tensors: Mapping[str, Tensor], file: str | Path, metadata: Mapping[str, str]) -> None:
    order = sorted(tensors, key=lambda name: file_order(name, tensors[name].dtype))
    with Path(file).open("wb") as opened:
        write_safetensors(opened.write, {name: tensors[name] for name in order}, metadata)
