"""Loads Policy and Scorer modules from folders or from names on the Hub.

If a path is an adapter folder, the base model is loaded, and the adapter is merged into it: W + alpha / dim * B A is
computed in float32, then cast. With `merge` False the base model is left unchanged, and the module's attribute `start`
is the adapter, which the caller still has to add.

Transformers loads the weights; under ZeRO-3 it loads each weight into partitions. Two checks show that the result is
right. `other_weights` compares some numbers of every loaded weight with the files. `check_padding` tests that a model
gives the same results for a row alone, beside longer rows, and without padding.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from engine import distributed
from engine.errors import SharedError, UserError
from engine.experience import position_ids
from engine.host_memory import releasing_freed_memory
from engine.models.adapter_folders import HEAD, AdapterFolder, read_adapter
from engine.models.attention import USUAL, Attention, fixed_rope
from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.config_and_tokenizer import (
    CLASSIFIER,
    LANGUAGE_MODEL,
    classifier_pad_token_id,
    model_class,
    read_config,
    read_tokenizer,
)
from engine.models.model_paths import base_of
from engine.models.policy import Backbone, Policy, Scorer
from engine.models.reward_formats import (
    STEP_END,
    deepspeed_chat_names,
    deepspeed_chat_state,
    process_state,
    renamed_state,
    take_pad_token,
    take_settings,
)
from engine.models.saving import merge_adapter
from engine.models.weight_files import (
    Misfit,
    key_mapping,
    listed,
    mapped_tensors,
    read_by_pieces,
    restore_buffers,
    stored_name,
    weights_folder,
)
from engine.zero.gathering import (
    full_shape,
    gathered_params,
    is_partitioned,
    own_part,
    own_run,
    set_parameter,
)
from engine.zero.partitioned_loading import partitioned_loading

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_OUTPUTS = {"output_router_logits": False, "output_hidden_states": False, "return_dict": True}


def as_computed(config, dropout: float = 0.0, max_length: int | None = None) -> tuple[Any, dict[str, Any]]:
    """Replace those settings of a configuration that the program decides: every dropout probability is set to
    `dropout`, the angles of positions depend on no other row (`fixed_rope`), and the extra outputs of forward passes
    are switched off. (If a mixture of experts returns router logits, it also computes a balancing loss, which is not
    trained here and fails for single tokens.)

    Returns: (the configuration, {name: replaced value}). The saved model gets the replaced values back.
    """
    drops = {name: dropout for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    outputs = {name: value for name, value in _OUTPUTS.items() if hasattr(config, name)}
    changed = drops | outputs | fixed_rope(config, max_length)
    found = {name: getattr(config, name) for name in changed}
    vars(config).update(changed)
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
    """The causal language model at `path`, partitioned while it loads if `ds_config` is for stage 3.

    Args:
        dtype: the dtype of the weights. It has no default, because without a dtype stage 3 would load the checkpoint's
            dtype, unlike stages 0 to 2.
        what: what messages call the model.
        dropout: the value that replaces every dropout probability of the model's configuration. Dropout has an effect
            in train mode only.
        trust_remote_code: as for `read_config`.
        merge: whether an adapter at `path` is merged into its base.
        attention: how the model's attention is computed.

    Raises: UserError in the cases of `check_policy`, and if weights are NaN or infinite.
    """
    config, replaced = as_computed(check_policy(path, what, trust_remote_code), dropout, attention.max_length)
    adapter, base = read_adapter(path, what), base_of(path, what)
    kind = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)
    untied = merge and adapter is not None and adapter.changes_tied_head(config, kind)
    if untied:
        config.tie_word_embeddings = False
    model = _loaded(kind, base, config, dtype, ds_config, what, attention, untied=untied)
    if not Path(base).is_dir():  # a name on the Hub; its files have now been fetched
        known = check_policy(path, what, trust_remote_code)
        if not untied and getattr(known, "tie_word_embeddings", False) != getattr(config, "tie_word_embeddings", False):
            return load_policy(path, dtype, ds_config, what, dropout, trust_remote_code, merge, attention)
    model.generation_config = saveable(model.generation_config)
    return _started(Policy(model, replaced), base, adapter, merge, attention)


def load_scorer(
    path: str,
    dtype: torch.dtype,
    ds_config: dict | None = None,
    what: str = "reward model",
    trust_remote_code: bool = False,
    merge: bool = True,
    attention: Attention = USUAL,
) -> Scorer:
    """The reward model or critic at `path`, with dropout off. If `ds_config` is for stage 3, it is partitioned while it
    loads.

    The model may have been saved by this program; it may be any decoder-only classifier whose head has one row; it may
    have DeepSpeed-Chat's or OpenRLHF's format; or it may be a process reward model, a token classifier with two labels.
    Its number at a token is the log-odds of label 1.

    Raises: UserError in the cases of `check_scorer`, and if weights are NaN or infinite.
    """
    form = check_scorer(path, what, trust_remote_code)
    adapter, base = read_adapter(path, what), base_of(path, what)
    config, replaced = as_computed(read_config(path, what, trust_remote_code), 0.0, attention.max_length)
    config.num_labels = 1
    kind = model_class(config, CLASSIFIER, path, what, trust_remote_code)
    if form == "deepspeed_chat":
        take_pad_token(config, base, what, trust_remote_code)
        state: dict | None = deepspeed_chat_state(base, kind.base_model_prefix)
    elif form == "token_classification":
        state, config.score_offset = process_state(base, what)
        vars(config).pop(STEP_END, None)  # a critic that starts from it is saved as a critic
    else:
        state = renamed_state(base, config, what)
    gain = take_settings(config)
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
    """A new reward model for training: the layers of the language model at `path`, and a head drawn from N(0, 1 /
    sqrt(d + 1)).

    Source of the head's scale: Stiennon et al. 2020 (openai/summarize-from-feedback) and
    openai/lm-human-preferences cbfd210b, both by way of vwxyzjn/summarize_from_feedback_details ee77a9ab.

    Args:
        pad_token_id: the tokenizer's pad token; None if the pad token is also EOS, so that Hugging Face's own pooling
            cannot take a final EOS for padding.
        seed: the seed with which the head is drawn; None for a head of zeros.
        dropout: the value that replaces every dropout probability of the trunk. Dropout has an effect in train mode
            only.
        scale: the factor by which the head is multiplied.

    Raises: UserError in the cases of `check_trunk`, and if weights are NaN or infinite.
    """
    config, replaced = as_computed(check_trunk(path, what, trust_remote_code), dropout, attention.max_length)
    take_settings(config)  # settings of a reward model's head, which is replaced
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
    """A critic that does not start from a reward model: the layers of the language model at `path` and a head of zeros.

    The head begins at zero as in openai/lm-human-preferences cbfd210b: a random head would add noise as large as the
    scores to the first advantages. The first update changes the head only; from the second update on the layers learn
    too.
    """
    tokenizer = read_tokenizer(path, what, trust_remote_code=trust_remote_code)
    pad = classifier_pad_token_id(tokenizer)
    return new_scorer(
        path, dtype, pad, None, ds_config, what, trust_remote_code=trust_remote_code, merge=merge, attention=attention
    )


def _started(module: Backbone, base: str, adapter: AdapterFolder | None, merge: bool, attention: Attention):
    """The module, with `adapter` merged into its weights if `merge`; otherwise the adapter becomes the attribute
    `start`, from which training goes on. base: the path of the base model's weights."""
    module.base = base
    module.pack(attention.packs_rows_of(module.model))
    module.may_pad = attention.packing == "auto"
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
    """A model of class `kind` with the weights at `path`, or with the weights in `state` (all ranks call this
    together).

    new_head: whether the score head may be missing in the files, because a new head is drawn. untied: whether the
    output head may be missing in the files because the model's configuration ties it to the embedding; the head then
    becomes a copy of the embedding.

    Raises: SharedError if a weight is missing, a loaded weight differs from the files, or a number is NaN or infinite.
    """
    source = path if state is None else None
    how = attention.prepare(kind, config, dtype)
    with releasing_freed_memory(), read_by_pieces(), partitioned_loading(ds_config):
        model, info = kind.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            state_dict=state,
            key_mapping=key_mapping(config),
            output_loading_info=True,
            trust_remote_code=False,
            **how,
        )
    if hasattr(config, "text_part_of"):
        # Otherwise the model would be saved with the names that it has within the composite model.
        vars(model).pop("_weight_conversions", None)
    if dtype != torch.float32 and is_partitioned(next(model.parameters())):
        restore_buffers(model, dtype)
    misfit, message = replace(Misfit.of(info), left_over=()), None  # the headers were checked for this before
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
    """Raise UserError if this rank's part of a weight has NaN or infinite numbers; the message names these weights."""
    parts = ((name, own_part(parameter).detach()) for name, parameter in model.named_parameters())
    # The check uses minimum and maximum, which are NaN if any number is NaN; torch.isfinite would allocate twice a
    # weight's size.
    bad = [name for name, part in parts if part.numel() and not all(map(torch.isfinite, torch.aminmax(part)))]
    if bad:
        why = " Numbers over 65504 do not fit into fp16: try --dtype bf16." if dtype == torch.float16 else ""
        raise UserError(
            f"{what}: NaN or infinite numbers are in {len(bad)} of the weights in {path} ({listed(bad)}).{why} "
            "Give a model whose training did not fail, or write it again."
        )


