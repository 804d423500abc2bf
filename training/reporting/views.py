"""What a program puts before people's eyes, and in which order: one View a program.

The names are those of docs/metrics.md. A chart may list metrics that a run does not have (no critic): it shows those
that it has. One TensorBoard may show the runs of all three steps: sections of one title become one, charts that are
equal one chart, and a metric is drawn for every run that has it.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class View:
    """What stands behind the progress bar, in TensorBoard's HPARAMS table, and in its Custom Scalars tab.

    bar: label -> metric. tuned: the settings seen first in the table, where the others are columns to be ticked.
    compared: the metrics by which it compares runs. charts: section -> chart -> its metrics; three charts make a row.
    held_out: the same, a metric a chart: drawn as measured, with its margin of error.
    """

    bar: Mapping[str, str]
    tuned: tuple[str, ...]
    compared: tuple[str, ...]
    charts: Mapping[str, Mapping[str, tuple[str, ...]]]
    held_out: Mapping[str, Mapping[str, str]]


_TIME_AND_MEMORY = {
    "seconds a step": ("time/step", "time/generate", "time/make_experience", "time/train", "time/checkpoint"),
    "peak memory, 10^9 bytes": ("memory/peak_gb",),
}

PPO = View(
    bar={"score": "objective/scores", "kl": "objective/kl", "length": "rollout/response_length"},
    tuned=("seed", *(f"resolved_dialect/{field}" for field in ("name", "kl_coef", "actor_lr", "critic_lr"))),
    compared=(
        "eval/score",
        "eval/kl",
        "eval/response_length",
        "eval/distinct_bigrams",
        "objective/scores",
        "objective/kl",
    ),
    charts={
        "score and KL": {
            "score": ("objective/scores",),
            "KL to the reference, nats a response": ("objective/kl",),
            "reward: score with the KL penalty, the penalty alone": (
                "objective/rlhf_reward",
                "objective/non_score_reward",
            ),
            "KL coefficient": ("objective/kl_coef",),
            "KL, nats a token": ("objective/kl_per_token",),
            "entropy, nats a token": ("objective/entropy",),
        },
        "responses": {
            "length, tokens": ("rollout/response_length",),
            "share that ended by itself": ("rollout/eos_rate",),
        },
        "policy": {
            "clip fraction": ("policy/clipfrac",),
            "approximate KL of the updates": ("policy/approxkl",),
            "loss": ("policy/loss",),
        },
        "value": {
            "explained variance: of the returns, of what really followed": (
                "value/explained_variance",
                "value/explained_outcome",
            ),
            "loss": ("value/loss",),
            "values and returns": ("value/mean", "returns/mean"),
            "calibration: what followed, by value (1 is right)": ("value/slope",),
            "bias: value less what followed": ("value/bias",),
        },
        "critic's pretraining, steps up to 0": {
            "explained variance, pretraining": ("critic_pretrain/explained_variance",),
            "loss, pretraining": ("critic_pretrain/loss",),
            "calibration, pretraining (1 is right)": ("critic_pretrain/slope",),
        },
        "optimizers": {
            "learning rates": ("policy/lr", "value/lr"),
            "gradient norms": ("policy/grad_norm", "value/grad_norm"),
            "advantages before whitening, standard deviation": ("advantages/std",),
        },
        "time and memory": _TIME_AND_MEMORY | {"tokens generated per second": ("rollout/tokens_per_second",)},
    },
    held_out={
        "held-out prompts": {
            "score, held out": "eval/score",
            "KL to the reference, held out": "eval/kl",
            "score, change since before training": "eval/score_change",
            "length, held out": "eval/response_length",
            "distinct bigrams, held out": "eval/distinct_bigrams",
            "compressed together, bytes a token": "eval/compressed_bytes",
            "new words, share": "eval/new_words",
        },
    },
)


def averaged(view: View) -> View:
    """With the held-out charts of the averaged weights, too."""
    sections = {
        f"{section}, EMA": {f"{title}, EMA": name.replace("eval/", "eval/ema_") for title, name in charts.items()}
        for section, charts in view.held_out.items()
    }
    return dataclasses.replace(view, held_out={**view.held_out, **sections})


_SUPERVISED = {
    "optimizer": {"learning rate": ("train/lr",), "gradient norm": ("train/grad_norm",)},
    "time and memory": _TIME_AND_MEMORY,
}
_TUNED = ("learning_rate", "model_name_or_path", "num_train_epochs", "per_device_train_batch_size", "seed")

SFT = View(
    bar={"loss": "train/loss", "lr": "train/lr"},
    tuned=_TUNED,
    compared=("eval/loss", "eval/perplexity", "train/loss"),
    charts={
        "texts": {"loss, nats a token": ("train/loss",)},
        **_SUPERVISED,
    },
    held_out={
        "held-out texts": {"loss, nats a token, held out": "eval/loss", "perplexity, held out": "eval/perplexity"}
    },
)

REWARD = View(
    bar={"loss": "train/pair_loss", "accuracy": "train/accuracy", "lr": "train/lr"},
    tuned=_TUNED,
    compared=("eval/accuracy", "eval/margin", "train/pair_loss"),
    charts={
        "pairs": {
            "accuracy": ("train/accuracy",),
            "loss, nats a pair": ("train/pair_loss",),
            "margin": ("train/margin",),
            "margin, standard deviation": ("train/margin_std",),
        },
        **_SUPERVISED,
    },
    held_out={
        "held-out pairs": {
            "accuracy, held out": "eval/accuracy",
            "loss, nats a pair, held out": "eval/pair_loss",
            "margin, held out": "eval/margin",
            "margin, standard deviation, held out": "eval/margin_std",
        },
    },
)
