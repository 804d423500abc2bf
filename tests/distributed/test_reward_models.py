"""Several reward models in one score, on one and two ranks: their scores are those of transformers alone, made
comparable and weighted by hand."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from engine import distributed
from engine.algorithms import Algorithm
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.rlhf_engine import RLHFEngine
from scripts.harness.models import PAD, make_scorer
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import DIALECT
from tests.engine.fake_models import rollout_of
from training.config.parsing import parse_flags
from training.config.reward import build_reward
from training.config.step3 import RLHFFlags

WEIGHTS = {"helpful": 0.5, "safe": -0.25, "by_step_2": 2.0}
OFFSETS = {"helpful": 0.0, "safe": 0.0, "by_step_2": 0.75}  # step 2 writes the offset that normalises scores
TEXTS = [([5, 6], [20, 2]), ([7], [21, 22, 23]), ([8, 9, 10], [24]), ([11], [25, 26, 27, 2])]
TEXTS += [([12, 13], [28, 29]), ([14], [30, 2]), ([15, 16, 17], [31, 32, 33]), ([18], [34])]
FIRST, SECOND = TEXTS[:5], TEXTS[2:]


def run(folder: str, models: list[str], stage: int) -> dict:
    """The scores of two batches, each rank its share; and of the second by a source that goes on from a checkpoint."""
    words = f"--actor_model_name_or_path {folder}/actor --output_dir {folder}/out --data_path d --dtype fp32".split()
    words += ["--reward_model_name_or_path", *models, "--reward_model_weight", *map(str, WEIGHTS.values())]
    words += ["--actor_zero_stage", str(stage), "--critic_zero_stage", str(stage)]
    args = parse_flags(RLHFFlags, [*words, *["--offload_reward_model"] * (stage == 0)], "a program")
    engine = RLHFEngine.from_pretrained(args.spec)
    found = {"roles": [model.role for model in engine.engines], "critic": args.spec.critic_path}
    source = build_reward(args, {}, engine.rewards, engine.tokenizer, [])

    def scores(texts: list) -> dict[str, list[float]]:
        ranks = distributed.world_size()
        filled = -(-len(texts) // ranks) * ranks  # an evaluation uses the first prompts twice then
        indices = [number % len(texts) for number in range(filled)[distributed.rank_share(filled)]]
        rows: Rollout = rollout_of(*zip(*(texts[index] for index in indices), strict=True), PAD)
        own = replace(rows, indices=torch.tensor(indices))
        maker = ExperienceMaker(
            actor=engine.actor,
            critic=engine.critic,
            reference=engine.reference,
            reward=source,
            algorithm=Algorithm(DIALECT, pad_token_id=PAD, end_token_id=2),
            micro_batch_size=2,
        )
        made = maker.score(own)
        return {"score": made.scores.tolist()} | {name: one.tolist() for name, one in made.rewards.items()}

    found |= {"first": scores(FIRST), "second": scores(SECOND)}
    kept = json.loads(json.dumps(source.state_dict()))
    source = build_reward(args, {}, engine.rewards, engine.tokenizer, [])
    source.load_state_dict(kept)
    return found | {"resumed": scores(SECOND)}


@torch.no_grad()
def by_transformers(path: str, texts: list, offset: float) -> list[float]:
    """The score at the last token of each text, by transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(path)
    rows = [torch.tensor([prompt + response]) for prompt, response in texts]
    return [model.score(model.base_model(row)[0])[0, -1, 0].item() + offset for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("world, stage", [(1, 0), (2, 0), (2, 3)])
def test_scores_by_hand(folder, tmp_path, world, stage):
    models = [str(tmp_path / name) for name in WEIGHTS]
    for seed, (path, offset) in enumerate(zip(models, OFFSETS.values(), strict=True)):
        make_scorer(path, "llama", seed=seed + 5, offset=offset)
    ranks = run_ranks(
        "tests.distributed.test_reward_models:run", world=world, folder=folder, models=models, stage=stage
    )
    expected = {}
    for name, path in zip(WEIGHTS, models, strict=True):
        first, second = (by_transformers(path, texts, OFFSETS[name]) for texts in (FIRST, SECOND))
        mean, deviation = (statistics.mean(first), statistics.stdev(first)) if not OFFSETS[name] else (0.0, 1.0)
        expected[name] = [[(score - mean) / deviation for score in batch] for batch in (first, second)]
    for batch, when in enumerate(("first", "second")):
        for name in WEIGHTS:
            found = [score for rank in ranks for score in rank[when][name]][: len(expected[name][batch])]
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected[name][batch]), atol=2e-5, rtol=1e-5)
        by_hand = [
            sum(weight * score for weight, score in zip(WEIGHTS.values(), row))
            for row in zip(*(expected[name][batch] for name in WEIGHTS))
        ]
        found = [score for rank in ranks for score in rank[when]["score"]][: len(by_hand)]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(by_hand), atol=5e-5, rtol=1e-5)
    for rank in ranks:
        assert rank["resumed"] == rank["second"]
        assert rank["roles"] == ["actor", "critic", "reference", "reward", "reward_2", "reward_3"]
        assert rank["critic"] == models[0]
