"""Tensor parallelism: each rank of a group holds a part of every large matrix of a language model or scorer, and
computes with its part. Source: Shoeybi et al. 2019, Megatron-LM.

    plan = TensorParallelPlan.of(bare_model(policy), 2)        # plan.obstacle says why not, where it cannot be
    own = plan.part(bare_model(policy), group, device)         # memory for this rank's part, still to be filled:
    for name, weight in merged_weights(policy):
        plan.fill(own, name, weight, group)

A plan maps the names of modules to the styles in which they are divided. transformers has plans for most model families
(`model.tp_plan`); the plan for OPT is defined in this file. This file also divides the weights and adds up the results,
on plain tensors. transformers' own code for this is not used, because it needs weights that are read from files, and
its names have changed with each version.

The vocabularies of embedding and output layer are always divided. If the number of rows cannot be divided evenly, empty
rows are added at the end.
"""

import copy
import re
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.algo.logprobs import CHUNK_ELEMENTS, token_logprobs
from engine.distributed import RankGroup
from engine.models.config_and_tokenizer import head_sizes
from engine.models.heads import LogProbHead
from engine.models.policy import Backbone

# Styles in transformers' plans. By columns: the outputs of a layer are divided among ranks. By rows: its inputs are
# divided.
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "all_reduce")
_KEPT = (*_EXPERTS, "mla_kv_a_proj", "replicate", "replicated_with_grad_allreduce", "local_params")
_SPLITS = ("rowwise_split_input", "rowwise_rep")
_SUMS = (*_ROWS, "moe_tp_experts", "all_reduce")
VOCABULARY = "vocabulary"  # not a style of transformers: rows of an embedding or output layer, padded
_FEATURES = "features"  # not a style of transformers: columns of an embedding; the parts of vectors are joined
_GATHERS = ("colwise_gather_output", "colwise_rep", _FEATURES)

_OPT = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.out_proj": "rowwise",
    "layers.*.fc1": "colwise",
    "layers.*.fc2": "rowwise",
    "embed_positions": _FEATURES,  # not by rows: its forward pass adds an offset to row numbers
    "project_in": "colwise_gather_output",  # only in models with narrower word vectors (350M)
    "project_out": "colwise_gather_output",
}
# Plans for model families for which transformers has none, with names from the base model on; and the attributes of
# their modules that hold the number of heads.
_OWN_PLANS = {"opt": {f"decoder.{name}": style for name, style in _OPT.items()}}
_COUNTS_OF_HEADS = {"opt": ("decoder.layers.*.self_attn", "num_heads")}


