"""Policy and Scorer modules from the folders, or names on the Hub, where their models stand.

An adapter's folder is loaded as its base, with the adapter merged into it: W + alpha / dim * B A in float32, then cast.
With `merge` False the base stays as it is, and the module's `start` says which adapter is still to be given to it.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from engine import distributed
from engine.errors import SharedError, UserError
from engine.host_memory import freed_memory_given_back
from engine.models.adapter_folders import HEAD, AdapterFolder, read_adapter
from engine.models.attention import USUAL, Attention
from engine.models.backbone import Backbone
from engine.models.buffers import restore_buffers
from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.classes import CLASSIFIER, LANGUAGE_MODEL, model_class
from engine.models.deepspeed_chat import deepspeed_chat_names, deepspeed_chat_state, take_pad_token
from engine.models.fit import Misfit, listed
from engine.models.loaded_check import other_weights
from engine.models.merging import merge_adapter
from engine.models.on_disk import read_by_pieces
from engine.models.openrlhf import renamed_state, take_settings
from engine.models.pad_tokens import classifier_pad_token_id
from engine.models.places import base_of
from engine.models.policy import Policy
from engine.models.reading import read_config, read_tokenizer
from engine.models.scorer import Scorer
from engine.models.weight_files import mapped_tensors, weights_folder
from engine.zero.gathering import gathered_params, is_partitioned, own_part, set_parameter
from engine.zero.partitioned_loading import partitioned_loading

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OUTPUTS = {"output_router_logits": False, "output_hidden_states": False, "return_dict": True}


def as_computed(config, dropout: float = 0.0) -> tuple[Any, dict[str, Any]]:
    """Replace in a configuration what training decides: every dropout probability, and what forward passes return
    beside their result (a mixture of experts that is asked for router logits computes a balancing loss with them, which
    nothing here trains, and fails at single tokens).

    Returns: the configuration, and what stood there, by name, for the saved model.
    """
    drops = {name: dropout for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    outputs = {name: value for name, value in _OUTPUTS.items() if hasattr(config, name)}
    found = {name: getattr(config, name) for name in drops | outputs}
    vars(config).update(drops | outputs)
    return config, found


def load_policy(
    path: str,
    dtype: torch.dtype,
    ds_config: dict | None = None,
    what: str = "model",
    dropout: float = 0.0,
    trust_remote_code: bool = False,
    merge: bool = True,
    attention: Attention = USUAL,
) -> Policy:
    """The causal language model at `path`, partitioned while it loads where `ds_config` is for stage 3.

    Args:
        dtype: always given, because otherwise stage 3 would load another one (the checkpoint's own) than stages 0 to 2.
        what: how messages name the model.
        dropout: replaces every dropout probability of the model's configuration; it counts in train mode only.
        trust_remote_code: as for `read_config`.
        merge: whether an adapter at `path` is merged into its base.
        attention: which code computes its attention.

    Raises: UserError as `check_policy` does, and for weights that are NaN or infinite.
    """
    config, replaced = as_computed(check_policy(path, what, trust_remote_code), dropout)
    adapter, base = read_adapter(path, what), base_of(path, what)
    kind = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)
    untied = merge and adapter is not None and adapter.changes_tied_head(config, kind)
    if untied:
        config.tie_word_embeddings = False
    model = _loaded(kind, base, config, dtype, ds_config, what, attention, untied=untied)
    if not Path(base).is_dir():  # of a name on the Hub, now that its files are here
        known = check_policy(path, what, trust_remote_code)
        if not untied and getattr(known, "tie_word_embeddings", False) != getattr(config, "tie_word_embeddings", False):
            return load_policy(path, dtype, ds_config, what, dropout, trust_remote_code, merge, attention)
    _make_saveable(model)
    return _started(Policy(model, replaced), base, adapter, merge, attention)


def empty_like(module: Policy | Scorer, device: torch.device) -> Policy | Scorer:
    """An unpartitioned, frozen module of the same architecture and dtype, whose weights are still to be filled in."""
    dtype = next(module.parameters()).dtype
    with torch.device(device):
        model = type(module.model)._from_config(module.model.config, dtype=dtype)
    return module.with_model(model).to(device).requires_grad_(False).eval()


def load_scorer(
    path: str,
    dtype: torch.dtype,
    ds_config: dict | None = None,
    what: str = "reward model",
    trust_remote_code: bool = False,
    merge: bool = True,
    attention: Attention = USUAL,
) -> Scorer:
    """The reward model or critic at `path`, dropout off; partitioned while it loads where `ds_config` is for stage 3.

    It may be ours, any decoder-only classifier whose head has one row, or one in DeepSpeed-Chat's or OpenRLHF's format.

    Raises: UserError as `check_scorer` does, and for weights that are NaN or infinite.
    """
    form = check_scorer(path, what, trust_remote_code)
    adapter, base = read_adapter(path, what), base_of(path, what)
    config, replaced = as_computed(read_config(path, what, trust_remote_code), 0.0)
    config.num_labels = 1
    kind = model_class(config, CLASSIFIER, path, what, trust_remote_code)
    if form == "deepspeed_chat":
        take_pad_token(config, base, what, trust_remote_code)
        state: dict | None = deepspeed_chat_state(base, kind.base_model_prefix)
    else:
        state = renamed_state(base, config, what)
    gain = take_settings(config, base, what)
    if adapter is not None:
        vars(config).update(adapter.settings())
    model = _loaded(
        kind, base, config, dtype, ds_config, what, attention, new_head=form == "language_model", state=state
    )
    if not Path(base).is_dir():
        check_scorer(path, what, trust_remote_code)
    scorer = Scorer(model, replaced)
    if gain != 1:
        weight = scorer.model.score.weight
        with gathered_params([weight]):
            scaled = gain * weight.detach().float()
        set_parameter(weight, scaled)
    if adapter is not None and adapter.has_head:
        set_parameter(scorer.model.score.weight, adapter.tensors()[f"{HEAD}.weight"])
    return _started(scorer, base, adapter, merge, attention)


def new_scorer(
    path: str,
    dtype: torch.dtype,
    pad_token_id: int | None,
    seed: int | None,
    ds_config: dict | None = None,
    what: str = "model",
    dropout: float = 0.0,
    scale: float = 1.0,
    trust_remote_code: bool = False,
    merge: bool = True,
    attention: Attention = USUAL,
) -> Scorer:
    """A reward model to be trained: the trunk of the language model at `path`, and a head drawn from
    N(0, 1 / sqrt(d + 1)).

    Source of the head's scale: Stiennon et al. 2020 (openai/summarize-from-feedback) and
    openai/lm-human-preferences cbfd210b, both by way of vwxyzjn/summarize_from_feedback_details ee77a9ab.

    Args:
        pad_token_id: the tokenizer's pad token; None where it doubles as EOS, so that Hugging Face's own pooling
            cannot take a final EOS for padding.
        seed: of the head; None for a head of zeros.
        dropout: replaces every dropout probability of the trunk; it counts in train mode only.
        scale: multiplies the head.

    Raises: UserError as `check_trunk` does, and for weights that are NaN or infinite.
    """
    config, replaced = as_computed(check_trunk(path, what, trust_remote_code), dropout)
    take_settings(config, path, what)  # of a reward model's head, which goes
    config.num_labels, config.pad_token_id = 1, pad_token_id
    config.score_position, config.score_offset = "last", 0.0
    kind = model_class(config, CLASSIFIER, path, what, trust_remote_code)
    adapter, base = read_adapter(path, what), base_of(path, what)
    model = _loaded(kind, base, config, dtype, ds_config, what, attention, new_head=True)
    if not Path(base).is_dir():
        check_trunk(path, what, trust_remote_code)
    scorer = _started(Scorer(model, replaced), base, adapter, merge, attention)
    width = scorer.model.score.in_features
    fresh = torch.zeros(1, width)
    if seed is not None:
        fresh = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width + 1)
    set_parameter(scorer.model.score.weight, scale * fresh)
    return scorer


def new_critic(
    path: str,
    dtype: torch.dtype,
    ds_config: dict | None = None,
    what: str = "model",
    trust_remote_code: bool = False,
    merge: bool = True,
    attention: Attention = USUAL,
) -> Scorer:
    """A critic where there is no reward model to start from: the language model's trunk and a head of zeros.

    Zeros, as openai/lm-human-preferences cbfd210b has for its values: a random head would add noise of the scores' own
    size to the first advantages. The first update moves the head alone, and from then on the trunk learns too.
    """
    tokenizer = read_tokenizer(path, what, trust_remote_code=trust_remote_code)
    pad = classifier_pad_token_id(tokenizer)
    return new_scorer(
        path,
        dtype,
        pad,
        None,
        ds_config,
        what,
        trust_remote_code=trust_remote_code,
        merge=merge,
        attention=attention,
    )


def _started(module: Backbone, base: str, adapter: AdapterFolder | None, merge: bool, attention: Attention):
    """The module with the adapter in it, or to be given to it; base: where the rest was loaded from."""
    module.base = base
    module.pack(attention.packs_rows_of(type(module.model)))
    if adapter is not None and merge:
        merge_adapter(module.model, adapter)
        module.merged = adapter
    elif adapter is not None:
        module.start = adapter
    return module


def _loaded(
    kind,
    path: str,
    config,
    dtype: torch.dtype,
    ds_config: dict | None,
    what: str,
    attention: Attention,
    new_head=False,
    state=None,
    untied=False,
) -> nn.Module:
    """A model of class `kind` with the weights at `path`, or of `state` (all ranks call this).

    new_head: whether the score head may be missing, as it is drawn anew. untied: whether the output head may be, and
    then becomes a copy of the embedding, which it is by the model's own configuration.

    Raises: SharedError where the real load misses a weight, has another one than the files, or a number is NaN or
    infinite.
    """
    source = path if state is None else None
    with freed_memory_given_back(), read_by_pieces(), partitioned_loading(ds_config):
        model, info = kind.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            state_dict=state,
            output_loading_info=True,
            trust_remote_code=False,
            **attention.arguments,
        )
    if dtype != torch.float32 and is_partitioned(next(model.parameters())):
        restore_buffers(model, dtype)
    misfit, message = replace(Misfit.of(info), left_over=()), None  # which the look at the headers has judged
    if new_head:
        misfit = replace(misfit, missing=tuple(name for name in misfit.missing if not name.startswith("score.")))
    head = model.get_output_embeddings() if untied else None
    if head is not None and (name := _name_of(model, head.weight)) in misfit.missing:
        misfit = replace(misfit, missing=tuple(missing for missing in misfit.missing if missing != name))
        embedding = model.get_input_embeddings().weight
        with gathered_params([embedding]):
            set_parameter(head.weight, embedding.detach().clone())
    try:
        misfit.refuse(path, what)
        _refuse_not_finite(model, path, dtype, what)
        _refuse_other_weights(model, path, what)
    except UserError as error:
        message = str(error)
    messages = [text for text in distributed.all_gather_objects(message) if text is not None]
    if messages:
        raise SharedError(messages[0])
    return model


def _name_of(model: nn.Module, wanted: nn.Parameter) -> str:
    return next(name for name, parameter in model.named_parameters() if parameter is wanted)


def _refuse_not_finite(model: nn.Module, path: str, dtype: torch.dtype, what: str) -> None:
    """Raise UserError, naming them, where weights of this rank's part are NaN or infinite."""
    parts = ((name, own_part(parameter).detach()) for name, parameter in model.named_parameters())
    # By the extremes, which are NaN where a number is: torch.isfinite makes tensors of twice a weight's size.
    bad = [name for name, part in parts if part.numel() and not all(map(torch.isfinite, torch.aminmax(part)))]
    if bad:
        why = " Numbers over 65504 do not fit into fp16: try --dtype bf16." if dtype == torch.float16 else ""
        raise UserError(
            f"{what}: NaN or infinite numbers stand in {len(bad)} of the weights in {path} ({listed(bad)}).{why} "
            "Give a model whose training did not fail, or write it again."
        )


def _refuse_other_weights(model: Any, path: str, what: str) -> None:
    """Raise UserError, naming them, where weights of this rank's part are not those of the files at `path`."""
    folder = weights_folder(path)
    assert folder is not None, "they were loaded from there"
    stored = mapped_tensors(folder, what)
    names = deepspeed_chat_names(stored, model.base_model_prefix)
    bad = other_weights(model, {names[name]: tensor for name, tensor in stored.items()})
    if bad:
        raise UserError(
            f"{what}: {len(bad)} of the weights that were loaded are not those that stand in {path} ({listed(bad)}). "
            "Open the folder with transformers' from_pretrained, write it anew with save_pretrained, and give that."
        )


def _make_saveable(model) -> None:
    """Mend a generation_config that transformers reads but refuses to write, as Llama-2's is.

    Otherwise saving would fail, at the end of the run. Sampling does not use the generation_config.
    """
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True  # what its temperature and top_p meant
        try:
            generation.validate(strict=True)
        except ValueError:
            model.generation_config = GenerationConfig(
                eos_token_id=generation.eos_token_id, pad_token_id=generation.pad_token_id
            )
