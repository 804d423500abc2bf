"""scripts/benchmark_step3.py at a size, as shares of what the GPU's data sheet promises."""

import json
from statistics import median
from types import SimpleNamespace

import torch

from engine.memory.gpus import DataSheet, data_sheet
from engine.zero.communication import init
from scripts.benchmark_step3 import main, parse_arguments
from scripts.gpu_checks import decoding
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.machine import BANDWIDTH, MFU
from scripts.gpu_checks.models import random_models, sizes_here


def shares(trial: Trial) -> None:
    """Model FLOPs utilisation of training, share of memory bandwidth of decoding, and whether these reach their aims,
    with 64 rows of 256 + 256 tokens in bf16 on one GPU."""
    with trial.first_time("models"):
        actor, critic = random_models(trial, *sizes_here(trial))
    found = trial.folder / "found.json"
    sizes = "--prompts 4 --prompt_length 8 --response_length 8 --micro_batch 4 --steps 1 --warmup 0"
    if not trial.dry:
        sizes = "--prompts 64 --prompt_length 256 --response_length 256 --micro_batch 16 --steps 3 --warmup 1"
    words = ["--model", actor, "--critic", critic, "--zero_stage", "1", "--no_plain", "--json", str(found)]
    init()
    main(parse_arguments([*words, *sizes.split()]))
    [report] = json.loads(found.read_text())
    told(trial, report)


def told(trial: Trial, report: dict) -> None:
    """The figures of a report; shares of a data sheet where the GPU has one and computes in bf16."""
    steps = report["steps"]["ours"]
    seconds = {phase: median(step[phase] for step in steps) for phase in ("generate", "train", "step")}
    flops, read = rates(report)
    trial.tell(
        {
            "step, s": seconds["step"],
            "generate, s": seconds["generate"],
            "train, s": seconds["train"],
            "decode, ms a token": 1e3 * report["decode_seconds"] / (report["response"] - 1),
            "tokens/s": report["prompts"] * report["response"] / seconds["generate"],
            "training, TFLOP/s": flops / 1e12,
            "of the matrix rate": flops / report["matrix_rate"],
            "decode, GB/s": read / 1e9,
            "peak, GB": max(step["memory"] for step in steps) / 1e9,
        }
    )
    ran = SimpleNamespace(decoding_ran=report["decoding"], fallback=report["fallback"])
    decoding.told(trial, "tokens", ran, "recorded" if trial.dry else "graphs")
    if not trial.needs_gpu("shares of a GPU's data sheet"):
        return
    name = torch.cuda.get_device_name()
    sheet = data_sheet(name)
    if sheet is None or not torch.cuda.is_bf16_supported(including_emulation=False):
        trial.tell({"shares of the data sheet": f"none for {name}"})
    else:
        trial.tell(aims(report, sheet))


def rates(report: dict) -> tuple[float, float]:
    """FLOP/s of a rank in training, and bytes a second that it reads in decoding."""
    seconds = median(step["train"] for step in report["steps"]["ours"])
    return report["flops"]["train"] / report["ranks"] / seconds, report["decode_bytes"] / report["decode_seconds"]


def aims(report: dict, sheet: DataSheet) -> dict[str, str]:
    """Both rates as shares of the data sheet, and whether they reach what is aimed at."""
    flops, read = rates(report)
    return {
        what: f"{share:.1%} ({aim:.0%} {'reached' if share >= aim else 'not reached'})"
        for what, share, aim in (
            ("MFU of training", flops / sheet.flops, MFU),
            ("share of bandwidth in decoding", read / sheet.bandwidth, BANDWIDTH),
        )
    }
