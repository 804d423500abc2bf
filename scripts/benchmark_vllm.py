"""Tokens a second of vLLM and of our own loop, by turns in one process, with the same responses asked of both.

source scripts/vllm_environment.sh
python scripts/benchmark_vllm.py --size 34m 136m
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoTokenizer

from engine.experience import PromptBatch
from engine.models.loading import load_policy
from engine.rollout import ReplicaRollouts, SamplingConfig, VLLMRollouts
from engine.rollout.cache import cache_bytes
from engine.zero.communication import init
from scripts.benchmark_models import make_models


def main() -> int:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", nargs="+", default=["34m"], help="of scripts/benchmark_models.py (default: 34m)")
    parser.add_argument("--rows", type=int, default=16, help="responses drawn side by side (default: 16)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt (default: 32)")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response (default: 64)")
    parser.add_argument("--turns", type=int, default=3, help="of each, after one for nothing (default: 3)")
    options = parser.parse_args()
    device = init()
    print(
        f"{options.rows} rows, {options.prompt} + {options.response} tokens; tokens a second, median of {options.turns}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for size in options.size:
            compare(size, Path(folder), options, device)
    sys.stdout.flush()
    os._exit(0)  # vLLM's engines end with the process


def compare(size: str, folder: Path, options: argparse.Namespace, device: torch.device) -> None:
    """Print tokens a second of both for one size, and how many rows are the same."""
    path, _ = make_models(folder / size, size, size, torch.float32)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = load_policy(path, dtype).to(device).eval()
    actor = SimpleNamespace(module=policy, stage=0, version=0, role="actor")
    tokenizer = AutoTokenizer.from_pretrained(path)
    length = options.prompt + options.response
    ours = ReplicaRollouts(actor, tokenizer, options.rows, decoding="auto")
    theirs = VLLMRollouts(
        actor,
        tokenizer,
        rows_at_once=options.rows,
        row_length=length,
        cache_bytes=cache_bytes(policy.model, options.rows * length),
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, policy.model.config.vocab_size, (options.rows, options.prompt), generator=generator)
    rows = torch.arange(options.rows)
    prompts = PromptBatch(ids, torch.ones_like(ids), rows, torch.zeros_like(rows)).to(device)
    how = SamplingConfig(max_new_tokens=options.response, pad_token_id=0, stop_token_ids=(), logprob_temperature=1.0)
    seconds: dict[str, list[float]] = {"ours": [], "vLLM": []}
    drawn = {}
    for turn in range(options.turns + 1):
        for name, rollouts in (("ours", ours), ("vLLM", theirs)):
            began = time.perf_counter()
            drawn[name] = rollouts.generate(prompts, how).responses.cpu()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    rates = {name: options.rows * options.response / statistics.median(times) for name, times in seconds.items()}
    same = int((drawn["ours"] == drawn["vLLM"]).all(1).sum())
    print(
        f"{size}: ours {rates['ours']:,.0f}, vLLM {rates['vLLM']:,.0f} (ratio {rates['vLLM'] / rates['ours']:.2f}); "
        f"{same} of {options.rows} rows the same",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
