"""A run that goes on with another reward: no score of before stands beside one of now; what is of texts goes on."""

import json

import pytest

from tests.training.reporting.test_verdict import GOOD, rows
from training.reporting.guards import Kind, of_ppo
from training.reporting.health import health
from training.reporting.standard_errors import Estimate, paired, with_errors, without_scores
from training.reporting.summary import RunSummary, summary_text
from training.runtime.session import held_out_scores

BEFORE = {"score": [1.0, 3.0], "length": [1.0, 2.0], "bonus": [0.0, 1.0], "kl": [0.0, 2.0], "new_words": [0.0, 0.0]}


def test_parts_of_other_names_are_another_rewards():
    assert paired(BEFORE, ["bonus", "length"]) == BEFORE
    assert paired(BEFORE, ["length", "malus"]) == paired(BEFORE, []) == {"kl": [0.0, 2.0], "new_words": [0.0, 0.0]}
    assert paired(paired(BEFORE, []), ["malus", "length"]) == without_scores(BEFORE)  # as a later restart point has it
    assert paired(None, ["length"]) is None and without_scores(None) is None


def test_what_was_not_measured_before_has_no_change():
    now = {name: Estimate.of(values) for name, values in {"score": [5.0, 7.0], "kl": [1.0, 3.0]}.items()}
    metrics = with_errors(now, {"kl": Estimate.of([0.0, 2.0])})
    assert metrics == {"score": 6.0, "score_se": 1.0, "kl": 2.0, "kl_se": 1.0, "kl_change": 1.0, "kl_change_se": 0.0}


def changed_run() -> list[dict]:
    """The reward was changed behind step 10: a score of 60 before it, of 0.6 and 0.5 after."""
    found = rows(**GOOD | {"score": (70.0, 60.0)}, score_change=(0.0, -10.0), kl_change=(0.0, 20.0))
    for step, score in ((20, 0.6), (30, 0.5)):
        later = {name: value for name, value in found[1].items() if name != "eval/score_change"}
        found.append(later | {"step": step, "samples": step, "eval/score": score})
    return found


def test_no_verdict_and_no_change_is_of_two_rewards(tmp_path):
    found = changed_run()
    assert of_ppo(found[:2], prompts=100).kind == Kind.WORSE  # 10 less, by one reward
    assert of_ppo(found, prompts=100).kind == Kind.FINE
    summary = RunSummary.from_metrics(found)
    assert "eval/score" not in summary.before and summary.before["eval/kl"] == 0.0
    lines = summary_text(summary).splitlines()
    assert next(line for line in lines if line.startswith("  score ")).split() == ["score", "0.500"]
    assert "  the score is another reward's than before the run went on: it has no before and no change" in lines
    assert "KL to the reference          0.000      20.000     +20.000" in summary_text(summary)
    assert "another reward" not in summary_text(RunSummary.from_metrics(found[:2]))


@pytest.mark.parametrize("drop", [0.0, 70.0])
def test_a_curve_of_scores_does_not_fall_where_the_reward_changed(drop):
    scores = [70.0 - drop * (step > 10) + step / 10 for step in range(1, 31)]
    steady = {"objective/kl": 1.0, "rollout/response_length": 10.0}
    found = [{"step": i, "samples": i, "objective/scores": score, **steady} for i, score in enumerate(scores, 1)]
    told = of_ppo(found, prompts=0).seen + tuple(finding.text for finding in health(found))
    assert any("the score fell from 70" in text for text in told) == (drop > 0)
    found[10]["objective/reward_changed"] = 1.0
    assert of_ppo(found, prompts=0).kind == Kind.FINE
    assert not any("score fell" in finding.text for finding in health(found))


def test_scores_of_before_count_for_no_best_point_and_no_rise(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed_run()))
    assert held_out_scores(tmp_path) == {20: 0.6, 30: 0.5}
