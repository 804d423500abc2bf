"""Runs that are asked to end: what is saved, how they end, and that they go on as if nothing had been."""

import json
import os
import signal as signals
import time
from pathlib import Path

import psutil
import pytest

from scripts.harness.programs import (
    begin,
    differences,
    forked,
    launch,
    metric_lines,
    run_here,
)

FUNCTION = """
import json, os, signal, sys, time
from pathlib import Path
import psutil

calls = -1


def score(prompts, responses):
    global calls
    calls += 1
    file = Path(__file__).with_name("plan.json")
    if file.exists():
        plan = json.loads(file.read_text())
        if calls == plan["call"] and int(os.environ.get("RANK", 0)) == plan["rank"]:
            file.rename(file.with_name("plan_done.json"))
            if plan["signal"] == "exit":
                sys.exit(0)
            target = next(
                process for process in [psutil.Process(), *psutil.Process().parents()]
                if plan["to"] in " ".join(process.cmdline()[:4]) or plan["to"] == "self"
            )
            target.send_signal(getattr(signal, plan["signal"]))
            if plan["to"] != "self":
                time.sleep(5)  # until the ranks have noticed: steps are short here
    return [len(set(response.split())) for response in responses]
"""


def asking_function(folder: Path, call: int, signal: str, to: str = "self", rank: int = 0) -> str:
    """Write the function and when it asks; returns what --reward_function is given.

    signal: its name, or "exit" for sys.exit(0). to: "self", or a part of a launcher's command.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"asking_{folder.name}.py"  # a process imports a name once
    file.write_text(FUNCTION)
    (folder / "plan.json").write_text(json.dumps({"call": call, "rank": rank, "signal": signal, "to": to}))
    return f"{file}:score"


STEPS = 3


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """The output folder of a run that nobody asked."""
    folder = tmp_path_factory.mktemp("whole")
    flags = run_flags(tiny, folder, call=99, signal="SIGUSR1")
    assert forked(3, flags, ranks=1).code == 0
    return folder / "out"


def run_flags(tiny, folder, **plan) -> dict:
    return tiny.flags(
        3,
        output_dir=folder / "out",
        max_steps=STEPS,
        num_eval_prompts=4,
        reward_function=asking_function(folder, **plan),
    )


def assert_same_run(one, other):
    """The same numbers in each line, the same models and samples."""
    assert [line["step"] for line in metric_lines(one)] == list(range(STEPS + 1))
    assert differences(one, other) == []


@pytest.fixture
def interruptible():
    """Ctrl-C reaches this process, also where the tests run behind a shell's &, which has it ignored."""
    before = signals.signal(signals.SIGINT, signals.default_int_handler)
    yield
    signals.signal(signals.SIGINT, before)


# Calls of the reward function: 0 before the first step, 1 to 3 in the steps, 4 in the last evaluation.
@pytest.mark.parametrize("signal, call, step", [("SIGUSR1", 2, 2), ("SIGTERM", 3, 3), ("SIGINT", 1, 1)])
@pytest.mark.usefixtures("interruptible")
def test_a_run_that_is_asked_ends_after_its_step_and_goes_on(tiny, tmp_path, whole, capfd, signal, call, step):
    flags = run_flags(tiny, tmp_path, call=call, signal=signal)
    result = run_here(3, flags, capfd)
    assert result.code == 75, result.stderr
    assert f"ended early after step {step} of {STEPS}, saved in {tmp_path}/out/checkpoints/step_{step:06d}" in (
        result.stderr
    )
    assert f"--resume {tmp_path}/out." in result.stderr
    assert not (tmp_path / "out" / "actor").exists() or step == STEPS
    again = {**flags, "resume": "auto", "profile_steps": 1}  # which is done by now, but in the command as before
    assert run_here(3, again, capfd).code == 0
    assert_same_run(whole, tmp_path / "out")


def test_before_the_first_step_it_ends_at_once(tiny, tmp_path):
    result = forked(3, run_flags(tiny, tmp_path, call=0, signal="SIGTERM"), ranks=1)
    assert result.code == 75, result.stderr
    assert "ended before the first step; there was nothing to save" in result.stderr
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_what_calls_exit_in_a_run_is_a_failure(tiny, tmp_path, capfd):
    result = run_here(3, run_flags(tiny, tmp_path, call=2, signal="exit"), capfd)
    assert result.code == 1
    assert result.stderr.count("SystemExit") == 1 and "asking_" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("signal", ["SIGKILL"])
def test_ranks_whose_launcher_has_gone_save_and_end(tiny, tmp_path, signal):
    flags = {**run_flags(tiny, tmp_path, call=2, signal=signal, to="deepspeed "), "num_eval_prompts": 8}
    result = launch(3, flags)
    assert result.code == -9
    waited_for(lambda: not ranks_of(tmp_path))
    assert (tmp_path / "out" / "checkpoints" / "step_000002").is_dir()
    assert not (tmp_path / "out" / "actor").exists()


@pytest.mark.usefixtures("interruptible")
def test_at_ctrl_c_a_launched_run_speaks_before_its_launcher_and_after_it(tiny, tmp_path):
    out, log, metrics = tmp_path / "out", tmp_path / "log", tmp_path / "out" / "metrics.jsonl"
    launcher = begin(3, tiny.flags(3, output_dir=out, max_steps=10**5, num_eval_prompts=0), log)
    waited_for(lambda: metrics.exists() and metrics.stat().st_size, 300)  # the first step is done
    os.killpg(launcher.pid, signals.SIGINT)  # as a terminal does
    assert launcher.wait(300) in (-signals.SIGINT, 130)
    waited_for(lambda: not ranks_of(tmp_path))
    said = log.read_text()
    at_once, trace, last = (
        said.index(words)
        for words in (
            "Ctrl-C (SIGINT): the run finishes its step and saves; a launcher may give the prompt back before.",
            "KeyboardInterrupt",  # the launcher's
            "Ctrl-C (SIGINT): ended early after step ",
        )
    )
    assert at_once < trace and at_once < last
    assert f"Go on with --resume {out}." in said[last:]


def ranks_of(folder) -> list[int]:
    """The processes that name this folder on their command lines."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in " ".join(process.info["cmdline"] or [])
    ]


def waited_for(condition, seconds: float = 120.0) -> None:
    """Return when the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.5)
