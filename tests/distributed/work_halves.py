"""Run by ranks: steps of step 3's flags in one dtype after the other, from the same responses."""

import torch

from engine.experience import PromptBatch, Rollout
from engine.rlhf_engine import RLHFEngine
from engine.rollout import RolloutBackend, SamplingConfig, build_rollouts
from engine.zero.roles import TrainedRole
from tests.distributed.tiny_run import SAMPLING, TinyPrompts, timeless
from tests.engine.zero.inspecting import pretend_cpus_have_fp16
from training.flags.parsing import parse_flags
from training.flags.rlhf_arguments import RLHFFlags
from training.ppo_trainer import PPOConfig, PPOTrainer

STEPS = 2
GIVEN = ("sequences", "attention_mask", "response_mask", "ended", "indices", "samples")


class RecordedRollouts(RolloutBackend):
    """Draws responses, and keeps them in `drawn`."""

    def __init__(self, rollouts):
        self.rollouts, self.drawn = rollouts, []

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """What the backend draws."""
        self.drawn.append(self.rollouts.generate(prompts, sampling))
        return self.drawn[-1]

    def release_memory(self) -> None:
        """As the backend does."""
        self.rollouts.release_memory()


class GivenRollouts(RolloutBackend):
    """Gives rows that were drawn in another dtype; log-probs come of the actor's own forward pass."""

    def __init__(self, drawn: list[Rollout]):
        self.drawn = list(drawn)

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """The next step's rows."""
        rollout = self.drawn.pop(0)
        return Rollout(**{name: getattr(rollout, name) for name in GIVEN})

    def release_memory(self) -> None:
        """There is none."""


def all_runs(runs: dict[str, list[str]], variants: dict[str, tuple[str, str]]) -> dict[str, dict[str, list[dict]]]:
    """By the runs' names and the variants', the metrics of each step; responses are those that the first one drew.

    variants: a dtype, and the DeepSpeed JSON that takes the place of "stage3.json" among the flags.
    """
    pretend_cpus_have_fp16()
    found: dict[str, dict[str, list[dict]]] = {}
    for name, words in runs.items():
        drawn: list[Rollout] = []
        found[name] = {}
        for variant, (dtype, config) in variants.items():
            chosen = [word.replace("stage3.json", config) for word in words]
            found[name][variant] = metrics_of(chosen, dtype, drawn)
    return found


def metrics_of(words: list[str], dtype: str, drawn: list[Rollout]) -> list[dict[str, float]]:
    """The metrics of each step that step 3's flags ask for; what is drawn is added to `drawn`, if that is empty."""
    args = parse_flags(RLHFFlags, [*words, "--dtype", dtype], "")
    dialect, _ = args.resolved_dialect()
    models = RLHFEngine.from_pretrained(args.engine_spec(dialect))
    stops, pad = SAMPLING.stop_token_ids, models.tokenizer.pad_token_id
    own = RecordedRollouts(build_rollouts("replica", models.actor, models.tokenizer, others=models.engines))
    given = bool(drawn)
    trainer = PPOTrainer(
        models=models,
        rollouts=GivenRollouts(drawn) if given else own,
        dialect=dialect.override(old_logprobs="forward"),
        config=PPOConfig(total_steps=STEPS, micro_batch_size=args.per_device_training_batch_size),
        sampling=SamplingConfig.of(dialect, stops, args.dtype, max_new_tokens=8, seed=3, pad_token_id=pad),
    )
    feed = TinyPrompts(8)
    found = [timeless(trainer.step(feed.prompts(step)).metrics) for step in range(STEPS)]
    for model in models.trained.values():
        expected = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        learned = model.host.module if isinstance(model, TrainedRole) else model.module
        assert {weight.dtype for weight in learned.parameters()} == {expected}, dtype
        assert model.master_shards()[0].dtype == torch.float32
    drawn += [] if given else own.drawn
    return found
