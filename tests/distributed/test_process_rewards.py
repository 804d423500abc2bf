"""Process reward models on one and two ranks: their numbers are the softmax of transformers' own token classifier."""

import pytest
import torch
from transformers import AutoModelForTokenClassification

from engine import distributed
from engine.models.attention import Attention
from engine.models.loading import load_scorer
from engine.reward.base import RewardModel
from engine.reward.steps import ProcessRewardModel, StepEnds
from engine.rlhf_engine import frozen_model
from engine.zero.config import EngineConfig
from scripts.harness.models import PAD, make_process_scorer, make_tokenizer
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import engine_spec
from tests.engine.fake_models import rollout_of

END = "w09"
PROMPTS = [[5, 9, 6], [7], [8, 10], [11]]
RESPONSES = [[20, 9, 21, 9, 2], [9, 22, 23, 9, 24], [25, 2], [26, 9, 9, 27, 28, 9]]
ENDS = [[1, 3], [3], [], [1, 5]]  # by hand: a step that is blank is none


def run(folder: str, prm: str, stage: int, packing: str) -> list[list[float]]:
    """The numbers of this rank's share of the responses."""
    spec = engine_spec(folder, stage, attention=Attention(packing=packing))
    model = frozen_model(load_scorer, prm, EngineConfig("reward", stage), spec)
    source = ProcessRewardModel(RewardModel(model).model, StepEnds(make_tokenizer(), END, at_end=False))
    share = distributed.rank_share(len(PROMPTS))
    rollout = rollout_of(PROMPTS[share], RESPONSES[share], PAD, width=7)
    return source.in_pieces(lambda piece: {"scores": source.score(piece)}, rollout, [torch.arange(len(rollout))])[
        "scores"
    ].tolist()


@torch.no_grad()
def by_transformers(prm: str) -> torch.Tensor:
    """(4, 7): the probability of label 1 at the ends of steps, row by row."""
    model = AutoModelForTokenClassification.from_pretrained(prm)
    found = torch.zeros(len(PROMPTS), 7)
    for row, (prompt, response, ends) in enumerate(zip(PROMPTS, RESPONSES, ENDS)):
        shares = model(torch.tensor([prompt + response])).logits[0].softmax(-1)[len(prompt) :, 1]
        found[row, ends] = shares[ends]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world, stage", [(1, 0), (2, 0), (2, 3)])
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_numbers_by_transformers(folder, tmp_path, world, stage, packing):
    prm = make_process_scorer(tmp_path / "prm")
    ranks = run_ranks(
        "tests.distributed.test_process_rewards:run", world=world, folder=folder, prm=prm, stage=stage, packing=packing
    )
    found = torch.tensor([row for rank in ranks for row in rank])
    torch.testing.assert_close(found, by_transformers(prm), atol=2e-6, rtol=0)
