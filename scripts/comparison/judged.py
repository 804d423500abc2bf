"""Models and data of the judged tasks: their reward models learned from few pairs, of which a part may be swapped.

Nothing here learns from what a task's judge is made of (judges.py).
"""

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.comparison.folders import make, read, write
from scripts.comparison.judges import OWN_PAIRS
from training.tools.toy.reviews import generate_review, make_corpus

STEP2: dict[str, dict[str, float]] = {
    "judged_reviews": {
        "max_prompt_seq_len": 32,
        "max_answer_seq_len": 48,
        "max_seq_len": 160,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
    },
    "judged_quickstart": {
        "max_prompt_seq_len": 12,
        "max_answer_seq_len": 32,
        "max_seq_len": 48,
        "num_train_epochs": 4,
        "learning_rate": 2e-3,
    },
    "judged_long": {
        "max_prompt_seq_len": 12,
        "max_answer_seq_len": 80,
        "max_seq_len": 96,
        "num_train_epochs": 8,
        "learning_rate": 1e-3,
        "dropout": 0.2,
    },
}
"""How a task's reward model is trained. Step 2's flags."""


def make_reviews(models: Path) -> None:
    """An SFT model of the sentences of OWN_PAIRS pairs, and a reward model of the first 600."""
    source, data = Path(os.environ["REVIEWS_DATA"]), models / "data"
    pairs = read(source / "pairs.jsonl")[:OWN_PAIRS]
    texts = [{"text": pair["prompt"] + pair[which]} for pair in pairs for which in ("chosen", "rejected")]
    prompts = list({each["prompt"]: each for each in read(source / "prompts.jsonl")}.values())
    write(data / "sft.jsonl", texts)
    write(data / "pairs.jsonl", pairs[:600])
    write(data / "held_out_pairs.jsonl", pairs[-400:])
    write(data / "prompts.jsonl", prompts[:-256])
    write(data / "eval_prompts.jsonl", prompts[-256:])
    step1(models, os.environ["REVIEWS_MODEL"], max_seq_len=128, num_train_epochs=5, learning_rate=3e-3)
    step2(models, **STEP2["judged_reviews"])


def make_quickstart(models: Path) -> None:
    """The quickstart's SFT model, and a reward model of 700 pairs, 15 % of them swapped."""
    data = models / "data"
    files = make_corpus(0, sft=8000, pairs=1256, prompts=4000, eval_prompts=256)
    pairs = files.pop("pairs.jsonl")
    files |= {"pairs.jsonl": swapped(pairs[:700], 0.15), "held_out_pairs.jsonl": pairs[-256:]}
    for name, rows in files.items():
        write(data / name, rows)
    base(models)
    step1(models, models / "base", max_seq_len=48, num_train_epochs=6, learning_rate=5e-3)
    step2(models, **STEP2["judged_quickstart"])


def make_long(models: Path) -> None:
    """Responses of three sentences of the quickstart's grammar, an SFT model of 1.9 million parameters, and a reward
    model of 1,500 pairs, every tenth of them swapped: the chosen response has more positive sentences."""
    rng, data = random.Random(0), models / "data"

    def text(rows: int) -> list[dict]:
        drawn = [generate_review(rng, rng.random() < 0.5) for _ in range(3 * rows)]
        return [
            {"prompt": first.prompt, "response": "".join(each.response for each in (first, *others))}
            | {"positive": sum(each.positive for each in (first, *others))}
            for first, *others in zip(*[iter(drawn)] * 3, strict=True)
        ]

    pairs = []
    for one, other in zip(text(4000), text(4000), strict=True):
        better, worse = sorted((one, other), key=lambda each: -each["positive"])
        if better["positive"] > worse["positive"]:
            pairs.append({"prompt": one["prompt"], "chosen": better["response"], "rejected": worse["response"]})
    write(data / "sft.jsonl", [{"prompt": row["prompt"], "response": row["response"]} for row in text(4000)])
    write(data / "pairs.jsonl", swapped(pairs[:1500], 0.1))
    write(data / "held_out_pairs.jsonl", pairs[-256:])
    prompts = list({row["prompt"]: {"prompt": row["prompt"]} for row in text(4000)}.values())
    write(data / "prompts.jsonl", prompts[:-256])
    write(data / "eval_prompts.jsonl", prompts[-256:])
    base(models, "--hidden_size", "192", "--num_layers", "4", "--num_heads", "6")
    step1(models, models / "base", max_seq_len=96, num_train_epochs=4, learning_rate=3e-3)
    step2(models, **STEP2["judged_long"])


def swapped(pairs: Sequence[dict], share: float) -> list[dict]:
    """The pairs, with chosen and rejected exchanged in this share of them."""
    rng = random.Random(1)
    others = set(rng.sample(range(len(pairs)), round(share * len(pairs))))
    return [
        pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} if place in others else pair
        for place, pair in enumerate(pairs)
    ]


def base(models: Path, *sizes: str) -> None:
    """A word tokenizer and a model with random weights."""
    folder, data = models / "base", [models / "data" / name for name in ("sft.jsonl", "pairs.jsonl")]
    make(folder, sys.executable, "-m", "training.tools.toy.model", "--data", *data, "--output_dir", folder, *sizes)


def step1(models: Path, begun: Path | str, **flags: float) -> None:
    """The SFT model."""
    _train(
        "step1_sft",
        models / "sft",
        model_name_or_path=begun,
        data_path=models / "data" / "sft.jsonl",
        per_device_train_batch_size=64,
        lr_scheduler_type="cosine",
        num_warmup_steps=20,
        **flags,
    )


def step2(models: Path, made: Path | None = None, **flags: float) -> None:
    """A reward model in `made`, by default the task's own."""
    _train(
        "step2_reward",
        made or models / "reward",
        model_name_or_path=models / "sft",
        data_path=models / "data" / "pairs.jsonl",
        eval_data_path=models / "data" / "held_out_pairs.jsonl",
        normalization_data_path=models / "data" / "prompts.jsonl",
        per_device_train_batch_size=32,
        num_warmup_steps=10,
        **flags,
    )


def _train(program: str, folder: Path, **flags: object) -> None:
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    make(folder, sys.executable, "-m", f"training.{program}", *words, "--dtype", "fp32", "--output_dir", folder)
