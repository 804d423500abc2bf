"""Scorer: a reward model or critic, a number for every token."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.models.backbone import Backbone
from engine.models.heads import ScoreHead
from engine.models.packed_rows import PackedRows
from engine.trace import traced
from engine.zero.gathering import whole_copy


class Scorer(Backbone):
    """A reward model or critic: backbone, one linear head on every token, and a stored offset.

    The gain of the normalisation is folded into the head's weight. The offset stands beside it, in the model's
    config.json (`score_offset`), because Hugging Face's heads have no bias.

    kept_heads: by role, frozen copies of a head that trains. They stand outside `model`, which is saved without them.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__(model, replaced)
        model.score.__class__ = ScoreHead
        self.offset = float(getattr(model.config, "score_offset", 0.0))
        self.score_position = getattr(model.config, "score_position", "last_non_pad")
        self.pad_token_id = model.config.pad_token_id
        self.kept_heads = nn.ModuleDict()

    def keep_head(self, role: str) -> None:
        """Keep the head as it is now, to go on computing as `role` with it (all ranks call this)."""
        self.kept_heads[role] = whole_copy(self.model.score).requires_grad_(False)

    def with_model(self, model: PreTrainedModel) -> Self:
        """A Scorer with these settings, adapters and kept heads, for another model of the same architecture."""
        other = super().with_model(model)
        for role in self.kept_heads:
            other.keep_head(role)
        return other

    def take_settings_of(self, other: "Scorer") -> None:
        """Take over the offset of another Scorer of this architecture."""
        self.offset = other.offset

    @traced("scorer forward")
    def forward(
        self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor, role: str | None = None
    ) -> Tensor:
        """The score at every token; all arguments (B, S) int64. Returns (B, S) float32; without padding zeros for it.

        role: "reward" for the model as it was before training, where this one has that too.
        """
        self.take_role(role)
        head = dict(self.kept_heads.items()).get(role or "", self.model.score)
        if self.packs:
            rows = PackedRows(attention_mask)
            return rows.padded(head(self.packed_states(rows, sequences, position_ids)).squeeze(-1) + self.offset)
        hidden = self.hidden_states(sequences, attention_mask, position_ids)
        return head(hidden).squeeze(-1) + self.offset

    def sequence_scores(self, token_scores: Tensor, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """The score of each sequence: the one at the token that this model was trained to be read at.

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