def _refuse_other_weights(model: Any, path: str, what: str) -> None:
    """Raise UserError if this rank's part of a weight differs from the files at `path`; the message names these
    weights."""
    folder = weights_folder(path)
    assert folder is not None, "they were loaded from there"
    stored = mapped_tensors(folder, what)
    names = deepspeed_chat_names(stored, model.base_model_prefix)
    bad = other_weights(model, {names[name]: tensor for name, tensor in stored.items()})
    if bad:
        raise UserError(
            f"{what}: {len(bad)} of the weights that were loaded differ from those in {path} ({listed(bad)}). "
            "Open the folder with transformers' from_pretrained, write it anew with save_pretrained, and give that."
        )


def saveable(given: GenerationConfig) -> GenerationConfig:
    """The generation_config that is saved with a model that was loaded with this one.

    transformers reads some that it refuses to write, such as Llama 2's with its temperature: then do_sample is turned
    on, which temperature and top_p imply. If this does not help, the tokens that end and pad a text are kept alone.
    """
    for changes in ({}, {"do_sample": True}):
        found = copy.deepcopy(given)
        vars(found).update(changes)
        with contextlib.suppress(ValueError):
            found.validate(strict=True)
            return found
    return GenerationConfig(eos_token_id=given.eos_token_id, pad_token_id=given.pad_token_id)


