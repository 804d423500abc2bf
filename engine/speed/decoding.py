"""How long a token takes: through ZeRO-3's partitions, or by a copy that several ranks hold together."""

from dataclasses import dataclass
from typing import Protocol

from engine.memory.blueprint import Blueprint
from engine.memory.data_sheets import DataSheet
from engine.rollout.cache import cache_bytes


class Ranks(Protocol):
    """Ranks of one kind, and how long they take to exchange so many bytes; `Machines` has it by data sheets."""

    @property
    def sheet(self) -> DataSheet:
        """Of each rank's GPU."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...

    def all_gather(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of so many ranks, by default all, has `size` bytes, of which each had an equal part."""
        ...

    def all_reduce(self, size: float, ranks: int | None = None) -> float:
        """Seconds until each of the ranks has the sum of all tensors of `size` bytes."""
        ...

    def reduce_scatter(self, size: float) -> float:
        """Seconds until each rank has its part of the sum of all tensors of `size` bytes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A language model's shape.

    parameters: how many. layers, width: decoder layers, and numbers of a hidden state. kept: numbers of a token's keys
    and values in one layer. vocabulary: logits of a token. number: bytes of a number, weights' and activations'.
    """

    parameters: int
    layers: int
    width: int
    kept: int
    vocabulary: int
    number: int = 2

    @classmethod
    def of(cls, model: Blueprint) -> "Decoder":
        """The shape of a model on paper, adapters and all."""
        config = model.module.model.config.get_text_config()
        layers = config.num_hidden_layers
        return cls(
            parameters=model.numbers,
            layers=layers,
            width=config.hidden_size,
            kept=cache_bytes(model.module.model, slots=1) // (layers * model.width),
            vocabulary=model.vocabulary,
            number=model.width,
        )

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self.parameters * self.number

    def flops(self, length: float) -> float:
        """Floating-point operations of one token that attends to so many: two for each weight, and four for each number
        of a hidden state, each layer and each token attended to (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 2 * self.parameters + 4 * self.layers * self.width * length

    def cached(self, length: float) -> float:
        """Bytes of keys and values of a row of so many tokens."""
        return self.layers * self.kept * self.number * length


LLAMA_2_70B = Decoder(parameters=68_976_648_192, layers=80, width=8192, kept=2 * 8 * 128, vocabulary=32000)


@dataclass(frozen=True, slots=True)
class TokenTime:
    """Seconds in which every row gets one more token.

    memory: until weights, keys and values are read. arithmetic: until all is multiplied. exchange: between ranks.
    """

    memory: float
    arithmetic: float
    exchange: float
    overlaps: bool
    """Whether ranks exchange while they compute."""

    @property
    def seconds(self) -> float:
        """Altogether. Reading and multiplying go on side by side."""
        compute = max(self.memory, self.arithmetic)
        return max(compute, self.exchange) if self.overlaps else compute + self.exchange


def partitioned_token(
    decoder: Decoder, machines: Ranks, rows: float, length: float, ranks: int | None = None
) -> TokenTime:
    """A token with `--rollout_backend zero3`: every rank gathers all weights, a call for each layer, the embedding and
    the output layer, while it computes its own rows with what has come before.

    rows: on each rank. length: tokens that a row has, its prompt included. ranks: that gather from each other, by
    default all; hpZ has groups of some.
    """
    calls = decoder.layers + 2
    return TokenTime(
        memory=(decoder.size + rows * decoder.cached(length)) / machines.sheet.bandwidth,
        arithmetic=rows * decoder.flops(length) / machines.sheet.flops,
        exchange=calls * machines.all_gather(decoder.size / calls, ranks),
        overlaps=True,
    )


def divided_token(decoder: Decoder, machines: Ranks, rows: float, length: float, ranks: int) -> TokenTime:
    """A token with `--inference_tp_size`: so many ranks decode the rows of all of them, and each reads and multiplies
    its part of weights, keys and values (Shoeybi et al. 2019, Megatron-LM).

    Hidden states of all rows are summed over the group after the embedding and twice in each layer, and logits are
    gathered; the next matrix waits for that. rows, length: as `partitioned_token` has them, rows on each rank.
    """
    together = rows * ranks
    summed = machines.all_reduce(together * decoder.width * decoder.number, ranks)
    logits = machines.all_gather(together * decoder.vocabulary * decoder.number, ranks)
    return TokenTime(
        memory=(decoder.size + together * decoder.cached(length)) / ranks / machines.sheet.bandwidth,
        arithmetic=together * decoder.flops(length) / ranks / machines.sheet.flops,
        exchange=(2 * decoder.layers + 1) * summed + logits,
        overlaps=False,
    )
