"""scripts/check_gpu.sh: what a check does never touches the others, and each goes through its logic without a GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.memory.copies import CopyNeed, place_copies
from engine.memory.gpus import DataSheet, Link, data_sheet
from scripts.gpu_checks import __main__ as front
from scripts.gpu_checks.__main__ import CHECKS
from scripts.gpu_checks.benchmark import aims, rates
from scripts.gpu_checks.check import Check, Skipped, Trial, outcome_of, peaks
from scripts.gpu_checks.copies import LEVELS, figures_of
from scripts.gpu_checks.decoding import TokenTimes, in_dtype
from scripts.gpu_checks.models import metrics_of, prompts, random_models
from tests.e2e.bad_checks import is_running
from training.runtime.memory_lines import comparison

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "check_gpu.sh"
# Without a GPU these do what "steps bf16" and "graphs" do, or run programs that other tests run. DRY=1 makes them all.
BY_HAND = {
    "steps fp16",
    "benchmark 350m",
    "benchmark 1.3b",
    "memory",
    "ranks",
    "restart",
    "quickstart",
    "vllm",
    "machines",
}


def bad(name: str, **settings) -> Check:
    return Check(name, f"tests.e2e.bad_checks:{name}", **settings)


def test_no_check_touches_another(tmp_path, monkeypatch, capsys):
    checks = [
        bad("crashes"),
        bad("hangs", limit=2 / front.SLOWER),
        bad("leaves"),
        bad("raises"),
        bad("misses"),
        bad("skips"),
        bad("passes", ranks=3, unseen="NCCL"),
        bad("passes"),
    ]
    monkeypatch.setattr(front, "CHECKS", checks)
    monkeypatch.setenv("DRY", "1")
    output = tmp_path / "out"
    assert front.main(["--output", str(output)]) == 1
    found = json.loads((output / "checks.json").read_text())
    assert [each["name"] for each in found] == [check.name for check in checks]
    crashed, hung, left, raised, missed, skipped, many, passed = found
    assert [each["status"] for each in found] == [*["FAIL"] * 5, "skipped", "skipped", "pass"]
    assert "signal SIGSEGV" in crashed["why"] and "the last words" in crashed["why"]
    assert "not done after 2 s" in hung["why"] and 2 <= hung["seconds"] < 60
    assert hung["figures"] == {"stage 0, s": 1.5} and "stage 1: ValueError: no weight changed" in hung["why"]
    assert "exit code 3" in left["why"]
    assert "RuntimeError: CUDA error: an illegal memory access" in raised["why"]
    assert missed["why"] == "a quarter is too little; stage 1: ValueError: of shape (2, 3)"
    assert missed["figures"] == {"share": 0.25, "later": 1}
    assert (
        skipped["why"] == "nothing of the kind is installed"
        and many["why"] == "needs 3 GPUs, and here is 2; unseen: NCCL"
    )
    assert passed["figures"] == {"rows": 3} and passed["left_out"] == ["a graph"]
    printed = capsys.readouterr().out
    assert "| passes | pass |" in printed and "needs CUDA and was left out: a graph" in printed
    assert "5 FAIL, 2 skipped, 1 pass" in printed and "2 skipped" in (output / "table.md").read_text()
    assert not (output / "models").exists() and not (output / "work").exists()


def test_what_a_hanging_check_started_is_ended_too(tmp_path):
    outcomes = front.make_all([bad("hangs", limit=2)], dry=True, gpus=1, output=made(tmp_path), budget=60)
    assert outcomes[0].status == "FAIL"
    pid = int((tmp_path / "work" / "hangs" / "pid").read_text())
    wait_until(lambda: not is_running(pid))


def test_a_check_under_way_ends_with_the_front_door(tmp_path):
    words = (
        "import sys; from scripts.gpu_checks import __main__ as front; from scripts.gpu_checks.check import Check; "
        "front.CHECKS = [Check('hangs', 'tests.e2e.bad_checks:hangs')]; front.main(['--output', sys.argv[1]])"
    )
    process = subprocess.Popen([sys.executable, "-c", words, tmp_path], env={**os.environ, "DRY": "1"})
    started = tmp_path / "work" / "hangs" / "pid"
    wait_until(lambda: started.exists() and started.read_text())
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM
    wait_until(lambda: not is_running(int(started.read_text())))


def wait_until(reached) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_does_not_fit_is_told(tmp_path):
    checks = [bad("hangs", limit=50, least=1), bad("passes", least=30), bad("skips", least=0)]
    outcomes = front.make_all(checks, dry=True, gpus=1, output=made(tmp_path), budget=2)
    assert [found.status for found in outcomes] == ["FAIL", "not run", "not run"]
    assert "not done after 2 s" in outcomes[0].why  # of its 50: what is left of the whole counts, too
    assert outcomes[1].why == "0 s were left, and it takes 30"


def made(folder: Path) -> Path:
    (folder / "logs").mkdir()
    return folder


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DRY", "1")
    (tmp_path / "checks.json").write_text("older")
    assert front.main(["--output", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err and (tmp_path / "checks.json").read_text() == "older"


def test_the_lines_for_a_rented_machine_make_each_check_once():
    page = (PROGRAM.parent / "gpu_checks" / "README.md").read_text()
    lines = [shlex.split(line.partition(";")[0]) for line in page.splitlines() if line.startswith("scripts/check_gpu")]
    assert [name for words in lines for name in words[words.index("--only") + 1 :]] == [each.name for each in CHECKS]


def test_without_a_gpu_nothing_is_made_up(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("DRY", raising=False)
    monkeypatch.setattr(front, "gpus_that_compute", lambda: 0)
    assert front.main(["--output", str(tmp_path / "out")]) == 2
    assert "DRY=1 goes through the checks" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_front_door_opens():
    ended = subprocess.run([PROGRAM, "--help"], env={**os.environ, "DRY": "1"}, capture_output=True, text=True)
    assert ended.returncode == 0 and "within nine minutes" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H100 80GB HBM3", DataSheet(989e12, 3350e9, Link(450e9, 1.9e-6))),
        ("NVIDIA H100 PCIe", DataSheet(756e12, 2000e9, Link(64e9, 2.5e-6))),
        ("NVIDIA H200", DataSheet(989e12, 4800e9, Link(450e9, 1.9e-6))),
        ("NVIDIA A100-SXM4-80GB", DataSheet(312e12, 2039e9, Link(300e9, 1.9e-6))),
        ("NVIDIA A100 80GB PCIe", DataSheet(312e12, 1935e9, Link(32e9, 2.5e-6))),
        ("NVIDIA A100-SXM4-40GB", DataSheet(312e12, 1555e9, Link(300e9, 1.9e-6))),
        ("NVIDIA A100-PCIE-40GB", DataSheet(312e12, 1555e9, Link(32e9, 2.5e-6))),
        ("Tesla V100-SXM2-32GB", DataSheet(125e12, 900e9, Link(150e9, 1.9e-6))),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_data_sheets_go_by_torchs_names(name, expected):
    assert data_sheet(name) == expected


def test_shares_of_a_data_sheet_by_hand():
    link = Link(300e9, 1.9e-6)
    report = {
        "ranks": 2,
        "flops": {"train": 1000e12},
        "steps": {"ours": [{"train": 2.0}, {"train": 1.25}, {"train": 1.0}]},
        "decode_bytes": 300e9,
        "decode_seconds": 0.2,
    }
    assert rates(report) == (400e12, 1500e9)  # 1000e12 / 2 / 1.25, and 300e9 / 0.2
    assert aims(report, DataSheet(1000e12, 2000e9, link)) == {
        "MFU of training": "40.0% (40% reached)",
        "share of bandwidth in decoding": "75.0% (50% reached)",
    }
    assert "(50% not reached)" in aims(report, DataSheet(1000e12, 4000e9, link))["share of bandwidth in decoding"]


def test_each_amount_of_memory_calls_for_other_copies():
    # In quarters of all weights: a model has 1, of float32; actor and critic get gradients of 1 and moments of 2 more.
    # A check of 34 million parameters has keys and values of 0.8.
    needs = [
        CopyNeed(role, 3, role in ("actor", "reference"), 1000, gradients)
        for role, gradients in (("actor", 3000), ("critic", 3000), ("reference", 0), ("reward", 0))
    ]
    for expected, sizes in LEVELS.items():
        found = place_copies(needs, 800, int(sizes * 4000), "keep")
        if expected == "partitions":
            assert not found.models
        else:
            assert len(found.models) == 4 and found.shared == (expected != "own")
            assert found.between_steps == ("free" if expected == "shared, given back" else "keep")


def test_planned_bytes_are_read_off_step_3():
    gpu = (
        "start\nmemory, planned / measured GB of rank 0 at each phase's peak: generate 1.2 / 1.3, experience 10.1 / 9.9"
    )
    assert figures_of(gpu) == {"generate": (1.2, 1.3), "experience": (10.1, 9.9)}
    unplanned = comparison(SimpleNamespace(rollout_backend="nobody's"), {"train": 5}, lambda: None, resumed=False)
    with pytest.raises(Skipped, match="not planned"):
        figures_of(unplanned)
    assert figures_of("nothing of the kind") == {}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("size", ["34m", "opt-1.3b"])
def test_logits_are_as_wide_as_trained_ones(size, models, tmp_path):
    path, _ = random_models(Trial(dry=True, folder=tmp_path, models=models), size)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=prompts(8, 12, model.config.vocab_size).input_ids).logits
    assert 2 < logits.std() < 4


def test_decoding_by_the_models_own_code_in_place_of_graphs_is_a_failure(models, tmp_path):
    trial = Trial(dry=True, folder=tmp_path, models=models)
    in_dtype(trial, "graphs", random_models(trial, "gqa")[0], "fp32")
    assert trial.failures == [
        "fp32: the model's own code read single tokens: it is not on a GPU",
        "fp32: plain decoding ran, not graphs",
    ]


def test_a_run_that_fell_back_is_a_failure(tmp_path):
    lines = [{"step": 1, "speed/decoding_fallback": 0.0}, {"step": 2, "speed/decoding_fallback": 1.0}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    assert sorted(metrics_of(trial, tmp_path)) == [1, 2, 3]
    assert [why.partition(": ")[2] for why in trial.failures] == [
        "in steps [2] the model's own code read single tokens"
    ]


def test_where_a_tokens_time_goes_by_hand():
    times = TokenTimes()
    times.marks = {"pass": [(1.0, 1.5), (2.0, 2.5)], "draw": [(0.25, 0.75), (1.5, 1.75), (2.5, 2.75)]}
    # Of 1.75 s from the first pass to the last draw two passes take 1 and their draws 0.5; the first draw has none.
    assert times.words() == "500.000 pass + 250.000 draw + 125.000 host"


def test_peaks_outlive_those_who_count_anew(tmp_path, monkeypatch):
    counts = {"allocated": 5e9, "reserved": 7e9}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counts["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: counts["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counts.update(allocated=2e9, reserved=3e9))
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    with peaks(trial):
        torch.cuda.reset_peak_memory_stats()
    assert trial.figures == {"most GB, allocated / reserved": "5.00 / 7.00"}


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name not in BY_HAND], ids=lambda c: c.name)
def test_checks_go_through_their_logic_without_a_gpu(check, models, tmp_path):
    found = outcome_of(check, Trial(dry=True, folder=tmp_path, models=models))
    assert found.status == "pass", found.why
    assert found.figures or found.left_out
