"""The two kinds of module that engines wrap: a Policy gives log-probs, a Scorer gives a number per token.

No logits cross an engine's border: what leaves a Policy is (B, T), so the largest tensor of a step, (B, T, V), never
exists as a whole. Loading and saving stand in `model_files.py`.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine.algo.logprobs import CHUNK_ELEMENTS, head_logprobs, predicting, token_logprobs
from engine.experience import position_ids as positions_from


class LogProbHead(nn.Linear):
    """An output layer that can go on to the labels' log-probs, chunk by chunk, within one call.

    One call, because under ZeRO-3 each call of a module gathers its weight anew.
    """

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, temperature: float = 1.0, with_entropy: bool = False
    ):
        if labels is None:
            return super().forward(hidden)
        return head_logprobs(hidden, self.weight, self.bias, labels, temperature, with_entropy)


class ScoreHead(nn.Linear):
    """A linear head computed in float32: bfloat16 would round scores to three digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(hidden.float(), self.weight.float(), bias)


class _Backbone(nn.Module):
    """A Hugging Face model and the arguments that its family's trunk understands.

    `dropouts` are the probabilities that loading replaced, by their names in the model's configuration.
    """

    def __init__(self, model: nn.Module, dropouts: dict[str, float] | None = None):
        super().__init__()
        self.model = model
        self.dropouts = dropouts or {}
        # BLOOM, for one, has no positions to be told: it reads the attention mask.
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters

    def around(self, model: nn.Module):
        """A module like this one around another model of the same architecture."""
        return type(self)(model, self.dropouts)

    def adopt(self, other) -> None:
        """Compute like another module of this architecture whose weights this one has been given."""

    def inputs(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass without cache."""
        named = {"input_ids": sequences, "attention_mask": attention_mask, "use_cache": False}
        if self._takes_positions:
            named["position_ids"] = position_ids
        return named

    def hidden_states(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The trunk's last hidden states, (B, S, d)."""
        return self.model.base_model(**self.inputs(sequences, attention_mask, position_ids))[0]


class Policy(_Backbone):
    """A causal language model that returns log-probs of given tokens.

    Models that change their logits after the head (soft caps, scales) go through the generic path, which asks the whole
    model for logits. Which path is right is found by comparing them once: `forward(probe=True)`, after loading.
    """

    def __init__(self, model: nn.Module, dropouts: dict[str, float] | None = None):
        super().__init__(model, dropouts)
        head = model.get_output_embeddings()
        self.direct_head = type(head) in (nn.Linear, LogProbHead)
        if self.direct_head:
            head.__class__ = LogProbHead  # in place, so that parameter names stay the model's own

    def around(self, model: nn.Module) -> "Policy":
        """A Policy like this one, probe and all, around another model of the same architecture."""
        other = super().around(model)
        other.direct_head = self.direct_head
        return other

    def forward(
        self,
        sequences: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        response_length: int = 0,
        temperature: float = 1.0,
        with_entropy: bool = False,
        probe: bool = False,
    ):
        """Log-probs and entropy of the last `response_length` (T) tokens of each row.

        Args:
            sequences, attention_mask, position_ids: (B, S) int64.
            temperature: what the logits are divided by.
            with_entropy: otherwise the entropies are zeros.
            probe: compare the two paths on these sequences instead, and settle which is used from now on.

        Returns: (logprobs, entropy), each (B, T) float32.
        """
        if probe:
            return self._probe(sequences)
        labels = sequences[:, -response_length:]
        if self.direct_head:
            hidden = self.hidden_states(sequences, attention_mask, position_ids)
            head = self.model.get_output_embeddings()
            return head(predicting(hidden, response_length), labels, temperature, with_entropy)
        logits = self.model(
            **self.inputs(sequences, attention_mask, position_ids), logits_to_keep=response_length + 1
        ).logits[:, :-1]
        return _logits_logprobs(logits, labels, temperature, with_entropy)

    def _probe(self, sequences: Tensor) -> Tensor:
        mask = torch.ones_like(sequences)
        positions = positions_from(mask)
        own = self.model(**self.inputs(sequences, mask, positions)).logits
        if self.direct_head:
            direct = self.model.get_output_embeddings()(self.hidden_states(sequences, mask, positions))
            self.direct_head = direct.shape == own.shape and torch.allclose(direct, own, rtol=1e-3, atol=1e-3)
        return own.float().sum()


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


class Scorer(_Backbone):
    """A reward model or critic: backbone, one linear head on every token, and a stored offset.

    The gain of the normalisation is folded into the head's weight. The offset stands beside it, in the model's
    config.json (`score_offset`), because Hugging Face's heads have no bias.
    """

    def __init__(self, model: nn.Module, dropouts: dict[str, float] | None = None):
        super().__init__(model, dropouts)
        model.score.__class__ = ScoreHead
        self.offset = float(getattr(model.config, "score_offset", 0.0))
        self.score_position = getattr(model.config, "score_position", "last_non_pad")
        self.pad_token_id = model.config.pad_token_id

    def adopt(self, other: "Scorer") -> None:
        """Compute like another Scorer of this architecture whose weights this one has been given."""
        self.offset = other.offset

    def forward(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The score at every token; all arguments (B, S) int64. Returns (B, S) float32."""
        hidden = self.hidden_states(sequences, attention_mask, position_ids)
        return self.model.score(hidden).squeeze(-1) + self.offset

    def sequence_scores(self, token_scores: Tensor, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """The score of each whole sequence: the one at the token that this model was trained to be read at.

        `score_position` "last" is the last real token, EOS included: ours. "last_non_pad" is Hugging Face's rule, the
        last token that differs from the pad token, hence the one before EOS where pad == eos: models of others.

        Args: all (B, S). Returns (B,) float32.
        """
        counted = attention_mask.bool()
        if self.score_position == "last_non_pad" and self.pad_token_id is not None:
            counted = counted & (sequences != self.pad_token_id)
        slots = torch.arange(sequences.shape[1], device=sequences.device)
        last = torch.where(counted, slots, torch.zeros_like(slots)).amax(-1)
        return token_scores.gather(1, last.unsqueeze(-1)).squeeze(-1)
