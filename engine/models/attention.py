"""Packs rows, and chooses the implementation that computes attention. Packed rows are rows without padding,
concatenated into one row.

    rows = PackedRows(attention_mask)                              # (B, S), N of its tokens real
    inputs = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids)}
    hidden = trunk(**inputs, **rows.arguments(BY_ROW))
    by_token = rows.padded(hidden)                                 # (1, N, d) -> (B, S, d)

Position ids begin again with each row. A kernel for rows of various lengths gets the starts of the rows (`cu_seq_lens`
in transformers). Torch's own attention is called row by row (`BY_ROW`), so that it computes only those pairs of tokens
that a padded batch would compute too. Source of packing: Krell et al. 2021 (Efficient Sequence Packing without
Cross-contamination); transformers, modeling_flash_attention_utils.py.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from engine.errors import UserError
from engine.models.reading import model_class, read_config
from engine.zero.accelerator import capability, on_gpu

BY_ROW = "sdpa_by_row"
"""The name under which transformers' attention functions list torch's own attention, called row by row."""


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
        if implementation == BY_ROW:
            return {"row_lengths": filled}
        starts = F.pad(torch.tensor(filled, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
        starts = starts.to(self.places.device, non_blocking=True)
        longest = max(filled)
        return {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def packed(self, tensor: Tensor) -> Tensor:
        """(B, S, ...) -> (1, N, ...): the entries of the real tokens, row after row."""
        return tensor.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def padded(self, tensor: Tensor) -> Tensor:
        """(1, N, ...) -> (B, S, ...): the entries at the positions of the real tokens, with zeros at padding."""
        whole = tensor.new_zeros(self.real.numel(), *tensor.shape[2:])
        return whole.index_copy(0, self.places, tensor.squeeze(0)).unflatten(0, self.real.shape)

    def predicted(self, response_length: int) -> tuple[Tensor, Tensor]:
        """Which of the last `response_length` tokens of each row are real and follow a real token.

        Returns: (B, response_length) bool, true at these n tokens; and (n,) int64, the index of the token before each
        of them, counted among all N real tokens.
        """
        before = slice(-response_length - 1, -1)
        slots = self.real[:, -response_length:] & self.real[:, before]
        numbers = self.real.flatten().cumsum(0).view(self.real.shape) - 1
        return slots, numbers[:, before][slots]


def _attention_by_row(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    sliding_window: int | None = None,
    **how,
) -> tuple[Tensor, None]:
    """Torch's attention within each packed row, (1, heads, N, d) -> (1, N, heads, d). A batch without `row_lengths` has
    padding, and is computed as in transformers."""
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if row_lengths is None:
        return own(module, query, key, value, attention_mask, sliding_window=sliding_window, **how)
    if how.get("position_bias") is not None:
        raise ValueError("a bias of positions belongs to padded rows")
    rows = zip(*(tensor.split(list(row_lengths), 2) for tensor in (query, key, value)), strict=True)
    outputs = []
    for parts in rows:
        mask = _window(parts[0], sliding_window)
        outputs.append(own(module, *parts, mask, sliding_window=sliding_window, **how)[0])
    return torch.cat(outputs, 1), None


def _window(query: Tensor, width: int | None) -> Tensor | None:
    """(1, 1, L, L) bool, the tokens that each token may attend to in a sliding window; None if each token may attend to
    all tokens before it."""
    length = query.shape[2]
    if width is None or length <= width:
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


# {implementation: the attribute of transformers' classes that says whether a model family supports it}
_FAMILIES = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
PACKING = ("auto", "padded", "packed")
IMPLEMENTATIONS = ("auto", "eager", *_FAMILIES)
_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
_OLDEST = {"flash_attention_2": (8, 0), "flash_attention_3": (8, 0)}  # Ampere, according to their README files


@dataclass(frozen=True, slots=True)
class Attention:
    """How a model's attention is computed.

    implementation: the name of one of transformers' attention functions. "auto" takes torch's own (sdpa) if the model
    family supports it, else the family's plain code (eager).
    packing: "packed" if rows go through the layers without padding, "padded" if rows keep their padding. "auto" packs
    rows if the implementation has a kernel for rows of various lengths (flash attention).
    """

    implementation: str = "auto"
    packing: str = "auto"

    @property
    def packs(self) -> bool:
        """Whether rows go through the layers without padding."""
        return self.packing == "packed" or (self.packing == "auto" and self.implementation in _PACKAGES)

    def packs_rows_of(self, family: Any) -> bool:
        """Whether rows go through models of this class without padding. For this, the class has to accept position ids,
        and its attention has to accept row lengths."""
        takes_positions = "position_ids" in inspect.signature(family.forward).parameters
        return self.packs and takes_positions and getattr(family, "_supports_attention_backend", False)

    @property
    def _by_row(self) -> bool:
        return self.packs and self.implementation in ("auto", "sdpa")

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that transformers gets when it creates a model."""
        if self._by_row:
            return {"attn_implementation": BY_ROW}
        return {} if self.implementation == "auto" else {"attn_implementation": self.implementation}

    @property
    def arguments_on_meta(self) -> dict[str, str]:
        """The arguments for creating models on the meta device. The meta device has no fused kernels. There, sdpa takes
        their place, because it allocates as much memory as they do."""
        fused = self._by_row or self.implementation in (*_PACKAGES, "flex_attention")
        return {"attn_implementation": "sdpa"} if fused else self.arguments

    def check(self, path: str, kind: str, dtype: str, what: str, trust_remote_code: bool = False) -> None:
        """Raise UserError, with the flag `what` in its message, if this machine or the family of the model at `path`
        does not support this attention.

        kind: LANGUAGE_MODEL or CLASSIFIER. dtype: the dtype that the model computes in, "fp32", "fp16" or "bf16".
        """
        asked = f"--attn_implementation {self.implementation}"
        reason = self._why_not_here(dtype)
        if reason is not None:
            raise UserError(f"{asked}: {reason} Leave it out, or give sdpa.")
        if self.packs and self.implementation in ("eager", "flex_attention"):
            raise UserError(
                f"--packing packed with {asked}: it would compute all pairs of tokens of all rows. Leave one of them "
                "out, or give sdpa or flash_attention_2."
            )
        config = read_config(path, what, trust_remote_code)
        family: Any = model_class(config, kind, path, what, trust_remote_code)
        attribute = _FAMILIES.get(self.implementation)
        if attribute is not None and not getattr(family, attribute, False):
            others = [name for name, attribute in _FAMILIES.items() if getattr(family, attribute, False)]
            raise UserError(
                f"{asked}: {what} {path} is of type {config.model_type!r}, of which transformers has no such "
                f"attention. Leave it out, or give {' or '.join([*others, 'eager'])}."
            )
        if self.packing == "packed" and not self.packs_rows_of(family):
            raise UserError(
                f"--packing {self.packing}: {what} {path} is of type {config.model_type!r}, whose attention in "
                "transformers takes no rows without padding. Leave it out, or give padded."
            )

    def _why_not_here(self, dtype: str) -> str | None:
        """A sentence that says why this machine or the dtype does not support this attention; None if both support
        it."""
        package = _PACKAGES.get(self.implementation)
        if (package is not None or self.implementation == "flex_attention") and not on_gpu():
            return "it has kernels for GPUs alone, and this run computes on none."
        if package is not None and not getattr(import_utils, f"is_flash_attn_{self.implementation[-1]}_available")():
            return f"the package {package} is not installed, or not for this GPU."
        oldest, own = _OLDEST.get(self.implementation), capability() if package is not None else None
        if oldest is not None and own is not None and own < oldest:
            return (
                f"its kernels are for GPUs of compute capability {oldest[0]}.{oldest[1]} and newer, and this one has "
                f"{own[0]}.{own[1]}."
            )
        if package is not None and dtype == "fp32":
            return "it computes in fp16 or bf16, and this run in fp32."
        return None


USUAL = Attention()
