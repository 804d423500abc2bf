"""Writes Policies and Scorers as Hugging Face folders, either as whole models or as adapters only.

When a whole model is written, its adapter is merged into the matrices, in place or while a file is written: W + alpha /
dim * B A is computed in float32 and cast to W's dtype.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, modeling_utils
from transformers.pytorch_utils import Conv1D

from engine import distributed
from engine.atomic_files import file_order, write_safetensors
from engine.files import os_errors
from engine.lazy import Lazy
from engine.models.adapter_folders import HEAD, PREFIX, WEIGHTS, AdapterFolder, peft_files
from engine.models.adapters import Adapters, is_factor, merged, update
from engine.models.policy import Backbone, Policy, Scorer
from engine.models.reward_formats import STEP_END, as_token_classifier
from engine.zero.gathering import gathered_params, set_parameter, whole_weights


def save_model(module: Policy | Scorer, state: dict, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) from gathered weights. Only one process calls this.

    Raises: OSError. A full disk also raises OSError, although the libraries raise other exceptions for it.

    Args:
        state: {name in `module.model`: full weight}; tied weights occur once. For a model with adapters it is the
            result of `merged_state`, or empty. `Lazy` weights are fetched one after the other. Weights that are
            arranged differently in a family's files and in its model (the experts of a layer, for example) are fetched
            together.
    """
    model, state = module.model, dict(state)  # a copy, since save_pretrained removes entries
    if hasattr(model.config, STEP_END):
        model, state = as_token_classifier(model, state)
    untied = {} if module.adapters is None or module.adapters.tied_head is None else {"tie_word_embeddings": False}
    as_saved = module.replaced | untied
    as_computed = {name: getattr(model.config, name) for name in as_saved}
    vars(model.config).update(as_saved)
    try:
        with os_errors():
            with _as_given():
                model.save_pretrained(folder, state_dict=state)
            save_tokenizer(tokenizer, folder)
    finally:
        vars(model.config).update(as_computed)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write the tokenizer's files without subfolders. If there are several named chat templates, they are written into
    tokenizer_config.json. Decoded texts are cleaned up or not as the tokenizer's files said (`read_tokenizer`)."""
    as_read = copy.copy(tokenizer)
    as_read.clean_up_tokenization_spaces = tokenizer.init_kwargs.get("clean_up_tokenization_spaces", False)
    as_read.save_pretrained(folder, save_jinja_files=not isinstance(tokenizer.chat_template, dict))


