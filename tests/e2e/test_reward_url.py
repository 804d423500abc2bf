"""Step 3 with a reward server: one that dies and comes back changes nothing; one that stays away stops the run."""

import statistics

import pytest

from scripts.harness import free_port
from scripts.harness.programs import Tiny, assert_one_message, differences, forked, metric_lines, run_here
from tests.reward_server import process_serving, score, serving

STEPS, PER_STEP, HELD_OUT = 3, 8, 8


def flags(tiny: Tiny, url: str, **changes) -> dict:
    """Of a run whose score is the reward model's and half the server's."""
    served = {
        "reward_url": url,
        "reward_weights": 0.5,
        "reward_model_name_or_path": tiny.folder / "reward",
        "max_steps": STEPS,
        "num_eval_prompts": HELD_OUT,
        "per_device_training_batch_size": 2,
        "dtype": "fp32",
    }
    return tiny.flags(3, **{**served, **changes})


def test_a_server_that_is_killed_and_started_again_changes_nothing(tiny, tmp_path):
    with serving() as server:
        ended = forked(3, flags(tiny, server.url, output_dir=tmp_path / "well"))
        assert ended.code == 0, ended.stderr
        assert f"scores from {server.url} (form items)" in ended.stdout
        probe, *scored = [item["response"] for asked in server.asked for item in asked["items"]]
        sizes = [len(asked["items"]) for asked in server.asked]
    assert sizes == [1] + [4] * (len(sizes) - 1), "not once a step of each rank, whatever the micro-batches"
    assert probe == "probe" and len(scored) == 2 * HELD_OUT + STEPS * PER_STEP
    for number, line in enumerate(metric_lines(tmp_path / "well")[1:]):
        step = scored[HELD_OUT + number * PER_STEP :][:PER_STEP]
        assert line["reward/server"] == pytest.approx(statistics.fmean(map(score, step)), rel=1e-5)
        assert line["objective/scores_server"] == pytest.approx(0.5 * line["reward/server"])
    with process_serving({5: "die"}, comes_back=True) as server:
        ended = forked(3, flags(tiny, server.url, output_dir=tmp_path / "killed"))
        assert ended.code == 0, ended.stderr
        assert server.deaths == [9]
    assert "answers again" in ended.stdout
    assert differences(tmp_path / "well", tmp_path / "killed") == []


def test_a_server_that_stays_away_stops_the_run_with_a_restart_point(tiny, tmp_path, capfd):
    given = {"reward_url_patience": 1, "output_dir": tmp_path / "out", "save_steps": 100}
    with process_serving({4: "die"}, comes_back=False) as server:  # after the probe, an evaluation and a step
        result = run_here(3, flags(tiny, server.url, **given), capfd)
    assert result.code == 1 and "Traceback" not in result.stdout + result.stderr
    assert f"stopped: the reward server {server.url} cannot be reached, or broke the connection (" in result.stderr
    assert "sent " in result.stderr and '"prompt": "w' in result.stderr
    point = tmp_path / "out" / "checkpoints" / "step_000001"
    assert f"--resume {point}" in result.stderr and point.is_dir()
    with serving() as server:  # at another address
        whole = flags(tiny, server.url, **given) | {"output_dir": tmp_path / "whole"}
        assert run_here(3, whole, capfd).code == 0
        resumed = run_here(3, flags(tiny, server.url, **given, resume=point), capfd)
    assert resumed.code == 0 and "changed since the checkpoint: --reward_url [" in resumed.stdout
    assert differences(tmp_path / "whole", tmp_path / "out") == []


def test_a_server_that_is_not_there_is_told_before_models_are_loaded(tiny, tmp_path, capfd):
    url = f"http://127.0.0.1:{free_port()}/score"
    given = {"reward_url_patience": 0, "output_dir": tmp_path / "out"}
    result = run_here(3, flags(tiny, url, **given), capfd)
    assert_one_message(result, [f"--reward_url {url}: asked for the score of one text", "Start or repair the server"])
    assert not (tmp_path / "out").exists()
    with serving() as server:
        dry = run_here(3, flags(tiny, server.url, **given, dry_run=True), capfd)
    assert dry.code == 0 and f"{server.url} gives one text the score -1\n" in dry.stdout
    lacking = flags(tiny, url, **given, reward_url_columns="answer")
    assert_one_message(run_here(3, lacking, capfd), ["--reward_url_columns answer: the prompts lack answer: they have"])
