"""Single tokens by CUDA graphs against those of the model's own code."""

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from engine.experience import Rollout
from engine.models.loading import DTYPES, load_policy
from engine.models.reading import read_tokenizer
from engine.rollout.base import RolloutBackend
from engine.rollout.decode import Sampler
from engine.rollout.passes import Passes, RecordedPasses
from engine.rollout.request import Draws
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import prompts, random_models, sampling

# What reads a token, by the way of decoding: of a graph its launch alone, without what the host does before it.
READS = {
    "plain": (Passes, "tokens"),
    "recorded": (RecordedPasses, "tokens"),
    "graphs": (torch.cuda.CUDAGraph, "replay"),
}


class TokenTimes:
    """When passes and draws began and ended, on the GPU's clock where there is a GPU.

    The host's time is what is left from the first pass to the last draw: the GPU waits, or does what is neither.
    """

    def __init__(self):
        self.marks: dict[str, list[tuple]] = {"pass": [], "draw": []}

    def around(self, name: str, function: Callable) -> Callable:
        """The function, whose calls are noted under this name."""

        def call(*args, **kwargs):
            begun = _mark()
            result = function(*args, **kwargs)
            self.marks[name].append((begun, _mark()))
            return result

        return call

    def words(self) -> str:
        """Milliseconds a token, in words."""
        passes, draws = self.marks["pass"], self.marks["draw"][-len(self.marks["pass"]) :]  # the first follows a prompt
        read, drawn = (sum(_milliseconds(*each) for each in spans) / len(passes) for spans in (passes, draws))
        left = _milliseconds(passes[0][0], draws[-1][1]) / len(passes) - read - drawn
        return f"{read:.3f} pass + {drawn:.3f} draw + {left:.3f} host"


@contextlib.contextmanager
def token_times(decoding: str) -> Iterator[TokenTimes]:
    """Note the tokens that are decoded in this way within."""
    times, (owner, name) = TokenTimes(), READS[decoding]
    with (
        mock.patch.object(owner, name, times.around("pass", getattr(owner, name))),
        mock.patch.object(Draws, "draw", times.around("draw", Draws.draw)),
    ):
        yield times
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _mark():
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(begun, ended) -> float:
    return begun.elapsed_time(ended) if isinstance(begun, torch.cuda.Event) else 1e3 * (ended - begun)


GAP = {
    "fp32": 1e-3,
    "bf16": 0.25,
    "fp16": 0.03,
}  # nats between two log-probs of one token, by rounding (guards.py)
# Rows and the longest prompt of calls of one sampler: an evaluation, training, an evaluation, and prompts that grow.
CALLS = ((16, 32), (64, 48), (16, 64))
DRY_CALLS = ((2, 8), (6, 12), (2, 16))


def against_plain(trial: Trial, decoding: str, size: str, critic: str, *dtypes: str) -> None:
    """The same draws in these dtypes, "fp32" or "16 bits": the same tokens but for rounding, and how long one takes.

    size, critic: as in `random_models`.
    """
    if not trial.needs_gpu(f"--decoding {decoding}, in whose place recorded tokens were drawn"):
        decoding = "recorded"
    path, _ = random_models(trial, size, critic)
    for dtype in dtypes:
        dtype = sixteen_bits(trial) if dtype == "16 bits" else dtype
        with trial.part(dtype):
            in_dtype(trial, decoding, path, dtype)


def sixteen_bits(trial: Trial) -> str:
    """What this machine computes in: "bf16" where it has it, else "fp16"."""
    return "bf16" if trial.dry or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def in_dtype(trial: Trial, decoding: str, path: str, dtype: str) -> None:
    """All calls with one sampler of each way; then where the time of a token goes, in the largest call again."""
    model = load_policy(path, DTYPES[dtype]).to(device()).requires_grad_(False).eval().model
    calls, tokens = (DRY_CALLS, 16) if trial.dry else (CALLS, 96)
    batches = [
        prompts(rows, width, model.config.vocab_size, first=1000 * number).to(device())
        for number, (rows, width) in enumerate(calls)
    ]
    most, longest = (max(numbers) for numbers in zip(*calls))
    tokenizer = read_tokenizer(path, "actor")
    samplers = {way: Sampler(tokenizer, most, decoding=way, row_length=longest + tokens) for way in ("plain", decoding)}
    with mock.patch("torch.cuda.graph", wraps=torch.cuda.graph) as captured:
        for batch in batches:
            drawn = [sampler.responses(model, batch, sampling(tokens, recorded=True)) for sampler in samplers.values()]
            compared(trial, f"{dtype} {len(batch)} rows of {batch.input_ids.shape[1]}", *drawn)
    if decoding == "graphs":
        trial.figures[f"{dtype} captures"] = captured.call_count
    largest = batches[[len(batch) for batch in batches].index(most)]
    for way, sampler in samplers.items():
        told(trial, dtype, sampler, way)
        seconds = timed(lambda: sampler.responses(model, largest, sampling(tokens, recorded=True)))
        trial.figures[f"{dtype} {way}, ms a token of {most} rows"] = round(1e3 * seconds / tokens, 3)
        with token_times(sampler.decoding_ran) as spent:
            sampler.responses(model, largest, sampling(tokens, recorded=True))
        trial.figures[f"{dtype} {way}, of these"] = spent.words()


def told(trial: Trial, name: str, decodes: Sampler | RolloutBackend, expected: str | None = None) -> None:
    """Note which decoding ran; a failure where it is not the one expected, or has fallen back to the model's code."""
    ran, fallback = decodes.decoding_ran, decodes.fallback
    trial.figures[f"{name}, decoding"] = ran
    trial.expect(not fallback, f"{name}: the model's own code read single tokens: {fallback}")
    trial.expect(expected in (None, ran), f"{name}: {ran} decoding ran, not {expected}")


def compared(trial: Trial, name: str, plain: Rollout, other: Rollout) -> None:
    """Rows are the same up to where rounding first tips a draw; there and before it log-probs are within rounding.

    name: begins with the dtype.
    """
    dtype = name.split()[0]
    ours, theirs = (rollout.responses for rollout in (plain, other))
    differs = ours != theirs
    same = ~differs.any(-1)
    before = differs.cumsum(-1) == 0
    gap = (plain.logprobs - other.logprobs).abs()[before].max().item() if before.any() else float("inf")
    trial.figures[name] = f"{int(same.sum())} alike, {gap:.2g} nats apart"
    trial.expect(gap < GAP[dtype], f"{name}: log-probs of the same tokens are {gap:.3g} nats apart")
    if dtype == "fp32":
        trial.expect(int(same.sum()) >= 0.9 * len(same), f"{name}: only {int(same.sum())} are alike in fp32")


def timed(call) -> float:
    """Seconds of a call, the GPU's queue emptied."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started
