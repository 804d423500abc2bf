"""Reward models that read texts, under ZeRO-3 on two ranks: one of them has longer texts, and then a template that
fails.
"""

from unittest import mock

import pytest

from engine import distributed
from engine.distributed import RankGroup
from engine.engine_spec import EngineSpec
from engine.errors import RunStopped
from engine.models.attention import USUAL, Attention
from engine.models.loading import load_scorer
from engine.reward.base import RewardModel
from engine.rlhf_engine import frozen_model
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.ranks import run_ranks
from tests.engine.fake_models import rollout_of
from tests.training.foreign_models import FILM, foreign_model, foreign_tokenizer, scores_alone
from training.data.record_forms import PROMPTS
from training.reward_texts import Texts, reward_source

RESPONSES = ["yes", "it was great", "superb", "no drama"], ["a critic chose " * 6, "no " * 20, "drama " * 30, "was"]
FILMS = ["they chose a drama", "a review"] * 2


def run(folder: str, stage: int, ranks: int) -> dict:
    """The ids and scores of this rank's responses, and the message where its template fails on the last rank."""
    init()
    rank, policy = distributed.rank(), foreign_tokenizer(words=4)
    rows = [PROMPTS.row("", {"prompt": [{"role": "user", "content": film}]}, foreign_tokenizer(FILM)) for film in FILMS]
    texts = Texts(
        tokenizer=policy,
        stops=frozenset([0]),
        rows=rows,
        dialogues=[row.dialogue for row in rows],
        messages=True,
        longest=40,
        rows_at_once=1,
    )
    attention = Attention(packing="packed", ranks=ranks) if ranks > 1 else USUAL
    spec = EngineSpec(actor_path=folder, critic_path=folder, attention=attention)
    model = RewardModel(frozen_model(load_scorer, folder, EngineConfig("reward", stage), spec))
    model.model.module.split(RankGroup(ranks))
    source = reward_source(model, folder, texts, None)
    encoded = [policy(text)["input_ids"] for text in RESPONSES[rank]]
    rollout = rollout_of([[9]] * len(rows), encoded, 3)
    source.prepare(rollout)
    with source.on_device(), source.inferring():
        scores = source.score(rollout)
    found = {"ids": list(source._ids.values()), "scores": scores.tolist()}
    if rank == distributed.world_size() - 1:
        source.read = mock.Mock(side_effect=RuntimeError("no such film"))
    with pytest.raises(RunStopped) as stopped:
        source.prepare(rollout)
    return found | {"message": str(stopped.value)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_are_transformers_own_and_a_failing_template_stops_all_ranks(tmp_path, ranks):
    """ranks: how many compute rows together; both have four texts, of other lengths."""
    folder, tokenizer = foreign_model(tmp_path / "reward", FILM, pad_is_eos=True), foreign_tokenizer(FILM)
    found = run_ranks("tests.distributed.test_text_rewards:run", folder=folder, stage=3, ranks=ranks)
    for rank, responses in zip(found, RESPONSES, strict=True):
        turns = [[("user", film), ("assistant", text)] for film, text in zip(FILMS, responses, strict=True)]
        messages = [[{"role": role, "content": text} for role, text in turn] for turn in turns]
        right = [tokenizer.apply_chat_template(each, return_dict=False) for each in messages]
        assert rank["ids"] == right
        assert rank["scores"] == pytest.approx(scores_alone(folder, right), abs=2e-6)
        assert "cannot read a response: no such film" in rank["message"]
    assert found[0]["message"] == found[1]["message"]
