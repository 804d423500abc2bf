"""Attention: packed rows (rows without padding, one after the other), and the choice of the code that computes
attention.

    rows = PackedRows(attention_mask)                              # (B, S), N of its tokens real
    inputs = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids)}
    hidden = trunk(**inputs, **rows.arguments(BY_ROW))
    by_token = rows.padded(hidden)                                 # (1, N, d) -> (B, S, d)

Position ids begin anew with each row. A kernel for rows of various lengths gets the starts of rows (`cu_seq_lens` in
transformers). torch's own attention is called row by row (`BY_ROW`), and computes no pair of tokens that a padded batch
would not. Source of packing: Krell et al. 2021 (Efficient Sequence Packing without Cross-contamination); transformers,
modeling_flash_attention_utils.py.
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
"""The name, among transformers' attention functions, of torch's own attention called row by row."""


class PackedRows:
    """The places of the real tokens in a padded batch.

    Args:
        attention_mask: (B, S) int64, 1 on real tokens.
    """

    def __init__(self, attention_mask: Tensor):
        self.real = attention_mask.bool()
        self.places = self.real.flatten().nonzero().squeeze(-1)  # (N,)
        self.lengths: list[int] = self.real.sum(-1).tolist()

    def arguments(self, implementation: str) -> dict[str, Any]:
        """The keyword arguments of a model's forward pass that describe the rows to attention.

        implementation: a name of transformers' attention functions.
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
        """(B, S, ...) -> (1, N, ...), the real tokens' entries, row after row."""
        return tensor.flatten(0, 1).index_select(0, self.places).unsqueeze(0)

    def padded(self, tensor: Tensor) -> Tensor:
        """(1, N, ...) -> (B, S, ...), with zeros for padding."""
        whole = tensor.new_zeros(self.real.numel(), *tensor.shape[2:])
        return whole.index_copy(0, self.places, tensor.squeeze(0)).unflatten(0, self.real.shape)

    def predicted(self, response_length: int) -> tuple[Tensor, Tensor]:
        """Which of the last tokens of the rows are real and follow a real token.

        Returns: (B, response_length) bool; and (n,) int64, for each of these n tokens the index, among all N, of the
        token before it.
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
    """torch's attention within each packed row, (1, heads, N, d) -> (1, N, heads, d). A padded batch, which has no
    `row_lengths`, is computed as in transformers."""
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
    """(1, 1, L, L) bool, the tokens that each token may attend to in a sliding window; None if these are all before
    it."""
    length = query.shape[2]
    if width is None or length <= width:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=query.device)
    return ones.tril().triu(1 - width)[None, None]


def _mask_by_row(*args, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = True, **how):
    """sdpa's mask for a padded batch. None for packed rows: transformers asks without a mask for these, and its plain
    causal mask would be wrong."""
    if attention_mask is None and not allow_is_causal_skip:
        return None
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    return own(*args, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **how)


AttentionInterface.register(BY_ROW, _attention_by_row)
AttentionMaskInterface.register(BY_ROW, _mask_by_row)


# {name: attribute of transformers' classes that says whether a family supports it}
_FAMILIES = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
PACKING = ("auto", "padded", "packed")
IMPLEMENTATIONS = ("auto", "eager", *_FAMILIES)
_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
_OLDEST = {"flash_attention_2": (8, 0), "flash_attention_3": (8, 0)}  # Ampere: their README files


@dataclass(frozen=True, slots=True)
class Attention:
    """The code that computes a model's attention.

    implementation: a name of transformers' attention functions; "auto" for torch's own (sdpa) where the model's family
    has it, else the family's plain one (eager).
    packing: whether rows go through the layers without their padding: "packed", "padded", or "auto": packed if there is
    a kernel for rows of various lengths (flash attention).
    """

    implementation: str = "auto"
    packing: str = "auto"

    @property
    def packs(self) -> bool:
        """Whether rows go without their padding."""
        return self.packing == "packed" or (self.packing == "auto" and self.implementation in _PACKAGES)

    def packs_rows_of(self, family: Any) -> bool:
        """Whether rows go without their padding through models of this class: it has to take position ids, and its
        attention row lengths."""
        takes_positions = "position_ids" in inspect.signature(family.forward).parameters
        return self.packs and takes_positions and getattr(family, "_supports_attention_backend", False)

    @property
    def _by_row(self) -> bool:
        return self.packs and self.implementation in ("auto", "sdpa")

    @property
    def arguments(self) -> dict[str, str]:
        """The arguments that transformers gets when it makes a model."""
        if self._by_row:
            return {"attn_implementation": BY_ROW}
        return {} if self.implementation == "auto" else {"attn_implementation": self.implementation}

    @property
    def arguments_on_meta(self) -> dict[str, str]:
        """The arguments for models on the meta device, which has no fused kernels; sdpa allocates the same as these."""
        fused = self._by_row or self.implementation in (*_PACKAGES, "flex_attention")
        return {"attn_implementation": "sdpa"} if fused else self.arguments

    def check(self, path: str, kind: str, dtype: str, what: str, trust_remote_code: bool = False) -> None:
        """Raise UserError, naming `what` (a flag), if this machine, or the family of the model at `path`, does not
        support it.

        kind: LANGUAGE_MODEL or CLASSIFIER. dtype: what the model computes in, "fp32", "fp16" or "bf16".
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
        """A sentence that says what this machine or the dtype lacks; None if nothing is missing."""
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
