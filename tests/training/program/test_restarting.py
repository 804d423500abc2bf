"""What stands before a command and runs it again: when, how often, and who ends with whom."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path

here = Path(__file__).parent
starts = here / "starts.jsonl"
with starts.open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
number = len(starts.read_text().splitlines())
what = json.loads((here / "plan.json").read_text())[number - 1]
if "point" in what:
    point = here / "out" / "checkpoints" / f"step_{number:06d}"
    point.mkdir(parents=True)
    if what["point"] == "whole":
        (point / "manifest.json").write_text("{}")
if "wait" in what:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    (here / "waits").write_text(str(os.getpid()))
    time.sleep(600)
if "signal" in what:
    os.kill(os.getpid(), getattr(signal, what["signal"]))
sys.exit(what["code"])
"""


@pytest.fixture
def start(tmp_path):
    """Starts a program that does in each start what the plan says; returns the process."""

    def started(plan: list[dict], restarts: int = 1, flags: tuple = ()) -> subprocess.Popen:
        (tmp_path / "step3_rlhf.py").write_text(PROGRAM)
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        given = ["--max_restarts", str(restarts), sys.executable, str(tmp_path / "step3_rlhf.py")]
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "training.program.restarting",
                *given,
                "--output_dir",
                str(tmp_path / "out"),
                *flags,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


def starts(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "plan, restarts, code, number, said",
    [
        ([{"code": 0}], 1, 0, 1, None),
        ([{"code": 2}], 1, 2, 1, None),
        ([{"code": 75}], 1, 75, 1, None),
        ([{"code": 1}, {"code": 0}], 1, 0, 2, "exit code 1; restart 1 of 1, from the beginning"),
        ([{"code": 1}, {"code": 1}], 1, 1, 2, "after 1 restarts without a new restart point"),
        ([{"signal": "SIGKILL"}, {"code": 0}], 1, 0, 2, "exit code 137 (SIGKILL)"),
        # A new point each time: the count begins anew. One that was not finished does not count.
        ([{"code": 1, "point": "whole"}, {"code": 1, "point": "whole"}, {"code": 0}], 1, 0, 3, "step_000002"),
        ([{"code": 1, "point": "part"}, {"code": 1, "point": "part"}], 1, 1, 2, "from the beginning"),
        ([{"code": 1}], 0, 1, 1, "after 0 restarts"),
    ],
)
def test_a_command_is_run_again_after_it_died(tmp_path, start, plan, restarts, code, number, said):
    process = start(plan, restarts)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == code, stderr
    flags = ["--resume", "auto", "--output_dir", str(tmp_path / "out")]
    assert starts(tmp_path) == [flags] * number
    assert (said or "") in stderr
    assert bool(stderr) == bool(said)


@pytest.mark.parametrize("asked", [signal.SIGUSR1, signal.SIGKILL])
def test_it_passes_signals_on_and_takes_the_command_along(tmp_path, start, asked):
    process = start([{"wait": 1, "code": 1}, {"code": 0}])
    waits = tmp_path / "waits"
    soon(lambda: waits.exists() and waits.read_text())
    child = psutil.Process(int(waits.read_text()))
    process.send_signal(asked)
    process.communicate(timeout=120)
    assert process.returncode == (75 if asked == signal.SIGUSR1 else -9)
    soon(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert len(starts(tmp_path)) == 1


@pytest.mark.parametrize(
    "words, said",
    [
        (["deepspeed", "training/step3_rlhf.py"], "no --max_restarts"),
        (["--max_restarts", "x", "deepspeed", "training/step3_rlhf.py"], "--max_restarts x: give a whole number"),
        (["--max_restarts", "1", "deepspeed", "other.py"], "no program in 'deepspeed other.py'"),
        (["--max_restarts=1", "deepspeed", "step3_rlhf.py"], "no --output_dir"),
        (["--max_restarts=1", "deepspeed", "step3_rlhf.py", "--resume", "out", "--output_dir", "out"], "Leave it out"),
    ],
)
def test_mistakes_are_told(words, said, capsys):
    from training.program.restarting import main

    assert main(words) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("error: ") and said in stderr and stderr.count("\n") == 1


def soon(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
