"""Packs rows, and chooses the implementation that computes attention. Packed rows are rows without padding,
concatenated into one row.

    rows = PackedRows(attention_mask)                              # (B, S), N of its tokens real
    inputs = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids)}
    hidden = trunk(**inputs, **rows.arguments(BY_ROW))
    by_token = rows.padded(hidden)                                 # (1, N, d) -> (B, S, d)

Position ids begin again with each row. A kernel for rows of various lengths gets the starts of the rows (`cu_seq_lens`
in transformers). Torch's own attention (`BY_ROW`) has such a kernel on some GPUs. Elsewhere it is called row by row, so
that it computes only those pairs of tokens that a padded batch would compute too. Source of packing: Krell et al. 2021
(Efficient Sequence Packing without Cross-contamination); transformers, modeling_flash_attention_utils.py.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, LinearAttentionCacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from engine import distributed
from engine.errors import UserError
from engine.models.config_and_tokenizer import head_sizes, model_class, read_config
from engine.zero.accelerator import capability, device, on_gpu

BY_ROW = "sdpa_by_row"
"""The name under which transformers' attention functions list torch's own attention, computed within each row."""


class PackedRows:
    """Where the real tokens of a padded batch are, for converting between padded and packed rows.

    Args:
        attention_mask: (B, S) int64, 1 on real tokens.
    """

    def __init__(self, attention_mask: Tensor):
        self.real = attention_mask.bool()
        self.places = self.real.flatten().nonzero().squeeze(-1)  # (N,)
        self.lengths: list[int] = self.real.sum(-1).tolist()

    def arguments(self, implementation: str) -> dict[str, Any]:
        """The keyword arguments of a model's forward pass that tell its attention where rows begin and end.

        implementation: the name of one of transformers' attention functions.
        """
        filled = [length for length in self.lengths if length]
        starts = F.pad(torch.tensor(filled, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        starts = starts.to(self.places.device, non_blocking=True)
        if implementation == BY_ROW:
            return {"row_lengths": filled, "row_starts": starts}
        longest = max(filled)
        return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}

    def packed(self, tensor: Tensor) -> Tensor:
        """(B, S, ...) -> (1, N, ...): the entries of the real tokens, row after row."""
        return tensor.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def padded(self, tensor: Tensor) -> Tensor:
        """(1, N, ...) -> (B, S, ...): the entries at the positions of the real tokens, with zeros at padding."""
        whole = tensor.new_zeros(self.real.numel(), *tensor.shape[2:])
        return whole.index_copy(0, self.places, tensor.squeeze(0)).unflatten(0, self.real.shape)

    def predicting(self, response_length: int) -> Tensor:
        """(B, S) bool: the real tokens whose next token is real and one of the last `response_length`."""
        found = torch.zeros_like(self.real)
        found[:, -response_length - 1 : -1] = self.real[:, -response_length - 1 : -1] & self.real[:, -response_length:]
        return found


def _attention_by_row(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    row_starts: Tensor | None = None,
    split: Any = None,
    sliding_window: int | None = None,
    **how,
) -> tuple[Tensor, None]:
    """Torch's attention within each packed row, (1, heads, N, d) -> (1, N, heads, d): by one kernel for all rows if
    this rank's device has one and `row_starts` are given, otherwise row by row. A batch without `row_lengths` has
    padding, and is computed as in transformers.

    split: the SplitRows (engine/models/sequence_parallel.py) of which query, key and value are a slice, or None.
    """
    if split is not None:
        query, key, value = split.heads_for_tokens(query, key, value)
        # The module may generate too, with all its heads: it stays as it is.
        heads = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
        how |= {"sliding_window": sliding_window}
        output, _ = _attention_by_row(heads, query, key, value, None, row_lengths, row_starts, **how)
        return split.tokens_for_heads(output), None
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if row_lengths is None:
        return own(module, query, key, value, attention_mask, sliding_window=sliding_window, **how)
    if how.get("position_bias") is not None:
        raise ValueError("a bias of positions belongs to padded rows")
    plain = key.shape == value.shape and not how.get("dropout") and how.get("softcap") is None
    if row_starts is not None and plain and has_kernel(query.dtype, query.shape[1], key.shape[1], query.shape[3]):
        longest, scale = max(row_lengths), how.get("scaling")
        return _attention_of_rows(query, key, value, row_starts, longest, scale, sliding_window), None
    rows = zip(*(tensor.split(list(row_lengths), 2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for parts in rows:
        mask = _window(parts[0], sliding_window)
        outputs.append(own(module, *parts, mask, sliding_window=sliding_window, **how)[0])
    return torch.cat(outputs, 1), None


def _attention_of_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    """Torch's kernel for rows of various lengths, (1, heads, N, d) -> (1, N, heads, d).

    Source: torch/nn/attention/varlen.py. Torch 2.9 has none, 2.10's takes no scale and no window, 2.11's needs not be
    told that heads share keys. Its window is the number of tokens before a token, transformers' counts the token too.

    starts: (rows + 1,) int32, where each row begins among the N tokens, and N. longest: tokens of the longest row.
    """
    from torch.nn.attention.varlen import varlen_attn

    kernel: Any = varlen_attn
    how: dict[str, Any] = {"scale": scale, "window_size": (window - 1 if window else -1, 0)}
    if "enable_gqa" in kernel.__kwdefaults__:
        how["enable_gqa"] = True
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return kernel(query, key, value, starts, starts, longest, longest, **how).unsqueeze(0)


@lru_cache
def has_kernel(dtype: torch.dtype, heads: int, kept: int, width: int) -> bool:
    """Whether torch has a kernel for rows of various lengths on this rank's device, for heads of this dtype and width
    of which `kept` have keys and values of their own. A trial decides: outputs and gradients of three short rows,
    with and without a window, have to be those of `_attention_by_row` within rounding."""
    if not on_gpu():
        return False
    place = device()
    lengths = [1, 9, 70]
    tolerance = 8 * torch.finfo(dtype).eps
    module = SimpleNamespace(num_key_value_groups=heads // kept)
    unseen = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:  # a layer that is checkpointed counts the tensors which are saved in it, and shall not count these
        with torch.inference_mode(False), torch.enable_grad(), unseen:
            starts = torch.tensor([0, 1, 10, 80], dtype=torch.int32, device=place)
            draw = partial(torch.randn, generator=torch.Generator(place).manual_seed(0), device=place)
            query, key, value = given = [draw(1, n, 80, width).to(dtype).requires_grad_() for n in (heads, kept, kept)]
            weights = draw(1, 80, heads, width).to(dtype)
            for window in (None, 4):
                outputs = (
                    _attention_by_row(module, query, key, value, None, lengths, sliding_window=window)[0],
                    _attention_of_rows(query, key, value, starts, max(lengths), None, window),
                )
                pairs = zip(*((output, *torch.autograd.grad(output, given, weights)) for output in outputs))
                if not all((found - own).norm() <= tolerance * own.norm() for own, found in pairs):
                    return False
    except Exception:  # another torch, GPU, dtype or width: each raises an error of its own
        return False
    return True


def _window(query: Tensor, width: int | None) -> Tensor | None:
    """(1, 1, L, L) bool, the tokens that each token may attend to in a sliding window; None if each token may attend to
    all tokens before it."""
    length = query.shape[2]
    if not width or length <= width:  # qwen2_moe has windows of 0, which limit nothing
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - width)[None, None]


def _mask_by_row(*args, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **how):
    """The mask that sdpa gets for a padded batch. For packed rows transformers passes no attention mask, and the result
    is None, because a causal mask over the whole packed row would be wrong."""
    if attention_mask is None and not allow_is_causal_skip:
        return None
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return own(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **how)


AttentionInterface.register(BY_ROW, _attention_by_row)
AttentionMaskInterface.register(BY_ROW, _mask_by_row)


def fixed_rope(config: Any, max_length: int | None) -> dict[str, Any]:
    """{"rope_parameters": settings with which a token's angles depend on its position alone}; {} if they do so already.

    transformers chooses the angles of longrope (Phi-3 to Phi-4) and of dynamic NTK by the longest row of each batch
    (modeling_rope_utils.py, `dynamic_rope_update`; #25104, #27227). A row would have other log-probs beside other rows,
    and cached keys would keep their first angles. Here longrope's factors are those of a row of `max_length` tokens, by
    default max_position_embeddings, for all rows (vLLM decides by its max_model_len). Dynamic NTK becomes the plain
    rope that it is up to max_position_embeddings.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        longest = max_length or config.max_position_embeddings
        kept, other = ("long", "short") if longest > rope["original_max_position_embeddings"] else ("short", "long")
        both = [name for name in ("factor", "mscale") if f"{kept}_{name}" in rope]  # PhiMoE scales by length, too
        return {"rope_parameters": rope | {f"{other}_{name}": rope[f"{kept}_{name}"] for name in both}}
    if rope.get("rope_type") == "dynamic" and not rope.get("alpha"):  # HunYuan's alpha does not depend on rows
        plain = {name: value for name, value in rope.items() if name != "factor"}
        return {"rope_parameters": plain | {"rope_type": "default"}}
    return {}


def keeps_states(config: Any) -> bool:
    """Whether some layers of a model with this configuration keep a state for each row, as linear attention and
    convolutions do: those for which transformers' own cache has layers with states."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    layers = (DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in kinds)
    return any(layer is not None and issubclass(layer, LinearAttentionCacheLayerMixin) for layer in layers)


# {implementation: the attribute of transformers' classes that says whether a model family supports it}
_FAMILIES = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
PACKING = ("auto", "padded", "packed")
IMPLEMENTATIONS = ("auto", "eager", *_FAMILIES, "cudnn")
_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
_OLDEST = (8, 0)  # Ampere, according to the README files of flash-attn, and torch's sdp_utils.cpp for cuDNN


@dataclass(frozen=True, slots=True)
class Attention:
    """How a model's attention is computed.

    implementation: the name of one of transformers' attention functions. "auto" takes torch's own (sdpa) if the model
    family supports it, else the family's plain code (eager). "cudnn" is torch's own, which may take cuDNN's kernels.
    packing: "packed" if rows go through the layers without padding, "padded" if rows keep their padding. "auto" packs
    rows if the implementation has a kernel for rows of various lengths: flash attention, and torch's own on some GPUs.
    max_length: number of tokens of the longest row, which decides the angles of all rows (`fixed_rope`); None for the
    model's max_position_embeddings.
    ranks: the number of neighbouring ranks that compute rows together (engine/models/sequence_parallel.py). More than
    one rank compute packed rows only.
    """

    implementation: str = "auto"
    packing: str = "auto"
    max_length: int | None = None
    ranks: int = 1

    def prepare(self, family: Any, config: Any, dtype: torch.dtype) -> dict[str, str]:
        """Choose torch's kernels, and return the arguments that transformers gets when it creates a model (all ranks
        call this together).

        Unless they are asked for, cuDNN's kernels are off in this process: torch 2.11 and later prefer them on compute
        capability 9 and 10, where they give gradients that are NaN (pytorch #196678, NVIDIA/cudnn-frontend #1072).

        family: the model's class. dtype: the dtype that it computes in.
        """
        if on_gpu():
            torch.backends.cuda.enable_cudnn_sdp(self.implementation == "cudnn")
        name = self._name
        if name in ("auto", "sdpa") and self.packing != "padded" and self._takes_rows(family, config):
            packs = self.packing == "packed" or (on_gpu() and not distributed.any_rank(not _serves(config, dtype)))
            name = BY_ROW if packs else name
        return {} if name == "auto" else {"attn_implementation": name}

    @property
    def _name(self) -> str:
        """The implementation's name in transformers, or "auto"."""
        return "sdpa" if self.implementation == "cudnn" else self.implementation

    def packs_rows_of(self, model: Any) -> bool:
        """Whether rows go without padding through this model, which was created with the arguments of `prepare`."""
        config = model.base_model.config
        packs = config._attn_implementation in (BY_ROW, *_PACKAGES) and self.packing != "padded"
        return packs and self._takes_rows(type(model), config)

    def _takes_rows(self, family: Any, config: Any) -> bool:
        """Whether models of this class take rows without padding. For this, the class has to accept position ids, its
        attention has to accept row lengths, and its layers may attend to all tokens of a row or to a window of them,
        but mix tokens in no other way. Linear attention and convolutions would carry their state from row to row:
        transformers' own code for them knows no borders of rows, and raises an error if it is given some."""
        wanted = ["_supports_attention_backend", _FAMILIES.get(self._name, "_supports_sdpa")]
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or [])
        return (
            all(getattr(family, name, False) for name in wanted)
            and "position_ids" in inspect.signature(family.forward).parameters
            and kinds <= {"full_attention", "sliding_attention"}
            and not getattr(family, "_is_stateful", False)
        )

    def arguments_on_meta(self, family: Any, config: Any) -> dict[str, str]:
        """The result of `prepare` for models on the meta device. The meta device has no fused kernels. There, sdpa
        takes their place, because it allocates as much memory as they do."""
        if self.packing == "packed" and self._takes_rows(family, config):
            return {"attn_implementation": BY_ROW}
        if self.implementation == "auto":
            return {}
        return {"attn_implementation": "eager" if self.implementation == "eager" else "sdpa"}

    def check(self, path: str, kind: str, dtype: str, what: str, trust_remote_code: bool = False) -> None:
        """Raise UserError, with the flag `what` in its message, if this machine or the family of the model at `path`
        does not support this attention.

        kind: LANGUAGE_MODEL or CLASSIFIER. dtype: the dtype that the model computes in, "fp32", "fp16" or "bf16".
        """
        asked, split = f"--attn_implementation {self.implementation}", f"--sequence_parallel_size {self.ranks}"
        reason = self._why_not_here(dtype)
        if reason is not None:
            raise UserError(f"{asked}: {reason} Leave it out, or give sdpa.")
        if self.ranks > 1 and self.implementation not in ("auto", "sdpa", "cudnn"):
            raise UserError(f"{asked} with {split}: ranks split torch's own attention. Leave one out, or give sdpa.")
        if self.packing == "packed" and self.implementation in ("eager", "flex_attention"):
            raise UserError(
                f"--packing packed with {asked}: it would compute all pairs of tokens of all rows. Leave one of them "
                "out, or give sdpa or flash_attention_2."
            )
        config = read_config(path, what, trust_remote_code)
        family: Any = model_class(config, kind, path, what, trust_remote_code)
        attribute = _FAMILIES.get(self._name)
        if attribute is not None and not getattr(family, attribute, False):
            others = [name for name, attribute in _FAMILIES.items() if getattr(family, attribute, False)]
            raise UserError(
                f"{asked}: {what} {path} is of type {config.model_type!r}, of which transformers has no such "
                f"attention. Leave it out, or give {' or '.join([*others, 'eager'])}."
            )
        if self.packing == "packed" and not self._takes_rows(family, config):
            why = "layers keep a state from token to token"
            if not keeps_states(config):
                why = "attention in transformers takes no rows without padding"
            raise UserError(
                f"{split if self.ranks > 1 else '--packing packed'}: {what} {path} is of type {config.model_type!r}, "
                f"whose {why}. Leave it out{', or give padded' * (self.ranks == 1)}."
            )
        if self.ranks > 1:
            per_layer = getattr(config.get_text_config(), "num_attention_heads_per_layer", None) or []  # of laguna
            counts = {head_sizes(config)[0], *per_layer}
            fits = [n for n in range(1, min(counts) + 1) if not any(count % n for count in counts)]
            if self.ranks not in fits:
                raise UserError(
                    f"{split}: {what} {path} has {' and '.join(map(str, sorted(counts)))} attention heads, which "
                    f"{self.ranks} ranks cannot share. Give one of {', '.join(map(str, fits))}."
                )

    def _why_not_here(self, dtype: str) -> str | None:
        """A sentence that says why this machine or the dtype does not support this attention; None if both support
        it."""
        package = _PACKAGES.get(self.implementation)
        halves = package is not None or self.implementation == "cudnn"
        if (halves or self.implementation == "flex_attention") and not on_gpu():
            return "it has kernels for GPUs alone, and this run computes on none."
        if package is not None and not getattr(import_utils, f"is_flash_attn_{self.implementation[-1]}_available")():
            return f"the package {package} is not installed, or not for this GPU."
        own = capability() if halves else None
        if own is not None and own < _OLDEST:
            return (
                f"its kernels are for GPUs of compute capability {_OLDEST[0]}.{_OLDEST[1]} and newer, and this one has "
                f"{own[0]}.{own[1]}."
            )
        if halves and dtype == "fp32":
            return "it computes in fp16 or bf16, and this run in fp32."
        return None


def _serves(config: Any, dtype: torch.dtype) -> bool:
    """`has_kernel` for the heads of a model with this configuration."""
    heads, kept, width = head_sizes(config)
    return getattr(config.get_text_config(), "v_head_dim", width) == width and has_kernel(dtype, heads, kept, width)


def attention_in_words(module: Any) -> str:
    """For the first lines of a run: what computes a Backbone's attention, and whether its rows have padding."""
    config = module.model.base_model.config
    name, rows = config._attn_implementation, "rows without padding" if module.packs else "padded rows"
    if keeps_states(config):
        rows += " (layers that keep a state would carry it from row to row)"
    if name == BY_ROW and module.packs:
        rows += ", all in one kernel" if _serves(config, module.model.dtype) else ", one after the other"
    if module.group.size > 1:
        rows += f", split over {module.group.size} ranks"
    if name in ("sdpa", BY_ROW) and on_gpu():
        rows += f", cuDNN's kernels {'on' if torch.backends.cuda.cudnn_sdp_enabled() else 'off'}"
    return f"attention: {'sdpa' if name == BY_ROW else name}, {rows}"


USUAL = Attention(packing="padded")
"""What callers get who do not choose: some formulas count the outputs at padding."""
