"""What happens to a run of two ranks under ZeRO-3 when something happens to one of its processes; prints two tables.

    python scripts/trial_faults.py                  # all of it, about 20 minutes on two cores
    python scripts/trial_faults.py --only cut

The first table: a rank is killed, stopped, or cut off (its network namespace loses its link; this needs root and `ip`).
All processes have to be gone, and the rank and its phase named, within 60 s, or 90 s where it is stopped. The second:
TERM in each phase, under deepspeed and torchrun. In both, what goes on has to be the same to the last bit as a run that
nothing happened to, and nothing may be left in /dev/shm. Exit code 1 if anything is otherwise.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project

from scripts.harness import free_port
from scripts.harness.faults import Ended, FaultyRun
from scripts.harness.programs import Tiny, by_deepspeed, by_torchrun, differences
from scripts.harness.step3_rlhf import Fault

PLACES = {
    "generation": ("generate", 3),
    "experience": ("make_experience", 3),
    "training": ("train", 3),
    "writing a checkpoint": ("writing a checkpoint", 2),
    "last evaluation": ("evaluating", 4),
}
HOSTS = ("10.213.7.1", "10.213.7.2")


class Trial:
    """A folder for all runs, the run that nothing happened to, and the lines of the tables."""

    def __init__(self, folder: Path):
        self.folder, self.failed = folder, []
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        self.tiny = Tiny(folder / "tiny")
        self.whole = self.run("whole", by_deepspeed)
        assert self.whole.run().code == 0, (self.whole.folder / "stderr").read_text()

    def run(self, name: str, launcher: Callable[[str, list[str]], list[str]]) -> FaultyRun:
        """A run in a folder of its own."""
        return FaultyRun(self.folder / name.replace(" ", "_"), self.tiny, launcher)

    def row(self, cells: list, wrong: list[str]) -> None:
        """Print a line of a table."""
        self.failed += wrong
        print("| " + " | ".join(map(str, [*cells, ", ".join(wrong) or "yes"])) + " |", flush=True)

    def gone_on(self, run: FaultyRun, shared: set[str]) -> list[str]:
        """What is wrong with the run after it was resumed, and with /dev/shm."""
        wrong = []
        if run.run(more=["--resume", "auto"]).code != 0:
            wrong.append("does not go on")
        wrong += [f"{name} differs" for name in differences(self.whole.out, run.out)]
        return wrong + [f"/dev/shm/{name} is left" for name in sorted(shared_memory() - shared)]


def main() -> int:
    """Run the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("killed", "cut", "asked"), nargs="+", help="some of the trials")
    options = parser.parse_args()
    chosen = options.only or ["killed", "cut", "asked"]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        if {"killed", "cut"} & set(chosen):
            print("| what happens | to | in | code | all gone after | it said | as it should be |")
            print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
        for name, trials in (("killed", killed), ("cut", cut), ("asked", asked)):
            if name in chosen:
                trials(trial)
        print(f"\n{len(trial.failed)} wrong" if trial.failed else "\nall as it should be")
        return bool(trial.failed)


def killed(trial: Trial) -> None:
    """One rank killed or stopped."""
    for signal, rank, phase, limit in (
        ("SIGKILL", 1, "generate", 60),
        ("SIGKILL", 1, "train", 60),
        ("SIGKILL", 0, "train", 60),
        ("SIGSTOP", 1, "generate", 90),
        ("SIGSTOP", 0, "train", 90),
    ):
        run = trial.run(f"{signal} {rank} {phase}", by_deepspeed)
        shared = shared_memory()
        ended = run.run(Fault(phase, 3, rank, signal))
        wrong = judged(ended, limit, f"rank {rank} ", f"in phase {phase} of step 3")
        wrong += trial.gone_on(run, shared)
        trial.row([signal, f"rank {rank}", phase, ended.code, seconds(ended), said(ended)], wrong)