SAMPLE = 64  # how many numbers of each weight are compared


def other_weights(model: nn.Module, stored: Mapping[str, Tensor]) -> list[str]:
    """The names of the weights that differ from the files. SAMPLE evenly spaced numbers of this rank's part of each
    weight are compared, in the dtype to which the weight was cast.

    A tied weight is compared under each of its names. Weights that the files store in another arrangement (the experts
    of a layer, for example), or not at all (a new head), are not compared. stored: {name: tensor} of the files.
    """
    found = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        other = stored_name(name, model, stored)
        if other is None or (given := stored[other]).shape != full_shape(weight):
            continue
        start, length = own_run(weight) if is_partitioned(weight) else (0, weight.numel())
        places = torch.arange(SAMPLE) * (length - 1) // (SAMPLE - 1)
        if length > 0:
            numbers = own_part(weight).detach().reshape(-1)[places.to(weight.device)]
            if not torch.equal(numbers.cpu(), given.reshape(-1)[start + places].to(numbers.dtype)):
                found.append(name)
    return found


SHORT, LONG = 5, 8  # the number of tokens of the compared row, and of the row beside it


@torch.no_grad()
def check_padding(module: Backbone, call: Callable[..., Tensor | tuple[Tensor, Tensor]], what: str) -> None:
    """Compare the results for a row alone, beside a longer row, and without padding (all ranks call this together). The
    longer row has the last positions that the model knows.

    Args:
        call: the forward pass of the module within its engine.
        what: what messages call the model.

    If rows without padding give other results, the module pads rows from then on if it may (`may_pad`).

    Raises: SharedError if the row has other results beside the longer one, or rows without padding give other results
        and were asked for.
    """
    packs, training = module.packs, module.training
    module.eval()
    module.pack(False)
    padded = _answers(module, call, LONG)
    if not _same(module, padded[:1], _answers(module, call, SHORT)):
        name = module.model.base_model.config._attn_implementation
        raise SharedError(
            f"{what}: with --attn_implementation {name} a row has other results beside a longer one than alone: this "
            "model attends to padding, or its positions depend on the other rows. Give sdpa or eager, or another model."
        )
    module.pack(packs)
    if packs and not _same(module, _answers(module, call, LONG), padded):
        if not module.may_pad:
            raise SharedError(
                f"{what}: this model reads rows without padding otherwise than padded ones. Leave --packing packed and "
                "--sequence_parallel_size out."
            )
        module.pack(False)
    module.train(training)


def _answers(module: Backbone, call: Callable, width: int) -> Tensor:
    """(1 or 2, n) float32, the log-probs or scores of the last tokens of a short row, and of a long row if `width`
    leaves room for one."""
    device = distributed.device()
    row = torch.arange(1, LONG + 1, device=device) * 7919 % module.model.config.get_text_config().vocab_size
    sequences = torch.stack([row, row.flip(0)] if width == LONG else [row])[:, -width:]
    mask = torch.ones_like(sequences)
    mask[0, : width - SHORT] = 0
    positions = position_ids(mask)
    positions[1:] += max((getattr(module.model.config, "max_position_embeddings", None) or 0) - LONG, 0)
    given = sequences, mask, positions
    if isinstance(module, Policy):
        return call(*given, response_length=SHORT - 1)[0]
    return call(*given)[:, -SHORT:]


def _same(module: Backbone, found: Tensor, expected: Tensor) -> bool:
    """Whether the results `found` equal `expected` on all ranks, within the rounding of the weights' dtype. NaN equals
    NaN here: the first step tells of it."""
    largest = float(expected.nan_to_num().abs().max().clamp(min=1.0))
    tolerance = torch.finfo(next(module.parameters()).dtype).eps ** 0.5 * largest
    return not distributed.any_rank(not torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True))
