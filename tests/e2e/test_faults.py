"""Ranks that fail in the middle of a run: it is said once which and where, all end, and the command is run again."""

import sys

from scripts.harness.faults import STEPS, FaultyRun
from scripts.harness.programs import by_deepspeed, metric_lines
from scripts.harness.step3_rlhf import Fault


def test_a_run_comes_to_its_end_though_a_rank_failed_and_a_rank_died(tiny, tmp_path):
    run = FaultyRun(tmp_path / "run", tiny, by_deepspeed)
    restarting = [sys.executable, "-m", "training.program.restarting", "--max_restarts", "2"]
    run.command = [*restarting, *run.command]
    ended = run.run(Fault("train", 3, rank=1, signal="error"), Fault("generate", 4, rank=1, signal="SIGKILL"))
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("Traceback") == 1 and "rank 1: Traceback" in ended.stderr
    assert ended.stderr.count("ArithmeticError: made up") == 1
    died = [line for line in ended.stderr.splitlines() if "has died" in line]
    assert len(died) == 1 and died[0].startswith("rank 1 (process ")
    assert "in phase generate of step 4 (since " in died[0]
    restarts = [line for line in ended.stderr.splitlines() if line.startswith("restarting: ")]
    assert len(restarts) == 2 and all("checkpoints/step_00000" in line for line in restarts)
    assert [line["step"] for line in metric_lines(run.out)] == list(range(STEPS + 1))
    assert (run.out / "actor" / "model.safetensors").is_file()
    assert run.processes() == []
