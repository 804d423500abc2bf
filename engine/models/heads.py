"""Output heads: one for log-probs of given tokens, one for a score of every token, and a language model's head with
adapters. ZeRO-3 gathers the weight of a head once per call.
"""

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor, nn

from engine.algo.logprobs import head_logprobs


class LogProbHead(nn.Linear):
    """A language model's output layer that can also compute the log-probs of given labels, chunk by chunk, in one call.

    All chunks are computed in one call of the module, because under ZeRO-3 each call gathers the module's weight again.
    """

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        low: Tensor | None = None,
        up: Tensor | None = None,
    ):
        """Without labels: the logits (..., V) of hidden states (..., d). With labels (B, T): the result of
        `head_logprobs`.

        low, up: as in `head_logprobs`.
        """
        if labels is None:
            return super().forward(hidden)
        return head_logprobs(hidden, self.weight, self.bias, labels, temperature, with_entropy, low=low, up=up)


class ScoreHead(nn.Linear):
    """A linear head that computes in float32, because bfloat16 would round scores to three digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., 1) float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)


class AdaptedLogProbHead(Linear):
    """peft's layer around a LogProbHead. This class adds the computation of log-probs; it adds the adapters' update to
    each chunk of logits.

    If the head is tied to the embedding, the adapters' update changes the logits, but not the embedding.
    """

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, temperature: float = 1.0, with_entropy: bool = False
    ):
        """As in LogProbHead, with the active adapters."""
        if labels is None:
            return super().forward(hidden)
        names = [name for name in self.active_adapters if name in self.lora_A]
        if not names:
            return self.base_layer(hidden, labels, temperature, with_entropy)
        low = [self.scaling[name] * self.lora_A[name](self.lora_dropout[name](hidden)) for name in names]
        up = [self._transposed(name, hidden) for name in names]
        return self.base_layer(hidden, labels, temperature, with_entropy, torch.cat(low, -1), torch.cat(up))

    def _transposed(self, name: str, like: Tensor) -> Tensor:
        """The factor B of an adapter, transposed to (dim, V). It is computed as the output of B's module for a unit
        matrix, because under ZeRO-3 the call of a module gathers its weight."""
        unit = torch.eye(self.r[name], dtype=like.dtype, device=like.device)
        # ZeRO-3 regards a layer's backward pass as finished when the gradient of the layer's input is computed.
        return self.lora_B[name](unit.requires_grad_(torch.is_grad_enabled()))
