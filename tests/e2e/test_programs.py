"""Steps 1, 2 and 3 on two ranks, ZeRO-3, each starting from what the ones before it wrote, and step 3 resumed: what
they print, log and save, and what they go on from."""

import gzip
import itertools
import json
import math
import re
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine.experience import position_ids
from engine.models.loading import load_scorer
from scripts.harness.checkpoint_damages import DAMAGES, tried
from scripts.harness.programs import MACHINE, Result, Tiny, forked, metric_lines, run_here
from training.checkpoints.files import checkpoints_in, rank_file
from training.reporting.standard_errors import ENDINGS
from training.reporting.step_metrics import phase_memory
from training.supervised import HeldOutExamples, SupervisedTrainer

STEPS, EVALUATED = 4, 8
EVERY_STEP = {
    *(
        f"objective/{name}"
        for name in ("kl", "kl_per_token", "kl_coef", "entropy", "scores", "rlhf_reward", "non_score_reward")
    ),
    *(f"policy/{name}" for name in ("loss", "approxkl", "clipfrac", "ratio_mean", "ratio_max", "grad_norm", "lr")),
    *(f"value/{name}" for name in ("loss", "clipfrac", "explained_variance", "mean", "grad_norm", "lr")),
    *(f"value/{name}" for name in ("explained_outcome", "slope", "bias")),
    "advantages/mean",
    "advantages/std",
    "returns/mean",
    "returns/var",
    *(f"rollout/{name}" for name in ("response_length", "eos_rate", "tokens_per_second", "degenerate")),
    *(f"time/{name}" for name in ("generate", "make_experience", "train", "step")),
    *(f"speed/{name}" for name in ("make_experience", "train")),
    "memory/peak_gb",
}
EVALUATION = {
    f"eval/{name}" for name in ("score", "score_std", "kl", "response_length", "distinct_bigrams", "distinct_responses")
} | {f"eval/{name}" for name in ("compressed_bytes", "new_words")}
EVALUATION |= {f"eval/{name}{ending}" for name in ("score", "kl", "response_length", "new_words") for ending in ENDINGS}
AVERAGED = {name.replace("eval/", "eval/ema_") for name in EVALUATION}


@dataclass(frozen=True)
class Chain:
    """Folders of the three steps and of step 3 resumed, and how each ended."""

    folder: Path
    results: dict[str, Result]

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def run_chain(tiny: Tiny, folder: Path) -> Chain:
    """Four launches: steps 1, 2 and 3, and step 3 as if it had been killed and resumed."""
    results = {}

    def started(name: str, step: int, **flags) -> None:
        results[name] = forked(step, tiny.flags(step, output_dir=folder / name, **flags))
        assert results[name].code == 0, results[name].stdout + results[name].stderr

    started("sft", 1, zero_stage=3, learning_rate=1e-3)
    started("reward", 2, zero_stage=3, learning_rate=1e-3, model_name_or_path=folder / "sft")
    ppo = {
        "actor_model_name_or_path": folder / "sft",
        "critic_model_name_or_path": folder / "reward",
        "reward_model_name_or_path": tiny.folder / "reward",
        "actor_zero_stage": 3,
        "critic_zero_stage": 3,
        "max_steps": STEPS,
        "num_eval_prompts": EVALUATED,
        "save_steps": 2,
        "print_answers_interval": 2,
        "profile_steps": [3, 4],
        "enable_ema": True,
        "kl_coef": 0.25,
        "ppo_epochs": 2,
        "num_warmup_steps": 0,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
    }
    started("ppo", 3, **ppo)
    # As if the run had been killed within step 4: what is beyond the last checkpoint is dropped and done again.
    shutil.copytree(folder / "ppo", folder / "resumed")
    shutil.rmtree(folder / "resumed" / "checkpoints" / f"step_{STEPS:06d}")
    for name in ("actor", "actor_ema", "critic"):
        path = folder / "resumed" / name
        path.unlink() if path.is_file() else shutil.rmtree(path)
    started("resumed", 3, **ppo, resume=folder / "resumed")
    return Chain(folder, results)


