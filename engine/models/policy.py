"""Policy, a causal language model that returns log-probs of given tokens, and Scorer, a reward model or critic with a
number for every token. Their base class `Backbone` holds a Hugging Face model and calls its trunk: the layers without
the head.

A policy returns only log-probs, (B, T). The logits, (B, T, V), would be the largest tensor of a step; they are computed
a few rows at a time, so only these few are ever in memory.
"""

import inspect
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from engine.algo.logprobs import CHUNK_ELEMENTS, predicting, token_logprobs
from engine.experience import position_ids as positions_from
from engine.models.adapter_folders import AdapterFolder
from engine.models.adapters import Adapters
from engine.models.attention import PackedRows
from engine.models.heads import LogProbHead, ScoreHead
from engine.trace import traced
from engine.zero.gathering import whole_copy


class Backbone(nn.Module):
    """A Hugging Face model, called with the arguments that its family's trunk takes.

    replaced: {name: original value} of settings that loading has replaced in the model's configuration (`as_computed`);
    saving restores them.
    adapters: the LoRA adapters within the model, or None.
    base: the path that its weights were loaded from. base_contents: the fingerprint of these weights, which an
    adapter's folder records; None without adapters. start: the adapter that the model was loaded without, and that will
    be trained further; None otherwise. merged: the adapter that loading has merged into the weights, or None.
    packs: whether padding is removed from rows before they go through the layers.
    """

    model: PreTrainedModel
    adapters: Adapters | None = None
    base: str | None = None
    base_contents: str | None = None
    start: AdapterFolder | None = None
    merged: AdapterFolder | None = None
    packs = False

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.replaced = replaced or {}
        # Some families (BLOOM, for example) take no position ids: they count along the attention mask.
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters

    def with_model(self, model: PreTrainedModel) -> Self:
        """A module of this class, with these settings and adapters, around another model of the same architecture."""
        other = type(self)(model, self.replaced)
        other.pack(self.packs)
        if self.adapters is not None:
            other.adapters = self.adapters.within(model)
        return other

    def take_settings_of(self, other) -> None:
        """Copy from another module of this architecture the settings, other than weights, that its results depend on.

        It is called when a module gets the weights of another model.
        """

    def pack(self, packs: bool) -> None:
        """Set whether rows go through the layers without their padding."""
        self.packs = packs

    def checkpoint_activations(self) -> None:
        """Keep only each layer's input in forward passes, and compute the rest again in the backward pass."""
        model = self.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # the first is its name from transformers 5.23 on, where the other one warns

    def as_role(self, role: str) -> "Backbone":
        """The Policy or Scorer of a role: this module itself, unless it can compute as several models."""
        return self

    def take_role(self, role: str | None) -> None:
        """Compute in this role until the next call. None: the role that trains; other values only for modules that can
        compute as several models."""
        if self.adapters is not None:
            self.adapters.take(role)
        else:
            assert role is None, f"a model without adapters was asked to be the {role}"

    def inputs(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass without a cache. All arguments are (B, S) int64."""
        named = {"input_ids": sequences, "attention_mask": attention_mask, "use_cache": False}
        if self._takes_positions:
            named["position_ids"] = position_ids
        return named

    def packed_inputs(self, rows: PackedRows, sequences: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass over packed rows. There is no attention mask: a model would take it
        for the mask of a padded batch."""
        named = {"input_ids": rows.packed(sequences), "position_ids": rows.packed(position_ids), "use_cache": False}
        return named | rows.arguments(self.model.base_model.config._attn_implementation)

    def packed_states(self, rows: PackedRows, sequences: Tensor, position_ids: Tensor) -> Tensor:
        """The trunk's last hidden states of all real tokens, (1, N, d)."""
        return self.model.base_model(**self.packed_inputs(rows, sequences, position_ids))[0]

    def hidden_states(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """The trunk's last hidden states, (B, S, d)."""
        return self.model.base_model(**self.inputs(sequences, attention_mask, position_ids))[0]


class Policy(Backbone):
    """A causal language model that returns log-probs of given tokens.

    For models that change their logits after the head (soft caps, scales) the model itself computes the logits; for
    others the head is applied directly. `forward(probe=True)`, called after loading, finds out by a trial which is
    right.
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
            probe: instead find out whether the head may be applied directly (see Policy), and remember it.
            role: "reference" for the model before training, if this module also computes that one.

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
        """The result of `forward`, computed from rows without their padding. It is zero where a token, or the one
        before it, is padding."""
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
        """Whether the logits are the head's output for the trunk's hidden states, unchanged.

        The model's own code runs with the head's output replaced by large numbers, which a soft cap or a scale would
        change. Initial logits may be too small to show this.
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


class Scorer(Backbone):
    """A reward model or critic: backbone, one linear head on every token, and a stored offset.

    The gain of the normalisation is folded into the head's weight. The offset is stored in the model's config.json
    (`score_offset`), because Hugging Face's heads have no bias.

    kept_heads: frozen copies of a head that trains, by role. They are not part of `model`, which is saved without them.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__(model, replaced)
        model.score.__class__ = ScoreHead
        self.offset = float(getattr(model.config, "score_offset", 0.0))
        self.score_position = getattr(model.config, "score_position", "last_non_pad")
        self.pad_token_id = model.config.pad_token_id
        self.kept_heads = nn.ModuleDict()

    def keep_head(self, role: str) -> None:
        """Keep a frozen copy of the present head, with which the module computes as `role` (all ranks call this)."""
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
        """The score at every token; all arguments (B, S) int64. Returns (B, S) float32; for packed rows padding has
        zeros.

        role: "reward" for the model before training, if this module also computes that one.
        """
        self.take_role(role)
        head = dict(self.kept_heads.items()).get(role or "", self.model.score)
        if self.packs:
            rows = PackedRows(attention_mask)
            return rows.padded(head(self.packed_states(rows, sequences, position_ids)).squeeze(-1) + self.offset)
        hidden = self.hidden_states(sequences, attention_mask, position_ids)
        return head(hidden).squeeze(-1) + self.offset

    def sequence_scores(self, token_scores: Tensor, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """The score of each sequence: the score at the token at which this model was trained to be read.

        `score_position` "last" is the last real token, EOS included; models of this program have it. "last_non_pad" is
        Hugging Face's rule: the last token that differs from the pad token, so the one before EOS if pad == eos.

        Args: all (B, S). Returns (B,) float32.
        """
        counted = attention_mask.bool()
        if self.score_position == "last_non_pad" and self.pad_token_id is not None:
            counted = counted & (sequences != self.pad_token_id)
        slots = torch.arange(sequences.shape[1], device=sequences.device)
        last = torch.where(counted, slots, torch.zeros_like(slots)).amax(-1)
        return token_scores.gather(1, last.unsqueeze(-1)).squeeze(-1)
