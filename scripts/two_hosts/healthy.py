"""Step 3 on two healthy hosts: by each launcher, with one output folder for both and with one for each."""

import shutil
import subprocess
import sys
from pathlib import Path

from scripts.two_hosts.hosts import TwoHosts
from scripts.two_hosts.launches import ROOT, Launched, launch
from tests.e2e.faults import STEPS, differences
from tests.e2e.programs import Tiny, command_line
from tests.ports import free_port

PROGRAM = ROOT / "training" / "step3_rlhf.py"
LIMIT = 900.0  # seconds of a whole run, on a machine that may be slow
REFUSED_WITHIN = 400.0  # seconds, 35 of them a rank looks for rank 0's file
POINT = f"step_{STEPS:06d}"


def words(tiny: Tiny, out: Path, **changes) -> list[str]:
    """The flags of a run of four steps with a restart point after the second and the fourth."""
    flags = {"output_dir": out, "max_steps": STEPS, "actor_zero_stage": 3, "critic_zero_stage": 3, "save_steps": 2}
    return command_line(tiny.flags(3, **flags | changes))


def on_one_host(tiny: Tiny, out: Path) -> None:
    """The same run with both ranks on this machine; raises RuntimeError where it does not come to its end."""
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc_per_node",
        "2",
        "--master_port",
        str(free_port()),
    ]
    ended = subprocess.run([*torchrun, str(PROGRAM), *words(tiny, out)], cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"the run on one host has failed:\n{ended.stdout}{ended.stderr}")


def shared(hosts: TwoHosts, launcher: str, tiny: Tiny, folder: Path, one: Path, resume: bool = True) -> list[str]:
    """What is wrong with a run in a folder that both hosts see, beside the folder of the run on one host: its numbers,
    its models, its restart point as it is exported, and the run that goes on from the point before."""
    out = folder / "out"
    wrong = _come_to_its_end(launch(launcher, hosts, PROGRAM, words(tiny, out), folder / "whole"))
    if wrong:
        return wrong
    wrong += [f"{what} differs from one host's" for what in differences(one, out)]
    wrong += exported(out, folder / "exported")
    if resume:
        shutil.rmtree(out / "checkpoints" / POINT)
        for model in ("actor", "critic"):
            shutil.rmtree(out / model)
        more = [] if launcher == "slurm" else ["--resume", "auto"]  # slurm.sh adds it
        wrong += _come_to_its_end(launch(launcher, hosts, PROGRAM, [*words(tiny, out), *more], folder / "resumed"))
        wrong += [f"{what} differs where it went on" for what in differences(one, out)]
        if f"{POINT[:-1]}2" not in (folder / "resumed" / f"{hosts.names[0]}.log").read_text():
            wrong.append("no word of the point it went on from")
    return wrong


def separate(hosts: TwoHosts, launcher: str, tiny: Tiny, own: Path, folder: Path) -> list[str]:
    """What is wrong with how a run ends whose output folder is another one on each host."""
    launched = launch(launcher, hosts, PROGRAM, words(tiny, own / f"out_{launcher}"), folder)
    ended = launched.end(within=REFUSED_WITHIN)
    wrong = [f"left behind: {', '.join(ended.left)}"] * bool(ended.left)
    wrong += [f"exit code {ended.code}"] * (ended.code != (1 if launcher == "torchrun" else 2))
    wrong += ["a stack trace"] * ("Traceback" in ended.text)
    expected = ("is not one folder for all ranks", "node-b (rank 1)")
    told = [line for line in ended.messages if all(part in line for part in expected)]
    return wrong + [f"it said: {ended.messages}"] * (len(told) != 1 or len(ended.messages) != 1)


def exported(out: Path, folder: Path) -> list[str]:
    """What is wrong with the last restart point's actor as a Hugging Face folder, beside the actor that was saved."""
    point = out / "checkpoints" / POINT
    argv = [sys.executable, "-m", "training.restarts.export", str(point), str(folder)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        return [f"the restart point cannot be exported: {ended.stderr}"]
    return ["the exported actor differs from the saved one"] * (not same_weights(folder, out / "actor"))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two models' folders hold the same tensors to the last bit."""
    from safetensors.torch import load_file

    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def _come_to_its_end(launched: Launched) -> list[str]:
    ended = launched.end(within=LIMIT)
    if ended.left:
        return [f"not at its end after {LIMIT:g} s: {', '.join(ended.left)}"]
    return [f"exit code {ended.code}, it said: {last_of(ended.text)}"] * bool(ended.code)


def last_of(text: str) -> str:
    """The last three lines of what was printed, as one."""
    return " / ".join(text.strip().splitlines()[-3:])
