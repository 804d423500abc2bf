"""Output heads that engines gather once a call: log-probs of given tokens, and a score for every token."""

import torch.nn.functional as F
from torch import Tensor, nn

from engine.algo.logprobs import head_logprobs


class LogProbHead(nn.Linear):
    """A language model's output layer that can go on to the log-probs of given labels, chunk by chunk, in one call.

    One call, because under ZeRO-3 each call of a module gathers its weight anew.
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
        """Logits (..., V) of hidden states (..., d); with labels (B, T), what `head_logprobs` returns for them.

        low, up: as for that.
        """
        if labels is None:
            return super().forward(hidden)
        return head_logprobs(hidden, self.weight, self.bias, labels, temperature, with_entropy, low=low, up=up)


class ScoreHead(nn.Linear):
    """A linear head computed in float32: bfloat16 would round scores to three digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., d) -> (..., 1) float32."""
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)
