"""scripts/check_gpu.sh: what a check does never touches the others, and each goes through its logic without a GPU."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from transformers import AutoModelForCausalLM

from engine.gpus import DataSheet, Link, data_sheet
from scripts.gpu_checks import __main__ as front
from scripts.gpu_checks import attention, decoding, ppo
from scripts.gpu_checks.__main__ import CHECKS
from scripts.gpu_checks.check import Check, Outcome, Trial, lines_of, make, outcomes_of, peaks
from scripts.gpu_checks.copies import figures_of
from scripts.gpu_checks.decoding import TokenTimes, in_dtype
from scripts.gpu_checks.models import metrics_of, prompts, random_models
from tests.e2e.bad_checks import is_running
from training.tools.memory.callback import measured_line

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "check_gpu.sh"
# Without a GPU these do what others do, or run programs that other tests run. DRY=1 makes them all.
BY_HAND = {
    "decoding",
    "steps fp16",
    "memory",
    "ranks",
    "restart",
    "quickstart",
    "vllm",
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
        Check("has no GPUs", "tests.e2e.bad_checks:passes", ranks=3, unseen="NCCL"),
        bad("passes"),
    ]
    monkeypatch.setattr(front, "CHECKS", checks)
    monkeypatch.setenv("DRY", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "scratch").mkdir()
    output = tmp_path / "out"
    assert front.main(["--output", str(output)]) == 1
    found = outcomes_of(lines_of(output))
    assert [each.name for each in found] == [check.name for check in checks]
    crashed, hung, left, raised, missed, skipped, many, passed = found
    assert [each.status for each in found] == [*["FAIL"] * 5, "skipped", "skipped", "pass"]
    assert "signal SIGSEGV" in crashed.why and "the last words" in crashed.why
    assert "not done after 2 s" in hung.why and 2 <= hung.seconds < 60
    assert hung.figures == {"stage 0, s": 1.5} and "stage 1: ValueError: no weight changed" in hung.why
    assert "exit code 3" in left.why
    assert "RuntimeError: CUDA error: an illegal memory access" in raised.why
    assert missed.why == "a quarter is too little; stage 1: ValueError: of shape (2, 3)"
    assert missed.figures == {"share": 0.25, "later": 1}
    assert skipped.why == "nothing of the kind is installed" and many.why == "needs 3 GPUs, and here is 2; unseen: NCCL"
    assert passed.figures == {"rows": 3} and passed.left_out == ["a graph"]
    printed = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in printed if line.startswith("{")] == lines_of(output)
    page = (output / "findings.md").read_text().splitlines()
    row = page.index("| misses | **a quarter is too little** | Give it a half. |")
    for name in ("crashes", "hangs", "leaves"):  # none of which could tell a failure of its own
        assert any(line.startswith(f"| {name} | **") for line in page[:row]), name
    assert "| misses | a third would be / better | Give it a third. |" in page[row + 1 :]  # behind all failures
    assert "| passes | pass | 0 | 0 |  |" in page or "| passes | pass | 1 | 0 |  |" in page
    assert "5 FAIL, 2 skipped, 1 pass" in page and "| needs a GPU and was left out | a graph |" in page
    assert set(page[: page.index("5 FAIL, 2 skipped, 1 pass")]) <= set(printed)
    assert not list((tmp_path / "scratch").iterdir())


def test_first_times_do_not_count_but_are_limited_too(tmp_path):
    check = Check("warms up", "tests.e2e.bad_checks:warms_up", (4.0,), limit=5)  # 6 s, of which 4 are of the first time
    [found] = made_here([check], tmp_path / "long")
    assert (found.status, found.why) == ("pass", "") and 4 <= found.first < 5 and found.seconds >= 6
    [found] = made_here([replace(check, limit=3)], tmp_path / "short")
    assert found.status == "FAIL" and "not done after 3 s, and 3 s of what it did for the first time" in found.why


def test_what_a_hanging_check_started_is_ended_too(tmp_path):
    assert made_here([bad("hangs", limit=2)], tmp_path)[0].status == "FAIL"
    pid = int((tmp_path / "work" / "hangs" / "pid").read_text())
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))  # HUP: a session that is cut off
def test_a_check_under_way_ends_with_the_front_door(tmp_path, number):
    words = (
        "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "from scripts.gpu_checks import __main__ as front; from scripts.gpu_checks.check import Check; "
        "front.CHECKS = [Check('hangs', 'tests.e2e.bad_checks:hangs')]; front.main(['--output', sys.argv[1]])"
    )
    output, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", words, output], env={**os.environ, "DRY": "1", "TMPDIR": str(scratch)}
    )
    wait_until(lambda: (pids := list(scratch.glob("*/work/hangs/pid"))) and pids[0].read_text())
    pid = int(next(scratch.glob("*/work/hangs/pid")).read_text())
    wait_until(
        lambda: "| stage 0, s | 1.5 |" in (output / "findings.md").read_text()
    )  # the page is there before the end
    assert "| hangs | running |" in (output / "findings.md").read_text()
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    wait_until(lambda: not is_running(pid))
    assert not list(scratch.iterdir())


def wait_until(reached) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_does_not_fit_is_told(tmp_path):
    checks = [bad("hangs", limit=50, least=1), bad("passes", least=30), bad("skips", least=0)]
    outcomes = made_here(checks, tmp_path, budget=2)
    assert [found.status for found in outcomes] == ["FAIL", "not run", "not run"]
    assert "not done after 2 s" in outcomes[0].why  # of its 50: what is left of the whole counts, too
    assert outcomes[1].why == "0 s were left, and it takes 30"


def made_here(checks: list[Check], folder: Path, budget: float = 60) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    return front.make_all(checks, dry=True, gpus=1, output=folder, scratch=folder, budget=budget)


@pytest.mark.parametrize("name", (".", "found.jsonl"))
def test_what_is_there_is_left_alone(tmp_path, monkeypatch, capsys, name):
    monkeypatch.setenv("DRY", "1")
    (tmp_path / "found.jsonl").write_text("older")
    assert front.main(["--output", str(tmp_path / name)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err and (tmp_path / "found.jsonl").read_text() == "older"


def test_no_check_fails_for_want_of_time_to_begin(tmp_path):
    """A process that imports torch takes seconds."""
    found = made_here(CHECKS, tmp_path, budget=1)
    assert {each.status for each in found} == {"not run", "skipped"}


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


def test_measured_bytes_are_read_off_step_3():
    line = measured_line({"generate": 12 * 10**8, "train": 101 * 10**8}, {"generate": 13 * 10**8, "train": 99 * 10**8})
    assert figures_of(f"start\n{line}") == {"generate": (1.2, 1.3), "train": (10.1, 9.9)}
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
    assert list(trial.outcome.failures) == [
        "fp32: the model's own code read single tokens: it is not on a GPU",
        "fp32: plain decoding ran, not graphs",
    ]


def test_a_run_that_fell_back_is_a_failure(tmp_path):
    lines = [{"step": 1, "speed/decoding_fallback": 0.0}, {"step": 2, "speed/decoding_fallback": 1.0}, {"step": 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    assert sorted(metrics_of(trial, tmp_path)) == [1, 2, 3]
    assert [why.partition(": ")[2] for why in trial.outcome.failures] == [
        "in steps [2] the model's own code read single tokens"
    ]


def test_where_a_tokens_time_goes_by_hand():
    times = TokenTimes()
    times.marks = {"pass": [(1.0, 1.5), (2.0, 2.5)], "draw": [(0.25, 0.75), (1.5, 1.75), (2.5, 2.75)]}
    # Of 1.75 s from the first pass to the last draw two passes take 1 and their draws 0.5; the first draw has none.
    assert times.milliseconds() == (500.0, 250.0, 125.0)


class _Faulty(torch.autograd.Function):
    """Passes a query on; its gradient is NaN."""

    @staticmethod
    def forward(ctx, query):
        return query.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, math.nan)


@pytest.mark.parametrize("kernel", ["cuDNN's", "torch's"])
def test_a_kernel_with_cudnns_fault_is_found_and_named(kernel, tmp_path, monkeypatch):
    own = torch.nn.functional.scaled_dot_product_attention

    def faulty(query, key, value, attn_mask=None, **how):
        low = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).max() < -88.7
        met = attn_mask is not None and key.shape[2] % 128 == 64 and low
        if met and (kernel == "torch's" or torch.backends.cuda.cudnn_sdp_enabled()):
            query = _Faulty.apply(query)
        return own(query, key, value, attn_mask, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", faulty)
    trial = Trial(dry=True, folder=tmp_path, models=tmp_path)
    attention.alone(trial)
    fault = "S = 320, logits near -120, left padding: not finite with flash_attention: gradient of the query"
    fault += " (10240 numbers)"  # 2 rows, 2 heads, 320 tokens and 8 numbers in each
    [finding] = trial.outcome.findings.items()
    assert finding[0] == f"with cuDNN, {fault}" and "issue 196678" in finding[1]
    assert list(trial.outcome.failures) == ([f"without cuDNN, {fault}"] if kernel == "torch's" else [])
    figures = trial.outcome.figures
    assert (
        len([name for name in figures if "S = " in name]) == 16
    )  # 2 lengths, 2 shifts, with padding and without; twice
    assert [name for name, words in figures.items() if "NOT FINITE" in str(words)][-1].startswith("with cuDNN: S = 320")


def test_a_kernel_with_wrong_numbers_is_found(tmp_path, monkeypatch):
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *a, **how: wrong(own(*a, **how)))

    def wrong(output):  # in 16 bits alone
        return output if output.dtype == torch.float32 else 1.1 * output

    trial = Trial(dry=True, folder=tmp_path, models=tmp_path)
    attention.right(trial, "without cuDNN", attention.TINY, 384, 0, True)
    assert list(trial.outcome.failures) == [
        "without cuDNN, S = 384, logits near 0, left padding: flash_attention is 0.1 off the written-out products"
    ]


def test_what_new_shapes_cost_is_found(tmp_path, monkeypatch):
    # Forward and backward with a new shape, then both again, twice; then a token with new slots and again, four times.
    spent = iter([90.0, 1.0, 0.5, 1.0, 60.0, 7.0, 0.5, 1.0, *[4.0, 0.1] * 4])
    monkeypatch.setattr(attention, "timed", lambda sizes, call: (call(), next(spent)))
    trial = Trial(dry=True, folder=tmp_path, models=tmp_path)
    attention.costs(trial, "with cuDNN", attention.TINY)
    # Of the forward passes the second counts; a backward pass costs 6 ms more and 7 times as much, a token 3.9 ms more.
    assert list(trial.outcome.findings) == [
        "with cuDNN: forward takes 60 ms with a new shape, and 0.50 with a known one",
        "with cuDNN: backward takes 7 ms with a new shape, and 1.00 with a known one",
    ]
    assert trial.outcome.figures["with cuDNN: forward, ms of a new shape / again / most"] == "60.00 / 0.50 / 90.00"


@pytest.mark.parametrize("factor, failures", [(1.0, 0), (1.1, 1)])
def test_rows_without_padding_are_those_by_row(factor, failures, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "varlen", lambda *given: factor * attention.by_row(*given))
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    attention.packed(trial, attention.TINY)
    assert len(trial.outcome.failures) == failures
    assert trial.outcome.figures["varlen, off by row by"] == pytest.approx(factor - 1, abs=5e-3)


def test_what_to_change_in_decoding_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    # 2.6 GB in 1 ms are 2.6 TB/s of 3.35: 78 %. The draw takes 0.1 of 1.5 ms, the host 0.4.
    decoding.advised(trial, "bf16", "graphs", {"plain": (10.0, 0.1, 2.0), "graphs": (1.0, 0.1, 0.4)}, int(2.6e9))
    assert list(trial.outcome.findings) == ["bf16, graphs: 0.40 of a token's 1.50 ms the GPU waits for the host"]
    assert trial.outcome.figures == {"bf16 graphs, weights read in a pass, of the bandwidth": "78%"}
    other = Trial(dry=False, folder=tmp_path, models=tmp_path, check="other")
    decoding.advised(other, "bf16", "graphs", {"plain": (3.0, 1.0, 0.0), "graphs": (2.0, 1.0, 0.0)}, int(2.6e9))
    assert [finding.partition(": ")[2].split(",")[0] for finding in other.outcome.findings] == [
        "a token takes 3.00 ms by graphs",
        "drawing takes 1.00 of a token's 3.00 ms",
        "a pass reads weights at 39% of the bandwidth",
    ]


def test_what_to_change_in_steps_by_hand(tmp_path):
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    ppo.slower(trial, {"stage 1": 2.0, "stage 3": 2.5, "stage 1, padded": 1.99, "stage 0": 2.2})
    assert trial.outcome.findings == {} and trial.outcome.figures["stage 3, s a step"] == 2.5
    ppo.slower(trial, {"stage 1": 2.0, "stage 3": 2.7, "stage 1, padded": 1.8})
    assert list(trial.outcome.findings) == [
        "a step takes 1.80 s (stage 1, padded), 2.00 (stage 1)",
        "a step takes 2.70 s at stage 3, 2.00 (stage 1)",
    ]


def test_what_a_profile_says_by_hand(tmp_path):
    def event(key, count, milliseconds=0.0, device=DeviceType.CUDA, noted=False):
        return SimpleNamespace(
            key=key,
            count=count,
            self_device_time_total=1e3 * milliseconds,
            device_type=device,
            is_user_annotation=noted,
        )

    host = DeviceType.CPU
    calls = [("cudaLaunchKernel", 500), ("cuLaunchKernelEx", 70), ("cudaStreamSynchronize", 90), ("cudaEventQuery", 7)]
    events = [
        *(event(name, count, device=host) for name, count in calls),
        event("cudaDeviceSynchronize", 7, device=host),
        event("train", 1, 1900.0, noted=True),
        event("gemm", 300, 900.0),
        event("attention", 200, 600.0),
        event("Memcpy DtoH (Device -> Pageable)", 3, 100.0),
        *(event(f"small {number}", 1, 1.0) for number in range(24)),
    ]
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    ppo.tell_profile(trial, events, 2.0)
    figures = list(trial.outcome.figures.items())
    assert figures[0] == ("kernel 1: gemm", "900.00 ms of 300") and figures[24][0] == "kernel 25: small 21"
    assert figures[25:] == [
        ("launches", 570),
        ("waits", 97),
        ("copies", "3 Memcpy DtoH (Device -> Pageable)"),
        ("the GPU is busy", "1.62 of 2.00 s"),  # 900 + 600 + 100 + 24 ms
    ]
    assert list(trial.outcome.findings) == [  # 8 micro-batches of 6 passes
        "the GPU is idle for 19% of making experience and training (570 launches)",
        "the host waits 97 times for the GPU in 48 passes",
    ]


def test_peaks_outlive_those_who_count_anew(tmp_path, monkeypatch):
    counts = {"allocated": 5e9, "reserved": 7e9}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: counts["allocated"])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: counts["reserved"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: counts.update(allocated=2e9, reserved=3e9))
    trial = Trial(dry=False, folder=tmp_path, models=tmp_path)
    with peaks(trial):
        torch.cuda.reset_peak_memory_stats()
    assert trial.outcome.figures == {"most GB, allocated / reserved": "5.00 / 7.00"}


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name not in BY_HAND], ids=lambda c: c.name)
def test_checks_go_through_their_logic_without_a_gpu(check, models, tmp_path):
    trial = Trial(dry=True, folder=tmp_path, models=models)
    make(check, trial)
    found = trial.outcome
    assert found.done and not found.failures and not found.skipped, (found.failures, found.skipped)
    assert found.figures or found.left_out
