"""The least that a step of PPO can cost: its floating-point operations, at rates measured on this machine; and how
seconds and bytes are measured.

work = Work(actor=Shape.of(model), critic=Shape.of(model), rows=32, prompt=32, response=64)
rates = Rates(work, rows_per_rank=16, tokens=16 * 96, dtype=torch.float32)
rates.measure()
seconds = floor(work, rates, ranks=2)["step"]
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig

from engine import distributed
from engine.zero.accelerator import now, on_gpu

SECONDS, TRIALS = 0.05, 5  # of one trial of a rate, and how many there are each time it is measured
COPIED = 1 << 28  # bytes copied at a time, more than any cache holds


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a dense decoder-only model its cost depends on.

    matrices: (outputs, inputs) of each matrix of the trunk, embeddings aside; layers; width: of a token's hidden
    state; attention_width: heads x numbers a head; cache_width: the same for the heads that keys and values have;
    vocabulary: rows of the output layer.
    """

    matrices: tuple[tuple[int, int], ...]
    layers: int
    width: int
    attention_width: int
    cache_width: int
    vocabulary: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """The shape of a model of this configuration; no weights are made."""
        config = config.get_text_config()
        with torch.device("meta"):
            trunk = AutoModel.from_config(config)
        embeddings = {id(module.weight) for module in trunk.modules() if isinstance(module, nn.Embedding)}
        heads = config.num_attention_heads
        head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            matrices=tuple(
                tuple(weight.shape)
                for weight in trunk.parameters()
                if weight.dim() == 2 and id(weight) not in embeddings
            ),
            layers=config.num_hidden_layers,
            width=config.hidden_size,
            attention_width=heads * head_width,
            cache_width=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
            vocabulary=config.vocab_size,
        )

    @property
    def parameters(self) -> int:
        """Numbers in the trunk's matrices."""
        return sum(rows * columns for rows, columns in self.matrices)

    def trunk(self, first: int, last: int) -> int:
        """FLOPs of one row's tokens first .. last - 1 (0-based), each attending to itself and all before it.

        2 x parameters + 4 x attention width x positions attended x layers, a token: a multiplication and an addition
        for each weight, and for each number of the keys (scores) and of the values (their mean).
        """
        attended = (last * (last + 1) - first * (first + 1)) // 2
        return 2 * self.parameters * (last - first) + 4 * self.attention_width * self.layers * attended

    def head(self, tokens: int) -> int:
        """FLOPs of the output layer on this many tokens."""
        return 2 * self.vocabulary * self.width * tokens


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of the phases of one step: `rows` responses of `response` tokens to prompts of `prompt` tokens, one PPO
    epoch. The reference has the actor's shape, the reward model the critic's; score heads are left out."""

    actor: Shape
    critic: Shape
    rows: int
    prompt: int
    response: int

    @property
    def prefill(self) -> int:
        """The prompts' way through the trunk."""
        return self.rows * self.actor.trunk(0, self.prompt)

    @property
    def decode(self) -> int:
        """One token of each row at a time: the first comes from the prefill's states, the last is read by no one."""
        return self.rows * (self.actor.trunk(self.prompt, self.length - 1) + self.actor.head(self.response))

    @property
    def experience(self) -> int:
        """Forward passes of actor, reference, critic and reward model."""
        return 2 * (self._actor_forward + self._critic_forward)

    @property
    def training(self) -> int:
        """Forward and backward passes of actor and critic; a backward pass costs two forward ones."""
        return 3 * (self._actor_forward + self._critic_forward)

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt + self.response

    @property
    def _actor_forward(self) -> int:
        return self.rows * (self.actor.trunk(0, self.length) + self.actor.head(self.response))

    @property
    def _critic_forward(self) -> int:
        return self.rows * self.critic.trunk(0, self.length)

    def decode_bytes(self, rows: int, bytes_a_number: int) -> int:
        """Bytes that a rank of `rows` rows reads while it decodes: all weights once a token, and the keys and values
        of the positions attended."""
        actor, steps = self.actor, self.response - 1
        attended = ((self.length - 1) * self.length - self.prompt * (self.prompt + 1)) // 2
        weights = (actor.parameters + actor.vocabulary * actor.width) * steps
        return (weights + rows * 2 * actor.cache_width * actor.layers * attended) * bytes_a_number


