"""Computes log-probabilities and entropies of tokens, and selects the positions that predict the response tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 1 << 24  # the logits in memory at a time: 64 MiB in float32


def chunk_elements(device: torch.device) -> int:
    """The number of logits in a chunk. If gradients are computed on a GPU, a float32 chunk takes 1/256 of the GPU's
    memory, if that is more than the default. Fewer chunks are then faster, because in the backward pass each chunk
    reads and writes the whole gradient of the head."""
    if not torch.is_grad_enabled():
        return CHUNK_ELEMENTS
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return max(CHUNK_ELEMENTS, memory >> 10)


def predicting(states: Tensor, response_length: int) -> Tensor:
    """The positions that predict the last `response_length` tokens: (B, S, ...) -> (B, T, ...).

    Response token t is at sequence position P + t and is predicted at position P - 1 + t. The last position is left
    out, because the token that it predicts is not in the sequence.
    """
    return states[:, -response_length - 1 : -1]


def token_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """The log-probability of each label, and the entropy of each position's distribution, in float32.

    Args:
        logits: (..., V) in any float dtype.
        labels: (...) int64.
        temperature: the number that the logits are divided by before the softmax.
        with_entropy: whether to compute entropies, with their gradient; if not, they are zeros.

    Returns: (logprobs, entropy), each (...) float32, entropy in nats.
    """
    logprobs = F.log_softmax(logits.float() / temperature, dim=-1)
    chosen = logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = torch.zeros_like(chosen)
    if with_entropy:
        # A token of probability 0 adds 0, not 0 * -inf.
        entropy = -(logprobs.exp() * logprobs.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
    return chosen, entropy


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    at_once: int | None = None,
    low: Tensor | None = None,
    up: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what `token_logprobs` returns for the logits of a linear head, computed from `hidden` in chunks of
    positions.

    Only one chunk of float32 logits is in memory at a time. The backward pass computes each chunk again.

    Args:
        hidden: (B, T, d) in the model's dtype.
        weight, bias: weight (V, d) and bias (V,) of the head; bias may be None.
        labels: (B, T) int64.
        at_once: the number of logits in a chunk; by default `chunk_elements` of the device.
        low, up: (B, T, r) and (r, V); their product is added to the logits. Or both None.

    Returns: (logprobs, entropy), each (B, T) float32.
    """

    def one_chunk(states: Tensor, targets: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = F.linear(states, weight, bias)
        if factors is not None and up is not None:
            logits = logits + factors @ up
        return token_logprobs(logits, targets, temperature, with_entropy)

    rows = max(1, (at_once or chunk_elements(hidden.device)) // weight.shape[0])
    chunked = [hidden.flatten(0, 1), labels.flatten()] + ([] if low is None else [low.flatten(0, 1)])
    chunks = list(zip(*(tensor.split(rows) for tensor in chunked)))
    if len(chunks) > 1 and torch.is_grad_enabled():
        parts = [checkpoint(one_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        parts = [one_chunk(*chunk) for chunk in chunks]
    logprobs, entropy = (torch.cat(column).view(labels.shape) for column in zip(*parts))
    return logprobs, entropy
