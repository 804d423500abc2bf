"""Single tokens by CUDA graphs against those of the model's own code."""

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from engine.experience import Rollout
from engine.gpus import data_sheet
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import DTYPES, load_policy
from engine.rollout.base import RolloutBackend
from engine.rollout.decode import Sampler
from engine.rollout.passes import Passes, RecordedPasses
from engine.rollout.request import Draws
from engine.zero.accelerator import now
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import prompts, random_models, sampling, sizes_here

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

    def milliseconds(self) -> tuple[float, float, float]:
        """Of a token: its pass, its draw, and the host."""
        passes, draws = self.marks["pass"], self.marks["draw"][-len(self.marks["pass"]) :]  # the first follows a prompt
        read, drawn = (sum(_milliseconds(*each) for each in spans) / len(passes) for spans in (passes, draws))
        return read, drawn, _milliseconds(passes[0][0], draws[-1][1]) / len(passes) - read - drawn


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
SHARE = 0.2  # of a token's time, for what is not its pass
BANDWIDTH = 0.5  # of the data sheet's, at least, at which a pass reads the weights


def against_plain(trial: Trial, decoding: str, size: str | None, *dtypes: str) -> None:
    """The same draws in these dtypes, "fp32" or "16 bits": the same tokens but for rounding, and how long one takes.

    size: as in `random_models`, or None for the largest that trains here.
    """
    if not trial.needs_gpu(f"--decoding {decoding}, in whose place recorded tokens were drawn"):
        decoding = "recorded"
    with trial.first_time("models"):
        path, _ = random_models(trial, *((size,) if size else sizes_here(trial)))
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
    with mock.patch("torch.cuda.graph", wraps=torch.cuda.graph) as captured, trial.first_time(f"{dtype}, all calls"):
        for batch in batches:
            drawn = [sampler.responses(model, batch, sampling(tokens, recorded=True)) for sampler in samplers.values()]
            compared(trial, f"{dtype} {len(batch)} rows of {batch.input_ids.shape[1]}", *drawn)
    if decoding == "graphs":
        trial.tell({f"{dtype} captures": captured.call_count})
    largest = batches[[len(batch) for batch in batches].index(most)]
    spent = {}
    for way, sampler in samplers.items():
        told(trial, dtype, sampler, way)
        seconds = timed(lambda: sampler.responses(model, largest, sampling(tokens, recorded=True)))
        trial.tell({f"{dtype} {way}, ms a token of {most} rows": round(1e3 * seconds / tokens, 3)})
        with token_times(sampler.decoding_ran) as times:
            sampler.responses(model, largest, sampling(tokens, recorded=True))
        spent[way] = times.milliseconds()
        read, drawn, host = spent[way]
        trial.tell({f"{dtype} {way}, of these": f"{read:.3f} pass + {drawn:.3f} draw + {host:.3f} host"})
    advised(trial, dtype, decoding, spent, sum(p.nbytes for p in model.parameters()))


def advised(
    trial: Trial, dtype: str, decoding: str, spent: dict[str, tuple[float, float, float]], weights: int
) -> None:
    """What to change where a token takes longer than it should. spent: milliseconds of a token's pass, draw and host,
    by way of decoding. weights: bytes that a pass reads."""
    if not trial.needs_gpu("how a token's time should divide"):
        return
    read, drawn, host = spent[decoding]
    total, plain = sum(spent[decoding]), sum(spent["plain"])
    trial.find(
        plain < 1.5 * total,
        f"{dtype}: a token takes {total:.2f} ms by {decoding}, {plain:.2f} by the model's own code",
        "Graphs save little here: --decoding plain spares their captures and their memory.",
    )
    trial.find(
        host > SHARE * total,
        f"{dtype}, {decoding}: {host:.2f} of a token's {total:.2f} ms the GPU waits for the host",
        "Look at what is done between two passes: _Loop._draw in engine/rollout/decode.py.",
    )
    trial.find(
        drawn > SHARE * total,
        f"{dtype}, {decoding}: drawing takes {drawn:.2f} of a token's {total:.2f} ms",
        "Many small kernels over the vocabulary: Draws.draw in engine/rollout/request.py, which a graph could hold.",
    )
    sheet = data_sheet(torch.cuda.get_device_name())
    if sheet is not None:
        share = weights / (read / 1e3) / sheet.bandwidth
        trial.tell({f"{dtype} {decoding}, weights read in a pass, of the bandwidth": f"{share:.0%}"})
        trial.find(
            share < BANDWIDTH,
            f"{dtype}, {decoding}: a pass reads weights at {share:.0%} of the bandwidth, not {BANDWIDTH:.0%}",
            "More rows at once cost little: raise --per_device_generation_batch_size. What a pass does beside reading "
            "weights (attention over all slots, small kernels) shows in a profile of engine/rollout/passes.py.",
        )


def told(trial: Trial, name: str, decodes: Sampler | RolloutBackend, expected: str | None = None) -> None:
    """Note which decoding ran; a failure where it is not the one expected, or has fallen back to the model's code."""
    ran, fallback = decodes.decoding_ran, decodes.fallback
    trial.tell({f"{name}, decoding": ran})
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
    trial.tell({name: f"{int(same.sum())} alike, {gap:.2g} nats apart"})
    trial.expect(gap < GAP[dtype], f"{name}: log-probs of the same tokens are {gap:.3g} nats apart")
    if dtype == "fp32":
        trial.expect(int(same.sum()) >= 0.9 * len(same), f"{name}: only {int(same.sum())} are alike in fp32")


def timed(call) -> float:
    """Seconds of a call, the GPU's queue emptied."""
    started = now()
    call()
    return now() - started