class Rates:
    """What a rank of this machine can do while all ranks work: the medians over all calls of `measure`.

    matrix: FLOP/s of the best of the actor's own matrices, applied to `tokens` tokens.
    decode: FLOP/s of the actor's largest matrix applied to `rows_per_rank` tokens. As many different ones take turns
        as hold as much as the trunk, so that caches hold no more of them than of the model.
    copy: bytes a second, read plus written, of a copy.
    """

    def __init__(self, work: Work, *, rows_per_rank: int, tokens: int, dtype: torch.dtype):
        self.shape = work.actor
        self.rows = rows_per_rank
        self.tokens = tokens
        self.dtype = dtype
        self._samples: dict[str, list[float]] = {}

    def measure(self) -> None:
        """Add a set of samples; all ranks call this together."""
        device = distributed.device()

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        for outputs, inputs in sorted(set(self.shape.matrices)):
            weight, states = numbers(outputs, inputs), numbers(self.tokens, inputs)
            self._add(f"matrix {outputs} x {inputs}", 2 * states.numel() * outputs, lambda: states @ weight.t())
        outputs, inputs = max(self.shape.matrices, key=lambda shape: shape[0] * shape[1])
        count = max(1, round(self.shape.parameters / (outputs * inputs)))
        weights, states = cycle([numbers(outputs, inputs) for _ in range(count)]), numbers(self.rows, inputs)
        self._add("decode", 2 * states.numel() * outputs, lambda: states @ next(weights).t(), at_least=count)
        source = torch.ones(COPIED, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self._add("copy", 2 * COPIED, lambda: target.copy_(source))

    def _add(self, name: str, amount: int, call: Callable, at_least: int = 1) -> None:
        self._samples.setdefault(name, []).extend(_rates(amount, call, at_least))

    @property
    def matrix(self) -> float:
        return max(median(found) for name, found in self._samples.items() if name.startswith("matrix"))

    @property
    def decode(self) -> float:
        return median(self._samples["decode"])

    @property
    def copy(self) -> float:
        return median(self._samples["copy"])


def _rates(amount: int, call: Callable, at_least: int) -> list[float]:
    """The mean over ranks of `amount` a second that `call` reaches while all ranks call it, once a trial."""

    def seconds(calls: int) -> float:
        started = now()
        for _ in range(calls):
            call()
        return now() - started

    seconds(at_least)  # warms up
    enough = torch.tensor(SECONDS * at_least / seconds(at_least), device=distributed.device())
    calls = max(at_least, int(distributed.all_reduce_max(enough)))
    found = []
    for _ in range(TRIALS):
        distributed.barrier()
        rate = torch.tensor(amount * calls / seconds(calls), dtype=torch.float64, device=distributed.device())
        found.append(distributed.all_reduce_sum(rate).item() / distributed.world_size())
    return found


def floor(work: Work, rates: Rates, ranks: int) -> dict[str, float]:
    """Seconds that each phase, and the whole step, would take were there nothing but its arithmetic."""
    seconds = {
        "generate": work.prefill / rates.matrix + work.decode / rates.decode,
        "make_experience": work.experience / rates.matrix,
        "train": work.training / rates.matrix,
    }
    seconds = {phase: each / ranks for phase, each in seconds.items()}
    return seconds | {"step": sum(seconds.values())}


def timed(call: Callable) -> tuple[float, object]:
    """Seconds that a call takes from when all ranks are there to when the last has done it, and its result."""
    distributed.barrier()
    started = now()
    result = call()
    return slowest(now() - started), result


def slowest(value: float) -> float:
    """The largest value of all ranks."""
    return distributed.all_reduce_max(torch.tensor(value, dtype=torch.float64, device=distributed.device())).item()


def reset_peak_memory() -> None:
    """Begin to look for the most memory anew."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):  # some containers forbid it: the peak is then that since the process began
            Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def peak_memory() -> int:
    """The most bytes held since: of the GPU if there is one, else of the process."""
    if on_gpu():
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