@pytest.fixture(scope="module")
def chain(tiny, tmp_path_factory) -> Chain:
    """The three steps, one after the other, and the last resumed: every test that asks looks at another side."""
    return run_chain(tiny, tmp_path_factory.mktemp("chain"))


def sample_rows(chain: Chain, name: str) -> list[dict]:
    return [json.loads(line) for line in chain[f"ppo/samples/{name}.jsonl"].read_text().splitlines()]


def assert_finite(lines: list[dict]) -> None:
    for line in lines:
        bad = [name for name, value in line.items() if value is None or not math.isfinite(value)]
        assert not bad, f"step {line['step']}: {bad}"


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
    assert {name for name in lines[0] if not name.startswith(MACHINE)} == {
        "step",
        "samples",
    } | EVALUATION | AVERAGED
    for line in lines[1:]:
        assert EVERY_STEP <= set(line), f"step {line['step']} lacks {sorted(EVERY_STEP - set(line))}"
    assert EVALUATION | AVERAGED <= set(lines[-1])
    assert_finite(lines)


def test_restart_points_are_timed_and_whole(chain):
    timed = [line["step"] for line in metric_lines(chain["ppo"]) if "time/checkpoint" in line]
    assert timed == [3]  # in the line after the one that it followed; the last one has no such line
    points = sorted(chain["ppo/checkpoints"].iterdir())
    assert [checkpoint.name for checkpoint in points] == ["step_000002", "step_000004"]
    for checkpoint in points:
        names = {path.name for path in checkpoint.iterdir()}
        assert names == {"actor", "critic", "ema", "config", "trainer_state.json", "manifest.json"}
        assert [path.name for path in sorted((checkpoint / "ema").iterdir())] == [rank_file(0), rank_file(1)]
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
    for name in ("actor", "critic", "actor_ema"):
        assert str(chain[f"ppo/{name}"]) in summary
    printed = [result.stdout + result.stderr for result in chain.results.values()]
    assert all("Traceback" not in text and "Warning" not in text for text in printed)


def text_of(event) -> str:
    return event.tensor_proto.string_val[0].decode()


def test_the_dialect_of_deepspeed_chat(tiny, tmp_path, capfd):
    """In one process, without an EMA, and with the sizes that the other runs leave at 1."""
    flags = tiny.flags(
        3,
        output_dir=tmp_path / "out",
        dialect="deepspeed_chat",
        per_device_generation_batch_size=2,
        generation_batches=2,
        num_samples_per_prompt=3,
        per_device_training_batch_size=2,
        gradient_accumulation_steps=3,
        eval_steps=1,
        actor_zero_stage=2,
    )
    result = run_here(3, flags, capfd)
    assert result.code == 0, result.stderr
    assert result.stdout.startswith(
        "dialect deepspeed_chat\n  samples_per_prompt = 3 (given; the dialect's is 1)\n"
        "  mini_batches = 2 (given; the dialect's is 1)\n"
    )
    assert result.stdout.count("(given;") == 2
    lines = metric_lines(tmp_path / "out")
    assert [line["samples"] for line in lines] == [0, 12, 24]
    assert all(EVERY_STEP <= set(line) for line in lines[1:])
    assert all(EVALUATION <= set(line) for line in lines)
    assert lines[1]["objective/kl_coef"] == 0.1
    assert_finite(lines)
    pads = [
        json.loads((path / "tokenizer_config.json").read_text())["pad_token"]
        for path in (tiny.folder / "sft", tmp_path / "out" / "actor", tmp_path / "out" / "critic")
    ]
    assert len(set(pads)) == 1, "models are saved with their own pad token, though the run padded with EOS"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "actor",
        "critic",
        "metrics.jsonl",
        "tensorboard",
        "samples",
        "run.json",
    }


