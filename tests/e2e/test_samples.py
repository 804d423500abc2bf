"""What step 3 leaves beside its curves: samples before and after, scores, the averaged actor."""

import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.experience import position_ids
from engine.models.loading import load_scorer
from scripts.harness.programs import metric_lines
from tests.e2e.chain import EVALUATED, sample_rows


def test_samples_before_and_after(chain):
    first, *_, last = metric_lines(chain["ppo"])
    for name, line, prefix in (("before", first, "eval/"), ("after", last, "eval/"), ("after_ema", last, "eval/ema_")):
        rows = sample_rows(chain, name)
        assert len(rows) == EVALUATED and all(row["prompt"].startswith("w") for row in rows)
        assert any(row["response"].strip().startswith("w") for row in rows)
        for key, metric in (("score", "score"), ("kl", "kl"), ("tokens", "response_length")):
            assert sum(row[key] for row in rows) / EVALUATED == pytest.approx(line[prefix + metric], abs=1e-5)
    before, after = (sample_rows(chain, name) for name in ("before", "after"))
    for name, prefix in (("after", "eval/"), ("after_ema", "eval/ema_")):
        changes = [now["kl"] - then["kl"] for now, then in zip(sample_rows(chain, name), before, strict=True)]
        assert last[f"{prefix}kl_change"] == pytest.approx(statistics.fmean(changes), abs=1e-5)
        assert last[f"{prefix}kl_change_se"] == pytest.approx(statistics.stdev(changes) / EVALUATED**0.5, abs=1e-5)
    assert [row["prompt"] for row in before] == [row["prompt"] for row in after]
    assert all(abs(row["kl"]) < 1e-4 for row in before), "the actor starts as the reference"
    assert any(abs(row["kl"]) > 1e-2 for row in after), "the actor has not moved"


def test_scores_come_from_the_reward_model_that_was_named(chain, tiny):
    rows = [row for row in sample_rows(chain, "before") if len(row["response"].split()) == row["tokens"]]  # without EOS
    tokenizer = AutoTokenizer.from_pretrained(chain["sft"])
    ids = [torch.tensor([tokenizer(f"{row['prompt']} {row['response']}")["input_ids"]]) for row in rows]

    def scores(path: Path) -> list[float]:
        scorer = load_scorer(str(path), torch.float32)
        ones = [torch.ones_like(row) for row in ids]
        with torch.no_grad():
            return [
                scorer.sequence_scores(scorer(row, one, position_ids(one)), row, one).item()
                for row, one in zip(ids, ones)
            ]

    found = [row["score"] for row in rows]
    assert len(found) >= 3
    assert found == pytest.approx(scores(tiny.folder / "reward"), abs=1e-4)
    assert max(abs(a - b) for a, b in zip(found, scores(chain["reward"]))) > 0.1, "the critic's path would pass, too"


def test_the_average_lags_behind_the_actor(chain):
    sft, actor, averaged = (
        AutoModelForCausalLM.from_pretrained(chain[name]).state_dict() for name in ("sft", "ppo/actor", "ppo/actor_ema")
    )

    def distance(a: dict, b: dict) -> float:
        return sum((a[name] - b[name]).square().sum().item() for name in a) ** 0.5

    assert 0 < distance(averaged, sft) < 0.2 * distance(actor, sft)  # 8 optimizer steps at a decay of 0.992
