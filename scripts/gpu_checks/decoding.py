"""Single tokens by CUDA graphs, and by torch.compile's code, against those of the model's own code."""

import os
import shutil
import time
import warnings

import torch

from engine.experience import Rollout
from engine.models.loading import DTYPES, load_policy
from engine.models.reading import read_tokenizer
from engine.rollout.decode import Sampler
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import prompts, random_models, sampling
from scripts.gpu_checks.trial import Skipped, Trial

GAP = {"fp32": 1e-3, "bf16": 0.25, "fp16": 0.03}  # nats between two log-probs of one token, by rounding (first_kl.py)


def against_plain(trial: Trial, decoding: str) -> None:
    """The same draws in float32 and in 16 bits: the same tokens but for rounding, and how long one takes."""
    if not trial.needs_gpu(f"--decoding {decoding}, in whose place recorded tokens were drawn"):
        decoding = "recorded"
    if decoding == "compiled" and not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        raise Skipped("torch.compile's code for GPUs is started by C code, and here is no C compiler")
    for dtype in ("fp32", sixteen_bits(trial)):
        with trial.part(dtype):
            in_dtype(trial, decoding, dtype)


def sixteen_bits(trial: Trial) -> str:
    """What this machine computes in: "bf16" where it has it, else "fp16"."""
    return "bf16" if trial.dry or torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


def in_dtype(trial: Trial, decoding: str, dtype: str) -> None:
    """Plain tokens and the others, each twice: the first time makes what the second replays."""
    path, _ = random_models(trial, "136m")
    model = load_policy(path, DTYPES[dtype]).to(device()).requires_grad_(False).eval().model
    rows, width, tokens = (6, 12, 16) if trial.dry else (32, 64, 96)
    batch = prompts(rows, width, model.config.vocab_size).to(device())
    drawn: dict[str, Rollout] = {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for way in ("plain", decoding):
            sampler = Sampler(read_tokenizer(path, "actor"), decoding=way)
            for time_ in ("first", "again"):
                seconds, drawn[way] = timed(lambda: sampler.responses(model, batch, sampling(tokens, recorded=True)))
                trial.figures[f"{dtype} {way} {time_}, ms a token"] = round(1e3 * seconds / tokens, 3)
            trial.expect(kind_of(sampler) == way, f"{dtype}: {way} tokens were read by {kind_of(sampler)} passes")
    given_up = [str(warning.message) for warning in told if "its own code reads them" in str(warning.message)]
    trial.expect(not given_up, f"{dtype}: {'; '.join(given_up)[:300]}")
    compared(trial, dtype, drawn["plain"], drawn[decoding])


def compared(trial: Trial, dtype: str, plain: Rollout, other: Rollout) -> None:
    """Rows are the same up to where rounding first tips a draw; there and before it log-probs are within rounding."""
    ours, theirs = (rollout.responses for rollout in (plain, other))
    differs = ours != theirs
    same = ~differs.any(-1)
    trial.figures[f"{dtype} rows alike"] = f"{int(same.sum())} of {len(same)}"
    before = differs.cumsum(-1) == 0
    gap = (plain.logprobs - other.logprobs).abs()[before].max().item() if before.any() else float("inf")
    trial.figures[f"{dtype} gap, nats"] = round(gap, 6)
    trial.expect(gap < GAP[dtype], f"{dtype}: log-probs of the same tokens are {gap:.3g} nats apart")
    if dtype == "fp32":
        trial.expect(
            int(same.sum()) >= 0.9 * len(same), f"only {int(same.sum())} of {len(same)} rows are alike in fp32"
        )


def kind_of(sampler: Sampler) -> str:
    """What the sampler's passes are called as a way of decoding."""
    return type(sampler._passes).__name__.removesuffix("Passes").lower().replace("graphed", "graphs") or "plain"


def timed(call) -> tuple[float, Rollout]:
    """Seconds of a call, the GPU's queue emptied, and its result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, result
