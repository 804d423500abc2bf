"""scripts/check_gpu.sh: what a check does never touches the others, and each goes through its logic without a GPU."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from engine.gpus import DataSheet, data_sheet
from scripts.gpu_checks import __main__ as front
from scripts.gpu_checks import attention
from scripts.gpu_checks.__main__ import CHECKS
from scripts.gpu_checks.check import Check, Outcome, Trial, lines_of, make, outcomes_of
from scripts.gpu_checks.copies import figures_of
from tests.e2e.bad_checks import is_running
from training.tools.memory.callback import measured_line

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "check_gpu.sh"
# Without a GPU these do what others do, or run programs that other tests run. DRY=1 makes them all.
BY_HAND = {
    "decoding",
    "steps fp16",
    "memory",
    "sequences",
    "long rows",
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


def made_here(checks: list[Check], folder: Path, budget: float = 60) -> list[Outcome]:
    folder.mkdir(exist_ok=True)
    return front.make_all(checks, dry=True, gpus=1, output=folder, scratch=folder, budget=budget)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("NVIDIA H100 80GB HBM3", DataSheet(989e12, 3350e9)),
        ("NVIDIA H100 PCIe", DataSheet(756e12, 2000e9)),
        ("NVIDIA H200", DataSheet(989e12, 4800e9)),
        ("NVIDIA A100-SXM4-80GB", DataSheet(312e12, 2039e9)),
        ("NVIDIA A100 80GB PCIe", DataSheet(312e12, 1935e9)),
        ("NVIDIA A100-SXM4-40GB", DataSheet(312e12, 1555e9)),
        ("NVIDIA A100-PCIE-40GB", DataSheet(312e12, 1555e9)),
        ("Tesla V100-SXM2-32GB", DataSheet(125e12, 900e9)),
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
    [finding] = [found for found in trial.outcome.findings.items() if "not finite" in found[0]]  # others are of times
    assert finding[0] == f"with cuDNN, {fault}" and "issue 196678" in finding[1]
    assert list(trial.outcome.failures) == ([f"without cuDNN, {fault}"] if kernel == "torch's" else [])
    figures = trial.outcome.figures
    assert (
        len([name for name in figures if "S = " in name]) == 16
    )  # 2 lengths, 2 shifts, with padding and without; twice
    assert [name for name, words in figures.items() if "NOT FINITE" in str(words)][-1].startswith("with cuDNN: S = 320")


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name not in BY_HAND], ids=lambda c: c.name)
def test_checks_go_through_their_logic_without_a_gpu(check, models, tmp_path):
    trial = Trial(dry=True, folder=tmp_path, models=models)
    make(check, trial)
    found = trial.outcome
    assert found.done and not found.failures and not found.skipped, (found.failures, found.skipped)
    assert found.figures or found.left_out
