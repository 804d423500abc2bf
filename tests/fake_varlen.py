"""A stand-in on CPUs for the kernels behind torch.nn.attention.varlen: what calls them is torch's own code."""

import torch
from torch import Tensor


class FakeVarlen:
    """Attention within each row, from the starts of the rows, by written-out products in float32.

    calls: of each forward pass how many rows, tokens of the longest of them, and tokens before its own that a token
    attends to (-1: all). wrong, slope: by what outputs and gradients are multiplied. checks: whether arguments that do
    not fit together are refused.
    """

    def __init__(self, library: torch.library.Library):
        self.calls: list[tuple[int, int, int]] = []
        self.wrong = self.slope = 1.0
        self.checks = True
        library.impl("_flash_attention_forward", self.forward, "CPU")
        library.impl("_flash_attention_backward", self.backward, "CPU")

    def forward(self, query, key, value, starts, starts_k, longest, longest_k, dropout, *rest, **how):
        """What aten::_flash_attention_forward returns: outputs (N, heads, d), logsumexp, and three unused."""
        lengths = starts.diff()
        assert starts.dtype == torch.int32 and starts.equal(starts_k) and not dropout and how["window_size_right"] == 0
        assert not self.checks or longest == longest_k == lengths.max()
        self.calls.append((len(lengths), longest, how["window_size_left"]))
        outputs = [shares @ values for shares, _, _, values in self._rows(query, key, value, starts, how)]
        output = torch.cat(outputs, 1).transpose(0, 1).to(query.dtype)
        unused = [query.new_empty(0) for _ in range(4)]
        return (self.wrong * output, *unused)

    def backward(self, grad, query, key, value, output, _, starts, *rest, **how):
        """What aten::_flash_attention_backward returns: the gradients of query, key and value. With P the softmax of S:
        dV = P' dO, dS = P (dP - sum of dO O), dP = dO V' (Dao et al. 2022, appendix B.4)."""
        found = []
        begins = starts.tolist()
        for place, (shares, queries, keys, values) in enumerate(self._rows(query, key, value, starts, how)):
            row = slice(begins[place], begins[place + 1])
            pulls, said = (tensor[row].transpose(0, 1).float() for tensor in (grad, output))
            scores = shares * (pulls @ values.mT - (pulls * said).sum(-1, keepdim=True)) * self._scale(query, how)
            by_head = scores @ keys, scores.mT @ queries, shares.mT @ pulls
            found.append([tensor.transpose(0, 1) for tensor in by_head])
        grads = [torch.cat(column) for column in zip(*found, strict=True)]
        grads[1:] = [tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in grads[1:]]
        return tuple((self.slope * tensor).to(query.dtype) for tensor in grads)

    def _rows(self, query, key, value, starts, how):
        """Of each row, (heads, L, ...) float32: the shares of attention, queries, keys and values."""
        groups = query.shape[1] // key.shape[1]
        lengths = starts.diff().tolist()
        whole = query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        for queries, keys, values in zip(*(tensor.transpose(0, 1).float().split(lengths, 1) for tensor in whole)):
            places = torch.arange(queries.shape[1])
            before = places[:, None] - places
            hidden = before < 0 if how["window_size_left"] < 0 else (before < 0) | (before > how["window_size_left"])
            scores = self._scale(query, how) * (queries @ keys.mT)
            yield scores.masked_fill(hidden, -torch.inf).softmax(-1), queries, keys, values

    def _scale(self, query: Tensor, how: dict) -> float:
        return query.shape[-1] ** -0.5 if how.get("scale") is None else how["scale"]
