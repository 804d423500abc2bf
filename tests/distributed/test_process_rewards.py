"""Process reward models on one and two ranks: their numbers are the softmax of transformers' own token classifier; a
run of step 2 that was stopped goes on to the same weights."""

from pathlib import Path

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
from scripts.harness.programs import Tiny, lasting_metrics
from scripts.harness.ranks import run_ranks
from tests.distributed.test_supervised import broken_at, flags_of
from tests.distributed.test_supervised import run as run_program
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


def all_runs(folder: str, tiny: Tiny) -> dict[str, list[bool]]:
    """By STAGE which of two courses of step 2 ended: one at a stretch, one broken off and resumed."""
    steps = [f" w{20 + number}" for number in range(4)]
    records = [
        {"prompt": "w05", "completions": steps[: 2 + row % 3], "labels": [True, 0.5, False, None][: 2 + row % 3]}
        for row in range(40)
    ]
    if distributed.is_main():
        tiny.write("steps", records)
    distributed.barrier()
    ended = {}
    for stage in (0, 3):
        flags = flags_of(tiny, 1, stage) | {"data_path": tiny.folder / "steps.jsonl", "step_end": " w09"}
        flags |= {"lora_dim": 4, "only_optimize_lora": True} if stage == 3 else {}
        whole, resumed = (Path(folder) / f"{stage}_{name}" for name in ("whole", "resumed"))
        ended[str(stage)] = [run_program(2, flags, whole)]
        with broken_at(6):
            run_program(2, flags, resumed)
        ended[str(stage)].append(run_program(2, flags, resumed))
    return ended


def test_step_2_is_resumed(tmp_path):
    tiny = Tiny(tmp_path)
    (found, _) = run_ranks("tests.distributed.test_process_rewards:all_runs", folder=str(tmp_path), tiny=tiny)
    assert found == {"0": [True, True], "3": [True, True]}
    for stage in (0, 3):
        whole, resumed = (tmp_path / f"{stage}_{name}" for name in ("whole", "resumed"))
        assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
        assert lasting_metrics(resumed) == lasting_metrics(whole)
        model, how = AutoModelForTokenClassification.from_pretrained(whole, output_loading_info=True)
        assert model.num_labels == 2 and not how["missing_keys"] and not how["unexpected_keys"]