def test_peaks_of_memory_begin_anew_before_the_first_optimizer_step(tiny, tmp_path, capfd, monkeypatch):
    """By what its passes take it is decided what is kept whole over those of later steps."""
    order = []
    monkeypatch.setattr(phase_memory, "begin", lambda: order.append("begin"))

    def noted(kind: type, name: str):
        method = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda self, *args: order.append(name) or method(self, *args))

    noted(HeldOutExamples, "evaluate")
    noted(SupervisedTrainer, "optimizer_step")
    assert run_here(1, tiny.flags(1, output_dir=tmp_path / "out", max_steps=2), capfd).code == 0
    assert order == ["evaluate", "begin", "optimizer_step", "optimizer_step", "evaluate"]


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_point_is_passed_over_and_refused_by_its_name(chain, tmp_path, name):
    older, newest = checkpoints_in(chain["ppo"])
    places = [tmp_path / "checkpoints" / checkpoint.name for checkpoint in (newest, older)]
    for checkpoint, place in zip((newest, older), places):
        shutil.copytree(checkpoint, place)
    DAMAGES[name](*places)
    assert not tried(tmp_path, *places).startswith("FAILED")


def test_points_that_nothing_happened_to_are_used(chain, tmp_path):
    older, newest = checkpoints_in(chain["ppo"])
    assert tried(chain["ppo"], newest, older) == f"FAILED: {newest.name} was used"


@pytest.mark.parametrize("name", ("ppo", "resumed"))
def test_the_steps_asked_for_are_recorded_on_each_rank(chain, name):
    recorded = [f"step_00000{step}_rank{rank}.json.gz" for step in (3, 4) for rank in (0, 1)]
    # The resumed run began from step 2 with the other's recordings of steps 3 and 4 in its folder, and replaced them.
    assert sorted(path.name for path in chain[f"{name}/profile"].iterdir()) == sorted(recorded)
    told = chain.results[name].stderr
    for step in (3, 4):
        assert told.count(f"step {step} recorded: {chain[name]}/profile/step_00000{step}_rank*.json.gz") == 1
    assert "ui.perfetto.dev" in told and "profiler_start" not in told
    for file in recorded:
        ranges = ranges_of(chain[f"{name}/profile/{file}"])
        # 4 responses of a rank in one micro-batch: a pass of each model, then an optimizer step in each of 2 epochs.
        assert {"prompts", "token", "gather of weights"} == set(ranges["generate"])
        assert {"policy forward", "scorer forward", "reference", "reward model"} <= set(ranges["make_experience"])
        trained = [f"{role} {part}" for role in ("actor", "critic") for part in ("backward", "optimizer step")]
        trained += ["policy forward", "scorer forward", "EMA update"]
        assert Counter(ranges["train"]) == Counter(2 * trained)


def ranges_of(trace: Path) -> dict[str, list[str]]:
    """The names of a recording's ranges within each phase, in order of time; each stands in exactly one phase."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)
    marks = sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda event: event["ts"])
    phases = [mark for mark in marks if mark["name"] in ("generate", "make_experience", "train")]
    assert [phase["name"] for phase in phases] == ["generate", "make_experience", "train"]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(phases))
    ours = [
        mark
        for mark in marks
        if mark["tid"] == phases[0]["tid"]
        and mark not in phases
        and not mark["name"].startswith(("gloo:", "Optimizer."))
    ]  # these are torch's own
    assert all(mark["dur"] > 0 for mark in phases + ours)
    found = {
        phase["name"]: [
            mark["name"]
            for mark in ours
            if phase["ts"] <= mark["ts"] and mark["ts"] + mark["dur"] <= phase["ts"] + phase["dur"]
        ]
        for phase in phases
    }
    assert sum(map(len, found.values())) == len(ours)
    return found


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
