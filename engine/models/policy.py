"""Policy: a causal language model that returns log-probs of given tokens.

Log-probs (B, T) are all that leaves it. The logits, (B, T, V), would be a step's largest tensor; they are computed a
few rows at a time, so that no more than those few are ever in memory.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from engine.algo.logprobs import CHUNK_ELEMENTS, predicting, token_logprobs
from engine.experience import position_ids as positions_from
from engine.models.backbone import Backbone
from engine.models.heads import LogProbHead
from engine.models.packed_rows import PackedRows
from engine.trace import traced


class Policy(Backbone):
    """A causal language model that returns log-probs of given tokens.

    Models that change their logits after the head (soft caps, scales) go through the generic path, which asks the
    model itself for logits. Which path is right is found by a trial: `forward(probe=True)`, after loading.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__(model, replaced)
        head = model.get_output_embeddings()
        self.direct_head = type(head) in (nn.Linear, LogProbHead)
        if self.direct_head:
            head.__class__ = LogProbHead  # in place, so that parameter names stay the model's own

    def with_model(self, model: PreTrainedModel) -> Self:
        """A Policy with these settings, the result of the probe included, for another model of the architecture."""
        other = super().with_model(model)
        other.direct_head = self.direct_head
        return other

    @traced("policy forward")
    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        response_length: int = 0,
        temperature: float = 1.0,
        with_entropy: bool = False,
        probe: bool = False,
        role: str | None = None,
    ):
        """Log-probs and entropy of the last `response_length` (T) tokens of each row.

        Args:
            sequences, attention_mask, position_ids: (B, S) int64.
            temperature: what the logits are divided by.
            with_entropy: otherwise the entropies are zeros.
            probe: find out with these sequences instead which of the two paths is right, and use it from now on.
            role: "reference" for the model as it was before training, where this one has that too.

        Returns: (logprobs, entropy), each (B, T) float32.
        """
        self.take_role(role)
        if probe:
            return self._probe(sequences)
        assert attention_mask is not None and position_ids is not None
        labels = sequences[:, -response_length:]
        if self.packs:
            rows = PackedRows(attention_mask)
            return self._packed_logprobs(rows, sequences, position_ids, labels, temperature, with_entropy)
        if self.direct_head:
            hidden = self.hidden_states(sequences, attention_mask, position_ids)
            head = self.model.get_output_embeddings()
            return head(predicting(hidden, response_length), labels, temperature, with_entropy)
        logits = self.model(
            **self.inputs(sequences, attention_mask, position_ids), logits_to_keep=response_length + 1
        ).logits[:, :-1]
        return _logits_logprobs(logits, labels, temperature, with_entropy)

    def _packed_logprobs(
        self,
        rows: PackedRows,
        sequences: Tensor,
        position_ids: Tensor,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """What `forward` returns, of rows without their padding: zeros where a token, or the one before it, is none."""
        slots, before = rows.predicted(labels.shape[1])
        wanted = labels[slots].unsqueeze(0)
        if self.direct_head:
            hidden = self.packed_states(rows, sequences, position_ids).index_select(1, before)
            found = self.model.get_output_embeddings()(hidden, wanted, temperature, with_entropy)
        else:
            inputs = self.packed_inputs(rows, sequences, position_ids)
            found = _logits_logprobs(
                self.model(**inputs, logits_to_keep=before).logits, wanted, temperature, with_entropy
            )
        logprobs, entropy = (torch.zeros_like(slots, dtype=torch.float32).masked_scatter(slots, one) for one in found)
        return logprobs, entropy

    def _probe(self, sequences: Tensor) -> Tensor:
        """Whether the logits are what the head makes of the trunk's hidden states, and nothing else.

        The model's own code has the head's output replaced by large numbers, of which a soft cap or a scale makes
        others: initial logits may be too small to show it.
        """
        mask = torch.ones_like(sequences)
        inputs = self.inputs(sequences, mask, positions_from(mask))
        given: list[Tensor] = []

        def replaced(head: nn.Module, args: tuple, output: Tensor) -> Tensor:
            numbers = torch.linspace(-1e4, 1e4, output.numel(), device=output.device).view(output.shape).to(output)
            given.extend((args[0], numbers))
            return numbers.clone()

        hook = self.model.get_output_embeddings().register_forward_hook(replaced) if self.direct_head else None
        logits = self.model(**inputs).logits
        if hook is not None:
            hook.remove()
            hidden = self.model.base_model(**inputs)[0]
            self.direct_head = len(given) == 2 and _alike(given[0], hidden) and torch.equal(logits, given[1])
        return logits.float().sum()


def _logits_logprobs(logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor]:
    """`token_logprobs` by chunks of positions, for logits that exist already: (B, T, V), (B, T) -> two (B, T)."""
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    pieces = zip(logits.flatten(0, 1).split(rows), labels.flatten().split(rows))
    parts = [
        checkpoint(token_logprobs, piece, targets, temperature, with_entropy, use_reentrant=False)
        for piece, targets in pieces
    ]
    logprobs, entropy = (torch.cat(column).view(labels.shape) for column in zip(*parts))
    return logprobs, entropy


def _alike(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and bool((first - second).abs().max() < 1e-3 * second.abs().max())
