"""Run by ranks: a family's actor and critic for two steps in a dtype, by a way of drawing responses; resumed, saved."""

import gc
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine import distributed
from engine.experience import position_ids
from engine.models.loading import DTYPES
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import DIALECT, SAMPLING, TinyPrompts, engine_spec, timeless
from tests.engine.zero.inspecting import masters, pretend_cpus_have_fp16, weights
from tests.tiny_models import VOCABULARY
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.program import model_folders

STEPS = 2
ROWS = 4


def trial(folder: str, output: str, dtype: str, ways: list[str]) -> dict[str, dict]:
    """`one_way` of each of these rollout backends."""
    pretend_cpus_have_fp16()
    gc.freeze()
    return {way: one_way(folder, Path(output) / way, dtype, way) for way in ways}


def one_way(folder: str, output: Path, dtype: str, way: str) -> dict:
    """What two steps at stage 3 came to; whether the second is the same when it is gone on with from a restart point
    behind the first; how far the saved models are, in plain transformers, from what was trained."""
    trainer = new_trainer(folder, dtype, way)
    feed, metrics = TinyPrompts(8), []
    for step in range(STEPS):
        metrics.append(timeless(trainer.step(feed.prompts(step)).metrics))
        if step == 0:
            save_point(output, trainer.models, trainer.state_dict())
    end = state(trainer)
    for role, model in trainer.models.trained.items():
        model_folders.save_forms(model, trainer.models.tokenizer, output / "saved", role)
    again = new_trainer(folder, dtype, way)
    again.load_state_dict(load_point(output, again.models))
    last = timeless(again.step(feed.prompts(1)).metrics)
    return {
        "metrics": metrics,
        "finite": all(math.isfinite(number) for step in metrics for number in step.values()),
        "skipped": sum(step.get("policy/skipped", 0.0) for step in metrics),
        "moved": moved(folder, end),
        "resumed": last == metrics[-1] and same(state(again), end),
        "saved": saved_gaps(trainer, output / "saved", dtype),
    }


def new_trainer(folder: str, dtype: str, way: str) -> PPOTrainer:
    """All four engines at stage 3, every parameter partitioned, with `way` for --rollout_backend."""
    models = RLHFEngine.from_pretrained(engine_spec(folder, 3, config="stage3.json", dtype=dtype))
    return PPOTrainer(
        models=models,
        rollouts=build_rollouts(way, models.actor, models.tokenizer, others=models.engines, row_length=32),
        dialect=DIALECT,
        config=PPOConfig(total_steps=STEPS, micro_batch_size=2),
        sampling=SAMPLING,
    )


def state(trainer: PPOTrainer) -> dict[str, dict[str, torch.Tensor]]:
    """Full float32 weights and those of the dtype, by role."""
    found = {}
    for role, model in trainer.models.trained.items():
        found |= {f"{role} masters": masters(model), f"{role} weights": weights(model)}
    return found


def same(one: dict, other: dict) -> bool:
    """Whether two states are equal, bit by bit."""
    return all(torch.equal(tensor, other[part][name]) for part in one for name, tensor in one[part].items())


def moved(folder: str, end: dict) -> bool:
    """Whether actor and critic have learned something: masters are no longer what the folders have."""
    start = AutoModelForCausalLM.from_pretrained(Path(folder) / "actor", dtype=torch.float32).state_dict()
    return any(
        name in start and not torch.equal(tensor, start[name].to(tensor.dtype))
        for name, tensor in end["actor masters"].items()
    )


@torch.no_grad()
def saved_gaps(trainer: PPOTrainer, saved: Path, dtype: str) -> dict[str, float]:
    """By how much saved models differ, in plain transformers and the run's dtype, from those that were trained: the
    weights (0 where they are equal), log-probs and values of rows with padding."""
    generator = torch.Generator().manual_seed(5)
    sequences = torch.randint(4, VOCABULARY, (ROWS, 16), generator=generator)
    mask = (torch.arange(16) >= torch.arange(ROWS).unsqueeze(1)).long()  # row i begins behind i slots of padding
    inputs = sequences, mask, position_ids(mask)
    models = trainer.models
    logprobs, _ = models.actor(*inputs, response_length=8)
    values = models.critic(*inputs)[:, -9:]
    actor = plain(AutoModelForCausalLM, saved / "actor", dtype)
    critic = plain(AutoModelForSequenceClassification, saved / "critic", dtype)
    found = {
        "weights": max(weight_gap(model, other) for model, other in ((models.actor, actor), (models.critic, critic)))
    }
    rows = [(row[kept.bool()].unsqueeze(0), number) for number, (row, kept) in enumerate(zip(sequences, mask))]
    for row, number in rows:
        logits = actor(row).logits[0, -9:-1].double()
        expected = logits.log_softmax(-1).gather(-1, row[0, -8:, None])[:, 0]
        hidden = critic.base_model(row)[0][0, -9:].double()
        scores = hidden @ critic.score.weight[0].double() + critic.config.score_offset
        gaps = {"logprobs": logprobs[number] - expected, "values": values[number] - scores}
        found |= {name: max(found.get(name, 0.0), float(gap.abs().max())) for name, gap in gaps.items()}
    return found


def plain(kind, folder: Path, dtype: str):
    """What plain transformers makes of a saved folder; without DeepSpeed's partitions, which it would else take part
    in while a stage-3 engine is there."""
    return kind.from_pretrained(folder, dtype=DTYPES[dtype]).eval()


def weight_gap(model, other) -> float:
    """The largest difference of any weight from the trained one (all ranks call this); infinite for other names."""
    trained, loaded = weights(model), dict(other.named_parameters())
    if trained.keys() != loaded.keys() or distributed.world_size() < 1:
        return math.inf
    return max(float((trained[name].double() - loaded[name].double()).abs().max()) for name in trained)
