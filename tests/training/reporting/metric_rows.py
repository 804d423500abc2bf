"""The metrics of a short run, and a file of them."""

import json
from pathlib import Path

ROWS = (
    {
        "step": 0,
        "samples": 0,
        "eval/score": -0.5,
        "eval/kl": 0.0,
        "eval/response_length": 20.0,
        "eval/distinct_bigrams": 0.75,
        "time/wall": 8.0,
        "time/start": 5.0,
        "time/evaluate": 2.5,
    },
    {
        "step": 1,
        "samples": 64,
        "objective/scores": 0.25,
        "objective/kl": 0.5,
        "policy/loss": -0.125,
        "policy/grad_norm": 1.0,
        "time/generate": 3.0,
        "time/train": 5.0,
        "time/step": 10.0,
        "time/wall": 10.5,
    },
    {
        "step": 2,
        "samples": 128,
        "objective/scores": None,
        "objective/kl": 1.0,
        "policy/loss": 0.25,
        "policy/grad_norm": 1.0,
        "time/generate": 3.0,
        "time/train": 5.0,
        "time/checkpoint": 2.0,
        "time/step": 10.0,
        "time/wall": 17.5,
        "time/evaluate": 3.0,
        "eval/score": 1.25,
        "eval/kl": 2.0,
        "eval/response_length": 24.5,
        "eval/distinct_bigrams": 0.5,
        "eval/ema_score": 1.0,
        "eval/ema_kl": 1.5,
    },
)


def write(path: Path, *records: dict) -> Path:
    """Save records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
