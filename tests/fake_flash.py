"""A stand-in for the kernels of the flash-attn packages: what calls them is transformers' own code."""

import torch
import torch.nn.functional as F
from transformers import modeling_flash_attention_utils as utils


class FakeFlash:
    """Attention row by row, with the arguments of the kernel for rows of various lengths.

    calls: of each call, how many rows and the longest of them.
    """

    def __init__(self, monkeypatch):
        self.calls: list[tuple[int, int]] = []

        def rows_alone(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, dropout_p=0
        ):
            self.calls.append((len(cu_seqlens_q) - 1, int(max_seqlen_q)))
            assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32 and causal
            queries, keys, values = (
                tensor.transpose(0, 1).split(starts.diff().tolist(), 1)
                for tensor, starts in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
            )
            outputs = [_attention(*row, softmax_scale) for row in zip(queries, keys, values, strict=True)]
            return torch.cat(outputs, 1).transpose(0, 1)

        def whole(q, k, v, softmax_scale, causal, dropout_p=0):
            self.calls.append((len(q), q.shape[1]))
            rows = [_attention(*(part.transpose(0, 1) for part in row), softmax_scale) for row in zip(q, k, v)]
            return torch.stack(rows).transpose(1, 2)

        monkeypatch.setattr(utils, "_loaded_implementation", None)
        monkeypatch.setattr(
            utils, "_lazy_imports", lambda *_, **__: (whole, rows_alone, None, utils._pad_input, utils._unpad_input)
        )


def _attention(query, key, value, scale):
    """Causal attention, (heads, tokens, d), in which the last query stands at the last key, as the kernels have it."""
    length, seen = query.shape[1], key.shape[1]
    mask = torch.ones(length, seen, dtype=torch.bool).tril(seen - length)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
