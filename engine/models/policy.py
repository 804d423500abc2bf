"""This file has two modules. A Policy is a causal language model that returns log-probs of given tokens. A Scorer is a
reward model or critic that returns a number for every token. Their base class `Backbone` holds a Hugging Face model and
calls the model's trunk, which is the layers without the head.

A policy returns log-probs, (B, T), instead of logits, (B, T, V), which would be the largest tensor of a step. Logits
are computed in chunks, so that only one chunk of logits is in memory at a time.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from engine.algo.logprobs import CHUNK_ELEMENTS, predicting, token_logprobs
from engine.distributed import ALONE, RankGroup
from engine.experience import position_ids as positions_from
from engine.models.adapter_folders import AdapterFolder
from engine.models.adapters import Adapters
from engine.models.attention import PackedRows
from engine.models.heads import LogProbHead, ScoreHead
from engine.models.sequence_parallel import SplitRows
from engine.trace import traced
from engine.zero.gathering import whole_copy


class Backbone(nn.Module):
    """A Hugging Face model that is called with those arguments that the trunk of its family accepts.

    replaced: {name: original value} of settings that loading has replaced in the model's configuration (`as_computed`);
        saving restores them.
    adapters: the LoRA adapters within the model; None if it has no adapters.
    base: the path from which the weights were loaded.
    base_contents: the fingerprint of the weights at this path, which a saved adapter records; None without adapters.
    start: an adapter that was not merged when the model was loaded, and that will be trained further; None otherwise.
    merged: the adapter that was merged into the weights when the model was loaded, or None.
    packs: whether padding is removed from rows before they go through the layers (packed rows).
    may_pad: whether rows may keep their padding although `packs` is true at first: nobody asked for packed rows.
    group: the ranks that compute packed rows together, each a slice of them (engine/models/sequence_parallel.py).
    """

    model: PreTrainedModel
    adapters: Adapters | None = None
    base: str | None = None
    base_contents: str | None = None
    start: AdapterFolder | None = None
    merged: AdapterFolder | None = None
    packs = may_pad = False
    group: RankGroup = ALONE

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__()
        self.model = model
        self.replaced = replaced or {}
        if model.base_model is model:  # Llama 4 names its layers by their place in the model with a vision tower
            model.base_model_prefix = "model"
        # Some families (BLOOM, for example) take no position ids, and compute positions from the attention mask.
        self._takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters

    def pack(self, packs: bool) -> None:
        """Set whether rows go through the layers without padding."""
        self.packs = packs

    def split(self, group: RankGroup) -> None:
        """Compute packed rows together with the ranks of this group from now on."""
        self.group = group

    def rows(self, attention_mask: Tensor) -> PackedRows:
        """The packed rows of a batch, or this rank's slice of those of its group."""
        return PackedRows(attention_mask) if self.group.size == 1 else SplitRows(attention_mask, self.group)

    def checkpoint_activations(self) -> None:
        """Keep only each layer's input in forward passes, and compute the rest again in the backward pass."""
        model = self.model
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # from transformers 5.23 on the first name is right; the other warns

    def as_role(self, role: str) -> "Backbone":
        """The Policy or Scorer of a role. It is this module itself, except in modules that can compute as several
        models."""
        return self

    def select_role(self, role: str | None) -> None:
        """Compute in this role until the next call. None: compute in the role that trains. Other roles are possible
        only for modules that can compute as several models."""
        if self.adapters is not None:
            self.adapters.select(role)
        else:
            assert role is None, f"a model without adapters was asked to be the {role}"

    def inputs(self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass without a cache. All arguments are (B, S) int64."""
        named = {"input_ids": sequences, "attention_mask": attention_mask, "use_cache": False}
        if self._takes_positions:
            named["position_ids"] = position_ids
        return named

    def packed_inputs(self, rows: PackedRows, sequences: Tensor, position_ids: Tensor) -> dict:
        """The keyword arguments of a forward pass over packed rows. There is no attention mask, because a model would
        treat it as the mask of a padded batch."""
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

    Some models change their logits after the head (soft caps, scales); for these the model itself computes the logits.
    For other models the head is applied directly. A trial, `forward(probe=True)` after loading, finds out to which kind
    the model belongs.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__(model, replaced)
        head = model.get_output_embeddings()
        self.direct_head = type(head) in (nn.Linear, LogProbHead)
        if self.direct_head:
            head.__class__ = LogProbHead  # in place, so that parameter names do not change

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
        """The log-probs and entropies of the last `response_length` (T) tokens of each row.

        Args:
            sequences, attention_mask, position_ids: (B, S) int64.
            temperature: the number that the logits are divided by.
            with_entropy: whether to compute entropies; if not, they are zeros.
            probe: do not compute log-probs, but find out whether the head may be applied directly (see Policy), and
                store the answer.
            role: "reference" for the results of the model before training, if this module also computes that model.

        Returns: (logprobs, entropy), each (B, T) float32.
        """
        self.select_role(role)
        if probe:
            return self._probe(sequences)
        assert attention_mask is not None and position_ids is not None
        if self.packs:
            rows = self.rows(attention_mask)
            return self._packed_logprobs(rows, sequences, position_ids, response_length, temperature, with_entropy)
        labels = sequences[:, -response_length:]
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
        response_length: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        """The result of `forward`, computed from packed rows. The result is zero where a token or the preceding token
        is padding."""
        # Each token comes with the one whose log-prob is asked of it, plus 1: 0 if none is.
        targets = torch.where(rows.predicting(response_length), sequences.roll(-1, 1) + 1, 0)
        asked = rows.packed(targets)
        before = asked[0].nonzero().squeeze(-1)
        wanted = asked[:, before] - 1
        if self.direct_head:
            hidden = self.packed_states(rows, sequences, position_ids).index_select(1, before)
            found = self.model.get_output_embeddings()(hidden, wanted, temperature, with_entropy)
        else:
            inputs = self.packed_inputs(rows, sequences, position_ids)
            found = _logits_logprobs(
                self.model(**inputs, logits_to_keep=before).logits, wanted, temperature, with_entropy
            )
        zeros = torch.zeros_like(asked, dtype=torch.float32)
        logprobs, entropy = (
            predicting(rows.padded(zeros.index_copy(1, before, one)), response_length).contiguous() for one in found
        )
        return logprobs, entropy

    def _probe(self, sequences: Tensor) -> Tensor:
        """Whether the model's logits are the unchanged output of the head for the trunk's hidden states.

        The model's own code is run with the head's output replaced by large numbers, which a soft cap or a scale would
        change. The real logits of a new model may be too small to show such a change.
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
    """The result of `token_logprobs`, computed in chunks of positions, for given logits (B, T, V) and labels (B, T):
    two tensors (B, T)."""
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
    """A reward model or critic: a backbone, a linear head that is applied at every token, and an offset that is added
    to the scores.

    If scores are normalised, the head's weight is multiplied by the factor. The offset is stored in the model's
    config.json (`score_offset`), because Hugging Face's score heads have no bias.

    kept_heads: {role: a frozen copy of the head that trains}. The copies are not part of `model`, which is saved
    without them.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any] | None = None):
        super().__init__(model, replaced)
        model.score.__class__ = ScoreHead
        self.offset = float(getattr(model.config, "score_offset", 0.0))
        self.score_position = getattr(model.config, "score_position", "last_non_pad")
        self.pad_token_id = model.config.pad_token_id
        self.kept_heads = nn.ModuleDict()

    def keep_head(self, role: str) -> None:
        """Keep a frozen copy of the present head. With this copy the module computes as `role` (all ranks call this
        together)."""
        self.kept_heads[role] = whole_copy(self.model.score).requires_grad_(False)

    @traced("scorer forward")
    def forward(
        self, sequences: Tensor, attention_mask: Tensor, position_ids: Tensor, role: str | None = None
    ) -> Tensor:
        """(B, S) float32, the score at every token. All tensor arguments are (B, S) int64. For packed rows the scores
        at padding are zeros.

        role: "reward" for the scores of the model before training, if this module also computes that model.
        """
        self.select_role(role)
        head = dict(self.kept_heads.items()).get(role or "", self.model.score)
        if self.packs:
            rows = self.rows(attention_mask)
            return rows.padded(head(self.packed_states(rows, sequences, position_ids)).squeeze(-1) + self.offset)
        hidden = self.hidden_states(sequences, attention_mask, position_ids)
        return head(hidden).squeeze(-1) + self.offset

    def sequence_scores(self, token_scores: Tensor, sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """The score of each sequence: the score at the token at which this model was trained to give it.

        With `score_position` "last" it is the last real token, EOS included; models that this program trained have
        "last". With "last_non_pad", Hugging Face's rule, it is the last token that differs from the pad token. If pad
        == eos, this is the token before EOS.

        Args: all (B, S). Returns (B,) float32.
        """
        counted = attention_mask.bool()
        if self.score_position == "last_non_pad" and self.pad_token_id is not None:
            counted = counted & (sequences != self.pad_token_id)
        positions = torch.arange(sequences.shape[1], device=sequences.device)
        last = torch.where(counted, positions, torch.zeros_like(positions)).amax(-1)
        return token_scores.gather(1, last.unsqueeze(-1)).squeeze(-1)
