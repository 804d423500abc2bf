"""Runs in the middle of which ranks fail or are killed: all end, it is said once which failed and where, and they go on
as if nothing had happened."""

import re
import subprocess

from scripts.harness import ROOT
from scripts.harness.faults import STEPS, FaultyRun
from scripts.harness.kills import KillTrial, random_instants
from scripts.harness.programs import by_deepspeed, metric_lines
from scripts.harness.step3_rlhf import Fault
from training.reporting.step_metrics import LESS_MEMORY

KILL_STEPS = 3


def test_killed_runs_go_on_bit_by_bit(tiny, tmp_path):
    trial = KillTrial(tiny, tmp_path / "runs", KILL_STEPS, forked=True)
    instants = random_instants(3, KILL_STEPS, seed=1)[1:]
    outcomes = [trial.kill(instant, f"run_{number}") for number, instant in enumerate(instants)]
    assert [outcome.different for outcome in outcomes] == [[]] * 2, outcomes


LOOP = re.search(r"```bash\n(for try .*?)```", (ROOT / "docs" / "faults.md").read_text(encoding="utf-8"), re.DOTALL)[1]


def test_a_run_comes_to_its_end_though_a_rank_failed_and_a_rank_died(tiny, tmp_path):
    loop = re.sub(r"deepspeed .* --resume auto", '"$@" --resume auto', LOOP).replace("sleep 60", "sleep 1")
    run = FaultyRun(
        tmp_path / "run", tiny, lambda program, words: ["bash", "-c", loop, "bash", *by_deepspeed(program, words)]
    )
    ended = run.run(Fault("train", 3, rank=1, signal="error"), Fault("generate", 4, rank=1, signal="SIGKILL"))
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("Traceback") == 1 and "rank 1: Traceback" in ended.stderr
    assert ended.stderr.count("ArithmeticError: made up") == 1
    died = [line for line in ended.stderr.splitlines() if "has died" in line]
    assert len(died) == 1 and died[0].startswith("rank 1 (process ")
    assert "in phase generate of step 4 (since " in died[0]
    assert [line["step"] for line in metric_lines(run.out)] == list(range(STEPS + 1))
    assert (run.out / "actor" / "model.safetensors").is_file()
    assert run.processes() == []


def test_memory_that_runs_out_on_one_rank_ends_the_run_with_the_flags_that_help(tiny, tmp_path):
    run = FaultyRun(tmp_path / "run", tiny, by_deepspeed)
    ended = run.run(Fault("train", 2, rank=1, signal="memory"))
    assert ended.code == 1 and "Traceback" not in ended.stderr, ended.stderr
    told = f"stopped: CUDA out of memory on rank 1, in the phase train. Give {LESS_MEMORY['train']}."
    assert ended.stderr.count("stopped: ") == ended.stderr.count(told) == 1, ended.stderr
    assert [line["step"] for line in metric_lines(run.out)] == [0, 1]
    assert run.processes() == []


def test_the_loop_ends_where_trying_again_is_of_no_use():
    for code, tries in ((0, 1), (2, 1), (75, 1), (130, 1), (143, 1), (1, 5), (137, 5)):
        loop = re.sub(r"deepspeed .* --resume auto", f"echo tried; (exit {code})", LOOP).replace("sleep 60", "true")
        ended = subprocess.run(["bash", "-c", loop], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout.split()) == (code, ["tried"] * tries)