def save_adapter(
    module: Policy | Scorer, state: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write a folder with only the adapter, in peft's format. Only one process calls this.

    Args:
        state: the result of `adapter_state`.

    Raises: OSError, also if the disk is full.
    """
    folder = Path(folder)
    with os_errors():
        folder.mkdir(parents=True, exist_ok=True)
        _write({f"{PREFIX}{name}": tensor for name, tensor in state.items()}, folder / WEIGHTS, {"format": "pt"})
        for name, text in adapter_files(module).items():
            (folder / name).write_text(text, encoding="utf-8")
        save_tokenizer(tokenizer, folder)


def adapter_files(module: Policy | Scorer) -> dict[str, str]:
    """{file name: text} of an adapter folder's files other than weights and tokenizer; {} for a model without
    adapters."""
    if module.adapters is None:
        return {}
    assert module.base is not None, "an adapter of a model that was not loaded"
    config, score = module.model.config, None
    if isinstance(module, Scorer):
        score = {"score_offset": getattr(config, "score_offset", 0.0)}
        score |= {"score_position": module.score_position, "pad_token_id": config.pad_token_id}
        score |= {STEP_END: getattr(config, STEP_END)} if hasattr(config, STEP_END) else {}
    return peft_files(module.adapters.configs[module.adapters.own], module.base, score, module.base_contents)


@contextlib.contextmanager
def _as_given() -> Iterator[None]:
    """Within this context `save_pretrained` writes exactly the tensors that it gets, one after the other.

    The safetensors library would hold all tensors of a file in memory at once. transformers would leave out a weight
    that the model ties to another weight; but after an adapter of the output head has been merged, head and embedding
    differ."""
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


BASE = ".base_layer."  # how peft names the original layer within an adapted layer


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Merge an adapter into its base model, one matrix after the other. The base model's weights may be partitioned
    (all ranks call this together)."""
    for name, (a, b) in adapter.factors().items():
        layer = model.get_submodule(name)
        change = update(a, b, adapter.scaling(name, a.shape[0]), transposed=isinstance(layer, Conv1D))
        with gathered_params([layer.weight]):
            whole = merged(layer.weight, change.to(distributed.device()))
        set_parameter(layer.weight, whole)


def merged_state(module: Backbone, state: Mapping[str, Tensor], role: str | None = None) -> dict[str, Tensor]:
    """{name in the model without adapters: weight} of a model with its adapter merged.

    A merged matrix is a `Lazy` tensor: it is computed, from the base model's matrix and its two factors, when it is
    copied. An adapted output head that is tied to the embedding becomes a separate weight.

    state: {name: weight} of `module.model`, from `gathered_state`. role: the role whose adapter is merged; None for the
    module's own role.
    """
    adapters = module.adapters
    if adapters is None:
        return dict(state)
    found = {name: tensor for name, tensor in state.items() if not is_factor(name)}
    for name, tensor in list(found.items()):
        layer, within, rest = name.rpartition(BASE)
        if within:
            del found[name]
            fill = partial(_fill_merged, adapters, tensor, state, layer, role)
            found[f"{layer}.{rest}"] = Lazy.of(tuple(tensor.shape), tensor.dtype, fill) if rest == "weight" else tensor
    head = adapters.tied_head
    if head is not None:  # the head's matrix is listed by the embedding's name, under which it stays unchanged
        shared = adapters.layers[head].get_base_layer().weight
        tensor = state[next(name for name, weight in module.model.named_parameters() if weight is shared)]
        fill = partial(_fill_merged, adapters, tensor, state, head, role)
        found[f"{head}.weight"] = Lazy.of(tuple(tensor.shape), tensor.dtype, fill)
    return found


@torch.no_grad()
def merged_weights(module: Backbone) -> Iterator[tuple[str, Tensor]]:
    """An iterator over the names and weights of `merged_state` for the module's own role. The weights are gathered on
    every rank's device, a bucket at a time. All ranks have to call this and iterate to the end.

    During training, copies of the actor and vLLM get the updated weights from this iterator.
    """
    model, adapters = module.model, module.adapters
    if adapters is None:
        yield from whole_weights(model)
        return
    names, ending = [name for name, _ in model.named_parameters()], f".{adapters.own}.weight"
    factors = dict(whole_weights(model, {name for name in names if is_factor(name) and name.endswith(ending)}))
    head = adapters.tied_head
    shared = None if head is None else adapters.layers[head].get_base_layer().weight
    tied = next((name for name, weight in model.named_parameters() if weight is shared), None)
    for name, weight in whole_weights(model, {name for name in names if not is_factor(name)}):
        layer, within, rest = name.rpartition(BASE)
        if within:
            yield f"{layer}.{rest}", adapters.merged_matrix(layer, weight, factors) if rest == "weight" else weight
        else:
            yield name, weight
        if head is not None and name == tied:
            yield f"{head}.weight", adapters.merged_matrix(head, weight, factors)
        del weight  # frees it before the next bucket is gathered


def adapter_state(module: Backbone, state: Mapping[str, Tensor], role: str | None = None) -> dict[str, Tensor]:
    """{peft's name within the model: tensor} of the factors of a role's adapter, and of a scorer's head.

    state, role: as for `merged_state`.
    """
    assert module.adapters is not None
    ending = f".{role or module.adapters.own}.weight"
    factors = {name: tensor for name, tensor in state.items() if is_factor(name) and name.endswith(ending)}
    found = {f"{name.removesuffix(ending)}.weight": tensor for name, tensor in factors.items()}
    return found | {name: tensor for name, tensor in state.items() if name.startswith(f"{HEAD}.")}


def adapter_holds_all(module: Backbone) -> bool:
    """Whether an adapter folder can hold everything that trains. It can if only factors and a score head train."""
    trained = {name for name, parameter in module.model.named_parameters() if parameter.requires_grad}
    return all(is_factor(name) or name.startswith(f"{HEAD}.") for name in trained)


@torch.no_grad()
def _fill_merged(
    adapters: Adapters, matrix: Tensor, state: Mapping[str, Tensor], name: str, role: str | None, target: Tensor
) -> None:
    weight = torch.empty_like(target, device="cpu")
    weight.copy_(matrix)
    target.copy_(adapters.merged_matrix(name, weight, state, role))
