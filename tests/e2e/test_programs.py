"""Steps 1, 2 and 3 as users run them: two ranks, ZeRO-3, each starting from what the ones before it wrote."""

import math
import re
import struct

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from scripts.harness.programs import MACHINE, metric_lines
from tests.e2e.chain import AVERAGED, EVALUATION, EVERY_STEP, STEPS, assert_finite
from training.checkpoints.files import rank_file
from training.reporting.standard_errors import ENDINGS


@pytest.mark.parametrize("path", ("sft", "ppo/actor", "ppo/actor_ema", "resumed/actor", "resumed/actor_ema"))
def test_language_models_open(chain, path):
    model, info = AutoModelForCausalLM.from_pretrained(chain[path], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert AutoTokenizer.from_pretrained(chain[path]).decode([4, 5]) == "w04 w05"


@pytest.mark.parametrize("path", ("reward", "ppo/critic", "resumed/critic"))
def test_reward_models_open(chain, path):
    model, info = AutoModelForSequenceClassification.from_pretrained(chain[path], output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and math.isfinite(model.config.score_offset)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("path", ("sft", "reward", "ppo/actor", "ppo/actor_ema", "ppo/critic", "resumed/actor"))
def test_each_model_has_a_card(chain, path):
    text = (chain[path] / "README.md").read_text()
    assert f"| steps | {STEPS} |" in text and "| ranks | 2, " in text and str(chain.folder) not in text
    assert re.search(r"\| [a-z ,]+ \| \S+ ± \S+ \| \S+ ± \S+ \|", text), "nothing held out, before and after"


def test_steps_1_and_2_report(chain):
    for name, loss, held_out, last_words in (
        ("sft", "train/loss", "eval/perplexity", "held-out perplexity"),
        ("reward", "train/pair_loss", "eval/accuracy", "held-out pair accuracy"),
    ):
        lines = metric_lines(chain[name])
        assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
        assert {held_out, *(f"{held_out}{ending}" for ending in ENDINGS)} <= set(lines[0]) & set(lines[-1])
        assert lines[0][f"{held_out}_change"] == 0.0
        assert lines[-1][f"{held_out}_change"] == pytest.approx(lines[-1][held_out] - lines[0][held_out])
        assert all({loss, "train/lr", "train/grad_norm", "time/step", "speed/train"} <= set(line) for line in lines[1:])
        assert re.search(
            rf"{last_words} [\d.]+ ± [\d.]+[^\n]* \((changed by [-+]|unchanged\))", chain.results[name].stdout
        )
        assert_finite(lines)
    found = metric_lines(chain["reward"])[-1]
    by_chance = found["eval/accuracy"] <= 0.5 + 2 * found["eval/accuracy_se"]
    assert ("no better than chance (0.5): step 3 would follow" in chain.results["reward"].stdout) == by_chance
    assert "scoring 16 responses of up to 8 tokens, to normalise: --norm" in chain.results["reward"].stdout
    assert "\n  normalisation  " in chain.results["reward"].stdout
    assert "stored so that their mean becomes 0 and their standard deviation 1" in chain.results["reward"].stdout


@pytest.mark.parametrize("name", ("ppo", "resumed"))
def test_every_metric_is_logged_and_finite(chain, name):
    lines = metric_lines(chain[name])
    assert [(line["step"], line["samples"]) for line in lines] == [(step, 8 * step) for step in range(STEPS + 1)]
    assert {name for name in lines[0] if not name.startswith(MACHINE)} == {"step", "samples"} | EVALUATION
    for line in lines[1:]:
        assert EVERY_STEP <= set(line), f"step {line['step']} lacks {sorted(EVERY_STEP - set(line))}"
    assert EVALUATION | AVERAGED <= set(lines[-1])
    assert_finite(lines)


def test_restart_points_are_timed_and_whole(chain):
    timed = [line["step"] for line in metric_lines(chain["ppo"]) if "time/checkpoint" in line]
    assert timed == [3]  # in the line after the one that it followed; the last one has no such line
    points = sorted(chain["ppo/checkpoints"].iterdir())
    assert [point.name for point in points] == ["step_000002", "step_000004"]
    for point in points:
        names = {path.name for path in point.iterdir()}
        assert names == {"actor", "critic", "ema", "config", "trainer_state.json", "manifest.json"}
        assert [path.name for path in sorted((point / "ema").iterdir())] == [rank_file(0), rank_file(1)]
    sizes = [line["checkpoint/bytes"] for line in metric_lines(chain["ppo"]) if "checkpoint/bytes" in line]
    files = [path for path in points[0].rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert sizes[0] == sum(path.stat().st_size for path in files)


def test_a_resumed_run_ends_like_the_uninterrupted_one(chain):
    whole, resumed = (metric_lines(chain[name])[-1] for name in ("ppo", "resumed"))
    numbers = {name for name in whole if not name.startswith(MACHINE)}
    assert numbers == {name for name in resumed if not name.startswith(MACHINE)}
    for name in sorted(numbers):
        assert resumed[name] == pytest.approx(whole[name], abs=1e-5, rel=1e-5), name
    before = metric_lines(chain["ppo"])[2]
    assert any(abs(before[name] - whole[name]) > 1e-3 for name in EVERY_STEP & numbers), "nothing moved after step 2"


def test_tensorboard_holds_what_the_file_holds(chain):
    events = EventAccumulator(str(chain["ppo/tensorboard"]), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    for line in metric_lines(chain["ppo"]):
        for name, value in line.items():
            if name != "step":
                shown = {event.step: event.value for event in events.Scalars(name)}
                assert shown[line["step"]] == pytest.approx(value, rel=1e-5), (name, line["step"])
    tags = events.Tags()
    assert {"objective/scores_histogram", "rollout/length_histogram"} <= set(tags["histograms"])
    samples = {event.step: text_of(event) for event in events.Tensors("samples/text_summary")}
    assert set(samples) == {2, 4} and "score" in samples[4] and "| w" in samples[4]
    settings = text_of(events.Tensors("settings/text_summary")[0])
    assert '"kl_coef": 0.25' in settings and '"clip_range": 0.2' in settings  # one given, one of the dialect


def test_the_resumed_tensorboard_has_no_step_twice(chain):
    events = EventAccumulator(str(chain["resumed/tensorboard"]), size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("objective/scores")] == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ("ppo", "resumed"))
def test_curves_are_a_picture(chain, name):
    head = chain[f"{name}/curves.png"].read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    assert 1000 <= width <= 4000 and 500 <= height <= 3000


def test_what_is_printed(chain):
    out = chain.results["ppo"].stdout
    assert out.count("dialect default\n") == 1, "printed by both ranks, or by none"
    for name in (
        "kl_coef = 0.25 (given; the dialect's is ",
        "ppo_epochs = 2 (given; the dialect's is ",
        "actor_lr = 0.001 (given; the dialect's is ",
    ):
        assert name in out
    assert "gamma = " not in out and "temperature = " not in out
    assert "32 prompts (0 cut, 0 dropped), 8 held out; 4 steps of 8 responses on 2 ranks" in out
    assert "the run: 4 steps, 1 epoch; 2 evaluations; 1 checkpoint before the end, every 2 steps" in out
    assert "ZeRO stages: actor 3, critic 3, reference 3, reward 3; fp32" in out
    summary = out[out.index("held-out prompts") :]
    first, *_, last = metric_lines(chain["ppo"])
    assert f"{first['eval/score']:.3f}" in summary and f"{last['eval/score']:.3f}" in summary
    assert f"{last['eval/ema_score']:.3f}" in summary
    assert "32 responses in 4 steps" in summary
    for name in ("actor", "critic", "actor_ema", "curves.png"):
        assert str(chain[f"ppo/{name}"]) in summary
    printed = [result.stdout + result.stderr for result in chain.results.values()]
    assert all("Traceback" not in text and "Warning" not in text for text in printed)


def text_of(event) -> str:
    return event.tensor_proto.string_val[0].decode()
