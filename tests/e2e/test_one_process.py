"""Whole steps in one process."""

import json

from scripts.harness.programs import metric_lines, run_here
from tests.e2e.chain import EVALUATION, EVERY_STEP, assert_finite
from training.reporting.step_metrics import phase_memory
from training.supervised import SupervisedTrainer


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
        "curves.png",
        "written.json",
        "run.json",
    }


def test_peaks_of_memory_begin_anew_before_the_first_optimizer_step(tiny, tmp_path, capfd, monkeypatch):
    """By what its passes take it is decided what is kept whole over those of later steps."""
    order = []
    monkeypatch.setattr(phase_memory, "begin", lambda: order.append("begin"))

    def noted(name: str):
        method = getattr(SupervisedTrainer, name)
        return lambda trainer, *args: order.append(name) or method(trainer, *args)

    for name in ("held_out_metrics", "optimizer_step"):
        monkeypatch.setattr(SupervisedTrainer, name, noted(name))
    assert run_here(1, tiny.flags(1, output_dir=tmp_path / "out", max_steps=2), capfd).code == 0
    assert order == ["held_out_metrics", "begin", "optimizer_step", "optimizer_step", "held_out_metrics"]