def cut(trial: Trial) -> None:
    """One rank cut off: two network namespaces, and a link between them that goes down."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("| cut off | | | | | skipped: it needs root and `ip` | |")
        return
    names = [f"trial{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
        for name, host in zip(names, HOSTS):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", "veth0")
            for device in ("lo", "veth0"):
                ip("-n", name, "link", "set", device, "up")
        _cut(trial, names)
    except subprocess.CalledProcessError as error:
        print(f"| cut off | | | | | skipped: {error.stderr.strip()} | |")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _cut(trial: Trial, names: list[str]) -> None:
    run = trial.run("cut", lambda program, words: [sys.executable, program, *words])
    shared = shared_memory()
    fault, port = Fault("train", 3, 1, signal=None), str(free_port())
    ranks = [
        run.start(
            fault,
            command=["ip", "netns", "exec", name, *run.command],
            RANK=str(rank),
            LOCAL_RANK="0",
            WORLD_SIZE="2",
            LOCAL_SIZE="1",
            MASTER_ADDR=HOSTS[0],
            MASTER_PORT=port,
            GLOO_SOCKET_IFNAME="veth0",
        )
        for rank, name in enumerate(names)
    ]
    while not (run.folder / "fault0").exists():
        if any(rank.poll() is not None for rank in ranks):
            break
        time.sleep(0.1)
    ip("-n", names[1], "link", "set", "veth0", "down")
    other = ranks[1].wait(300)
    ended = run.ended(ranks[0])
    wrong = judged(ended, 60, "rank 1 ", "is cut off", "in phase train of step 3")
    codes = f"{ended.code} and {other}"
    trial.row(["link down", "rank 1", "train", codes, seconds(ended), said(ended)], wrong + ["code 0"] * (other == 0))
    trial.failed += trial.gone_on(trial.run("cut", by_deepspeed), shared)


def asked(trial: Trial) -> None:
    """TERM in each phase."""
    print("\n| TERM to | in | code | all gone after | checkpoints | goes on bit for bit |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    some = ("training", "last evaluation")
    ways = {
        "deepspeed": (by_deepspeed, "SIGTERM", 2, PLACES),
        "torchrun": (by_torchrun, "SIGTERM", 1, PLACES),
        "deepspeed's launcher of the node": (by_deepspeed, "SIGTERM", 1, some),
        "rank 0 (USR1) under deepspeed": (by_deepspeed, "SIGUSR1", 0, some),
        "rank 0 (USR1) under torchrun": (by_torchrun, "SIGUSR1", 0, some),
    }
    for way, (launcher, signal, up, places) in ways.items():
        for place in places:
            phase, step = PLACES[place]
            run = trial.run(f"{way} {place}", launcher)
            shared = shared_memory()
            ended = run.run(Fault(phase, step, 0, signal, up))
            points = run.points()
            done = signal == "SIGUSR1" and place == "last evaluation"  # nothing is left to do
            wrong = [f"code {ended.code}"] * ((ended.code == 0) != done) + ["late"] * (ended.seconds > 30)
            expected = f"step_{step:06d}"
            wrong += [f"no point of step {step}"] * (expected not in points)
            wrong += trial.gone_on(run, shared)
            trial.row([way, place, ended.code, seconds(ended), ", ".join(points)], wrong)


def judged(ended: Ended, limit: float, *words: str) -> list[str]:
    """What is wrong with how a run ended."""
    wrong = [f"{word!r} is not said" for word in words if word not in ended.stderr]
    return wrong + ["code 0"] * (ended.code == 0) + [f"over {limit} s"] * (ended.seconds > limit)


def said(ended: Ended) -> str:
    """The line that says why all end."""
    return next((line for line in ended.stderr.splitlines() if line.endswith("the run ends.")), "nothing")


def seconds(ended: Ended) -> str:
    """For the table."""
    return f"{ended.seconds:.0f} s"


def shared_memory() -> set[str]:
    """What stands in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def ip(*words: str) -> None:
    """Call ip; raises CalledProcessError."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
