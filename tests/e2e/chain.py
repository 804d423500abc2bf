"""Steps 1, 2 and 3 as users run them: two ranks, ZeRO-3, each starting from what the ones before it wrote."""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from scripts.harness.programs import Result, Tiny, launch
from training.reporting.standard_errors import ENDINGS

STEPS, EVALUATED = 4, 8
EVERY_STEP = {
    *(
        f"objective/{name}"
        for name in ("kl", "kl_per_token", "kl_coef", "entropy", "scores", "rlhf_reward", "non_score_reward")
    ),
    *(f"policy/{name}" for name in ("loss", "approxkl", "clipfrac", "ratio_mean", "ratio_max", "grad_norm", "lr")),
    *(f"value/{name}" for name in ("loss", "clipfrac", "explained_variance", "mean", "grad_norm", "lr")),
    *(f"value/{name}" for name in ("explained_outcome", "slope", "bias")),
    "advantages/mean",
    "advantages/std",
    "returns/mean",
    "returns/var",
    *(f"rollout/{name}" for name in ("response_length", "eos_rate", "tokens_per_second", "degenerate")),
    *(f"time/{name}" for name in ("generate", "make_experience", "train", "step")),
    *(f"speed/{name}" for name in ("make_experience", "train")),
    "memory/peak_gb",
}
EVALUATION = {
    f"eval/{name}" for name in ("score", "score_std", "kl", "response_length", "distinct_bigrams", "distinct_responses")
} | {f"eval/{name}" for name in ("compressed_bytes", "new_words")}
EVALUATION |= {f"eval/{name}{ending}" for name in ("score", "kl", "response_length", "new_words") for ending in ENDINGS}
AVERAGED = {name.replace("eval/", "eval/ema_") for name in EVALUATION}


@dataclass(frozen=True)
class Chain:
    """Folders of the three steps and of step 3 resumed, and how each ended."""

    folder: Path
    results: dict[str, Result]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def run_chain(tiny: Tiny, folder: Path) -> Chain:
    """Four launches: steps 1, 2 and 3, and step 3 as if it had been killed and resumed."""
    results = {}

    def started(name: str, step: int, **flags) -> None:
        results[name] = launch(step, tiny.flags(step, output_dir=folder / name, **flags))
        assert results[name].code == 0, results[name].stdout + results[name].stderr

    started("sft", 1, zero_stage=3, learning_rate=1e-3)
    started("reward", 2, zero_stage=3, learning_rate=1e-3, model_name_or_path=folder / "sft")
    ppo = {
        "actor_model_name_or_path": folder / "sft",
        "critic_model_name_or_path": folder / "reward",
        "reward_model_name_or_path": tiny.folder / "reward",
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "max_steps": STEPS,
        "num_eval_prompts": EVALUATED,
        "save_steps": 2,
        "print_answers_interval": 2,
        "profile_steps": [3, 4],
        "enable_ema": True,
        "kl_coef": 0.25,
        "ppo_epochs": 2,
        "num_warmup_steps": 0,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
    }
    started("ppo", 3, **ppo)
    # As if the run had been killed within step 4: what is beyond the last checkpoint is dropped and done again.
    shutil.copytree(folder / "ppo", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / f"step_{STEPS:06d}")
    for name in ("actor", "actor_ema", "critic", "curves.png"):
        path = folder / "resumed" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    started("resumed", 3, **ppo, resume=folder / "resumed")
    return Chain(folder, results)


def sample_rows(chain: Chain, name: str) -> list[dict]:
    return [json.loads(line) for line in chain[f"ppo/samples/{name}.jsonl"].read_text().splitlines()]


def assert_finite(lines: list[dict]) -> None:
    for line in lines:
        bad = [name for name, value in line.items() if value is None or not math.isfinite(value)]
        assert not bad, f"step {line['step']}: {bad}"
