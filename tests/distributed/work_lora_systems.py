"""Run by ranks: two steps of dialects with adapters alone, on two trunks and on one."""

from engine.rlhf_engine import RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
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
    dialect = args.resolved.dialect
    models = RLHFEngine.from_pretrained(args.spec)
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
