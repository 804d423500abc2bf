"""Dialects with adapters alone on two ranks at stage 3: one trunk learns what a trunk for each trained model does."""

import json
import math
from pathlib import Path

import pytest

from engine.algorithms import DIALECTS
from engine.rlhf_engine import RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import CONFIG_DIR
from scripts.harness.models import make_adapter, make_causal_lm
from scripts.harness.ranks import run_ranks
from tests.distributed.conftest import ALWAYS_PARTITIONED
from tests.distributed.tiny_run import SAMPLING, TinyPrompts, timeless
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.ppo_trainer import PPOConfig, PPOTrainer

STEPS = 2


def all_runs(runs: dict[str, list[str]]) -> dict[str, list[dict[str, float]]]:
    """`metrics_of` each of these flags, by the same names."""
    return {name: metrics_of(words) for name, words in runs.items()}


def metrics_of(words: list[str]) -> list[dict[str, float]]:
    """The metrics of each step that step 3's flags ask for, with the engines that they ask for."""
    args = parse_flags(RLHFFlags, words, "")
    dialect, _ = args.resolved_dialect()
    models = RLHFEngine.from_pretrained(args.engine_spec(dialect))
    stops, pad = SAMPLING.stop_token_ids, models.tokenizer.pad_token_id
    trainer = PPOTrainer(
        models=models,
        rollouts=build_rollouts("replica", models.actor, models.tokenizer, others=models.engines),
        dialect=dialect,
        config=PPOConfig(total_steps=STEPS, micro_batch_size=args.per_device_training_batch_size),
        sampling=SamplingConfig.of(dialect, stops, args.dtype, max_new_tokens=8, seed=3, pad_token_id=pad),
    )
    feed = TinyPrompts(8)
    return [timeless(trainer.step(feed.prompts(step)).metrics) for step in range(STEPS)]


TESTED = ("openai", "trl_rloo")  # a critic with a new head, and Adam's other form; no critic
WAYS = ("two trunks", "one trunk")
MOST_OFF = 1e-3
SETTINGS = {"openai": ["truncate_token=eos"]}  # "." is no word here


def make_models(folder: Path) -> None:
    """`actor`, `judge_adapter`, a reward model on it, and stage3.json for tiny parameters."""
    make_causal_lm(folder / "actor", "llama", seed=0)
    make_adapter(folder / "judge", str(folder / "actor"), dim=2, scorer=True)
    shipped = json.loads((CONFIG_DIR / "zero3.json").read_text())
    tiny = shipped | {"zero_optimization": shipped["zero_optimization"] | ALWAYS_PARTITIONED}
    (folder / "stage3.json").write_text(json.dumps(tiny))


def runs_of(dialects, folder: str) -> dict[str, list[str]]:
    """Flags of step 3 for each dialect and way."""
    return {f"{dialect}, {way}": words_of(dialect, way, folder) for dialect in dialects for way in WAYS}


def words_of(dialect: str, way: str, folder: str) -> list[str]:
    """Step 3's flags: with a reward model that is an adapter on the actor's base, and rates that move something."""
    has_critic = DIALECTS[dialect].has_critic
    judge = "critic" if DIALECTS[dialect].critic_start == "reward_model" else "reward"
    words = f"""--data_path none --output_dir none --dtype fp32 --dialect {dialect} --only_optimize_lora
        --actor_model_name_or_path {folder}/actor --{judge}_model_name_or_path {folder}/judge_adapter
        --actor_lora_dim 4 --actor_lora_learning_rate 1e-2 --actor_zero_stage 3
        --actor_ds_config {folder}/stage3.json --per_device_training_batch_size 2""".split()
    if has_critic:
        words += ["--critic_lora_dim", "2", "--critic_lora_learning_rate", "1e-2"]
    if way == "one trunk":
        words.append("--share_trunk")
    elif has_critic:
        words += ["--critic_zero_stage", "3", "--critic_ds_config", f"{folder}/stage3.json"]
    return [*words, "--set", "ppo_epochs=1", "warmup_steps=0", *SETTINGS.get(dialect, [])]


def difference(two: list[dict[str, float]], one: list[dict[str, float]]) -> float:
    """How much a metric of any step differs at most, relative to the larger of it and 0.1; infinite for other ones."""
    if [step.keys() for step in two] != [step.keys() for step in one]:
        return math.inf
    pairs = [(old[name], new[name]) for old, new in zip(two, one, strict=True) for name in old]
    return max(abs(new - old) / max(abs(old), 0.1) if math.isfinite(new - old) else math.inf for old, new in pairs)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return run_ranks("tests.distributed.test_lora_systems:all_runs", runs=runs_of(TESTED, str(folder)))


@pytest.mark.parametrize("dialect", TESTED)
def test_one_trunk_learns_what_two_do(ranks, dialect):
    for rank in ranks:
        two, one = (rank[f"{dialect}, {way}"] for way in WAYS)
        assert difference(two, one) < MOST_OFF
        first, last = (step["objective/kl"] for step in one)
        assert abs(first) < 1e-5 < 1e-3 < abs(last)