@dataclass(frozen=True)
class TensorParallelPlan:
    """How a model is divided among a given number of ranks.

    styles: {name of a module or parameter: style}; a name has * in place of a layer's number. obstacle: the reason why
    the model cannot be divided among this number of ranks; None if it can.
    """

    ranks: int
    styles: dict[str, str] = field(default_factory=dict)
    obstacle: str | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, ranks: int) -> "TensorParallelPlan":
        """The plan for a model, which may be on the meta device."""
        config, prefix = model.config.get_text_config(), model.base_model_prefix
        styles = dict(getattr(model, "tp_plan", None) or {})
        if model.config.model_type in _OWN_PLANS:
            styles = {f"{prefix}.{name}": style for name, style in _OWN_PLANS[model.config.model_type].items()}
        if not styles:
            return cls(ranks, obstacle=f"transformers has no tensor-parallel plan for {model.config.model_type}")
        names = {id(module): _pattern(name) for name, module in model.named_modules()}
        for end in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(end, nn.Embedding) or type(end) in (nn.Linear, LogProbHead):
                styles[names[id(end)]] = VOCABULARY
        plan = cls(ranks, styles)
        uneven = [count for count in sorted(head_sizes(config)[:2]) if count % ranks]
        if uneven and any(style == "colwise" and re.search(r"(q|k|query)\w*$", name) for name, style in styles.items()):
            return cls(ranks, obstacle=f"its {uneven[0]} heads cannot be divided by {ranks}")
        return cls(ranks, styles, plan._obstacle(model))

    def _obstacle(self, model: PreTrainedModel) -> str | None:
        unknown = set(self.styles.values()) - {*_COLUMNS, *_ROWS, *_KEPT, VOCABULARY, _FEATURES}
        if unknown:
            return f"its tensor-parallel plan has a style that is not known here ({', '.join(sorted(unknown))})"
        for name, parameter in model.named_parameters():
            shape, cut = parameter.shape, self._cut(name, parameter.dim())
            if cut.style in ("packed_colwise", *_COLUMNS) and len(shape) == 2 and not name.endswith(".weight"):
                return f"{name} has two dimensions, of which the plan does not say how they are divided"
            if cut.dim is not None and cut.style != VOCABULARY and shape[cut.dim] % (self.ranks * cut.blocks):
                return f"{name} {tuple(shape)} cannot be divided by {self.ranks}"
        return None

    def numbers(self, model: nn.Module) -> int:
        """The number of elements of the model's weights that each rank holds."""
        return sum(self._cut(name, p.dim()).shape(p.shape, self.ranks).numel() for name, p in model.named_parameters())

    def part(self, own: PreTrainedModel, group: RankGroup, device: torch.device) -> PreTrainedModel:
        """Allocate memory for this rank's part of the weights of a model on the meta device; returns the model.

        The returned model is for inference. If all ranks of the group call the model with the same arguments, each rank
        gets the results of the whole model.
        """
        made: dict[int, nn.Parameter] = {}
        for name, weight in own.named_parameters():
            shape = self._cut(name, weight.dim()).shape(weight.shape, self.ranks)
            made[id(weight)] = nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=device), requires_grad=False)
        for module in own.modules():
            for name, weight in list(module._parameters.items()):
                if weight is not None:
                    module._parameters[name] = made[id(weight)]
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        for name, module in list(own.named_modules()):
            self._divide(name, module, group)
        self._divide_heads(own)
        return own.eval()

    def fill(self, own: nn.Module, name: str, weight: Tensor, group: RankGroup) -> None:
        """Copy this rank's part of a whole weight into the model that `part` returned."""
        target = own.get_parameter(name)
        self._cut(name, weight.dim()).copy(weight, target, group)

    def _style(self, name: str) -> str | None:
        """The style of a parameter: the style in the plan under its own name, or else under the name of its module."""
        pattern = _pattern(name)
        return self.styles.get(pattern) or self.styles.get(pattern.rpartition(".")[0])

    def _cut(self, name: str, dimensions: int) -> "_Cut":
        style = self._style(name)
        if style == VOCABULARY:
            return _Cut(style, 0)
        if style == _FEATURES:
            return _Cut(style, 1)
        if style in _COLUMNS:
            return _Cut(style, max(dimensions - 2, 0), blocks=2 if style == "packed_colwise" else 1)
        if style in _ROWS:
            return _Cut(style, dimensions - 1 if dimensions > 1 else None)
        return _Cut(style, None)

    def _divide(self, name: str, module: nn.Module, group: RankGroup) -> None:
        """Make a module exchange its results with the other ranks of the group."""
        style = self.styles.get(_pattern(name))
        if style == VOCABULARY and isinstance(module, nn.Embedding):
            _VocabularyPart(module, group)
        elif style == VOCABULARY and isinstance(module, nn.Linear):
            module.__class__ = DividedLogProbHead
            cast(DividedLogProbHead, module).group = group
        elif style in _GATHERS:
            module.register_forward_hook(lambda _, inputs, output: group.joined(output))
        elif style == "moe_identity_expert":
            module.register_forward_pre_hook(lambda _, inputs: (inputs[0] / group.size, *inputs[1:]))
        if style in _SPLITS:
            module.register_forward_pre_hook(
                lambda _, inputs: (inputs[0].chunk(group.size, -1)[group.place], *inputs[1:])
            )
        if style in _SUMS:
            module.register_forward_hook(lambda _, inputs, output: group.sum_(output))

    def _divide_heads(self, own: PreTrainedModel) -> None:
        place, count = _COUNTS_OF_HEADS.get(own.config.model_type, ("", ""))
        for name, module in own.named_modules():
            if place and _pattern(name) == f"{own.base_model_prefix}.{place}":
                setattr(module, count, getattr(module, count) // self.ranks)


@dataclass(frozen=True)
class _Cut:
    """Which part of a parameter a rank holds. The parameter consists of blocks along the dimension `dim`, and the rank
    holds a share of each block. If `dim` is None, the rank holds the whole parameter.

    If a vector is added to a sum over ranks, only the first rank holds the vector; the other ranks hold zeros.
    """

    style: str | None
    dim: int | None
    blocks: int = 1

    def shape(self, whole: torch.Size, ranks: int) -> torch.Size:
        """The shape of the part."""
        sizes = list(whole)
        if self.dim is not None:
            sizes[self.dim] = -(-sizes[self.dim] // ranks)
        return torch.Size(sizes)

    def copy(self, weight: Tensor, target: Tensor, group: RankGroup) -> None:
        """Copy this rank's part of the whole weight into the target."""
        if self.dim is None:
            if self.style not in _ROWS or group.place == 0:
                target.copy_(weight)
            return
        share = target.shape[self.dim] // self.blocks
        for number, block in enumerate(weight.chunk(self.blocks, self.dim)):
            start = min(group.place * share, block.shape[self.dim])
            part = block.narrow(self.dim, start, min(share, block.shape[self.dim] - start))
            target.narrow(self.dim, number * share, part.shape[self.dim]).copy_(part)


class _VocabularyPart:
    """Hooks for an embedding that holds a part of the vocabulary. The embedding returns zeros for tokens of other
    parts, and the ranks of the group add up their results."""

    def __init__(self, embedding: nn.Embedding, group: RankGroup):
        self.group, self.rows = group, embedding.weight.shape[0]
        self.elsewhere: Tensor | None = None
        embedding.register_forward_pre_hook(self.local)
        embedding.register_forward_hook(self.summed)

    def local(self, embedding: nn.Embedding, inputs: tuple) -> tuple:
        """The row of each token id within this rank's part. The attribute `elsewhere` tells which ids belong to other
        parts."""
        ids = inputs[0] - self.group.place * self.rows
        self.elsewhere = (ids < 0) | (ids >= self.rows)
        return ids.clamp(0, self.rows - 1), *inputs[1:]

    def summed(self, embedding: nn.Embedding, inputs: tuple, output: Tensor) -> Tensor:
        """The embeddings of all tokens, from all ranks of the group."""
        assert self.elsewhere is not None
        vectors, self.elsewhere = output.masked_fill(self.elsewhere.unsqueeze(-1), 0), None
        return self.group.sum_(vectors)


class DividedLogProbHead(LogProbHead):
    """A LogProbHead that holds a part of the vocabulary. Its results are for the whole vocabulary, since the ranks of
    the group exchange their logits."""

    group: RankGroup

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        low: Tensor | None = None,
        up: Tensor | None = None,
    ):
        """See LogProbHead.forward; low and up must be None."""
        assert low is None and up is None, "a divided head has no adapter beside it"
        if labels is None:
            return self._logits(hidden)
        rows = max(1, CHUNK_ELEMENTS // self.out_features)
        pieces = zip(hidden.flatten(0, 1).split(rows), labels.flatten().split(rows))
        parts = [token_logprobs(self._logits(states), targets, temperature, with_entropy) for states, targets in pieces]
        return tuple(torch.cat(column).view(labels.shape) for column in zip(*parts))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.group.joined(F.linear(hidden, self.weight, self.bias))[..., : self.out_features]


def bare_model(module: Backbone) -> PreTrainedModel:
    """A copy of a module's Hugging Face model on the meta device, without adapters and without weights."""
    config = copy.deepcopy(module.model.config)
    if module.adapters is not None and module.adapters.tied_head is not None:
        config.tie_word_embeddings = False  # a merged head is a matrix of its own
    with torch.device("meta"):
        return type(module.model)._from_config(config, dtype=next(module.parameters()).dtype)


def _pattern(name: str) -> str:
    """The form that a name has in plans: with * in place of the numbers of layers and experts."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
