"""Step 3 on two hosts, which are network namespaces of this machine, healthy and with a fault on one host.

    python scripts/trial_two_hosts.py                                      all of it, half an hour on two CPU cores
    python scripts/trial_two_hosts.py --launchers torchrun --only healthy  some
    python scripts/trial_two_hosts.py --only "link cut" --keep FOLDER      one fault, and what each host printed

By `deepspeed --hostfile`, torchrun and a stand-in of SLURM; with one output folder for both hosts, and with one for
each. The faults are there from the start, or come in the middle of a step. Prints a line for each run as it ends. Exit
code 1 if one is not as it should be, or cannot be tried. Needs Linux with root (or user namespaces, then without
deepspeed, whose sshd needs root), iproute2, util-linux, openssh-server and pdsh.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project

from safetensors.torch import load_file

from scripts.harness import ROOT, step3_rlhf
from scripts.harness.faults import STEPS
from scripts.harness.host_launches import Ended, Launched, launch
from scripts.harness.hosts import TwoHosts
from scripts.harness.programs import Tiny, begun, by_torchrun, command_line, differences

LAUNCHERS = ("deepspeed", "torchrun", "slurm")
HEALTHY, SEPARATE = "healthy", "separate disks"
DISK = 64 << 20  # bytes of a host's own file system
SETTINGS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
PROGRAM = ROOT / "training" / "step3_rlhf.py"
LIMIT = 900.0  # seconds of a whole run, on a machine that may be slow
REFUSED_WITHIN = 400.0  # seconds, 35 of them a rank looks for rank 0's file
POINT = f"step_{STEPS:06d}"
WATCHED = Path(step3_rlhf.__file__)
FAULTY = "node-b"
WITHIN = 60.0  # seconds until all has ended
OTHER = "0.16.1"  # no version of deepspeed that is admitted
FULL = ("-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "tmpfs")  # has no room for a file
EMPTY = ("-t", "tmpfs", "tmpfs")
EXTENSION = "ShareMemCommBuilder"  # which CPUs can build, in the place of those for GPUs' offloading


def main() -> int:
    """Try all that is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launchers", choices=LAUNCHERS, nargs="+", default=LAUNCHERS, help="by default all")
    known = (HEALTHY, SEPARATE, *FAULTS)
    parser.add_argument("--only", choices=known, nargs="+", default=known, help="some of the rows", metavar="ROW")
    parser.add_argument("--keep", type=Path, help="a folder, not there yet, for what the runs write and print")
    options = parser.parse_args()
    if reason := TwoHosts.refusal():
        print(f"no two hosts on this machine: {reason}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "trial"
        for name in ("own", "tmp", "cache"):
            (folder / name).mkdir(parents=True)
        os.environ |= {**SETTINGS, "TMPDIR": str(folder / "tmp"), "XDG_CACHE_HOME": str(folder / "cache")}
        bad = 0
        print("| launcher | run | exit code | all gone after | as it should be |")
        print("| --- | --- | --- | --- | --- |", flush=True)
        for launcher, name, code, seconds, wrong in rows(options.launchers, options.only, folder):
            bad += bool(wrong)
            print(f"| {launcher} | {name} | {code} | {seconds:.0f} s | {', '.join(wrong) or 'yes'} |", flush=True)
    print(f"\n{bad} not as they should be" if bad else "\nall as it should be")
    return int(bool(bad))


def rows(launchers: list[str], names: list[str], folder: Path) -> Iterator[tuple[str, str, object, float, list[str]]]:
    """Each run's launcher, name, exit code, seconds and what is wrong with it."""
    tiny, one = Tiny(folder / "tiny"), folder / "one"
    began = time.monotonic()
    on_one_host(tiny, one)
    alone = time.monotonic() - began
    with TwoHosts(separate_disks={str(folder / "own"): DISK}) as hosts:
        for launcher in launchers:
            if launcher == "deepspeed" and (reason := TwoHosts.ssh_refusal()):
                yield launcher, "all", "-", 0.0, [f"not tried: {reason}"]
                continue
            for name in names:
                place, began = folder / f"{launcher}_{name.replace(' ', '_')}", time.monotonic()
                if name in FAULTS:
                    case = Case(hosts, tiny, place)
                    ended, wrong = tried(FAULTS[name], launcher, case, start_seconds=2 * alone)
                    yield launcher, name, ended.code, ended.seconds or float("nan"), wrong
                elif name == HEALTHY:
                    wrong = shared(hosts, launcher, tiny, place, one)
                    yield launcher, f"{name}, gone on with, exported", "-", time.monotonic() - began, wrong
                else:
                    wrong = separate(hosts, launcher, tiny, folder / "own", place)
                    yield launcher, name, "-", time.monotonic() - began, wrong


def words(tiny: Tiny, out: Path, **changes) -> list[str]:
    """The flags of a run of four steps with a checkpoint after the second and the fourth."""
    flags = {"output_dir": out, "max_steps": STEPS, "actor_zero_stage": 3, "critic_zero_stage": 3, "save_steps": 2}
    return command_line(tiny.flags(3, **flags | changes))


def on_one_host(tiny: Tiny, out: Path) -> None:
    """The same run with both ranks on this machine; raises RuntimeError where it does not come to its end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = begun(by_torchrun(PROGRAM, words(tiny, out)), 2, cwd=ROOT, **pipes)
    printed = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"the run on one host has failed:\n{printed}")


def shared(hosts: TwoHosts, launcher: str, tiny: Tiny, folder: Path, one: Path, resume: bool = True) -> list[str]:
    """What is wrong with a run in a folder that both hosts see, beside the folder of the run on one host: its numbers,
    its models, its checkpoint as it is exported, and the run that goes on from the checkpoint before."""
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
            wrong.append("no word of the checkpoint it went on from")
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
    """What is wrong with the last checkpoint's actor as a Hugging Face folder, beside the actor that was saved."""
    point = out / "checkpoints" / POINT
    argv = [sys.executable, "-m", "training.tools.export", str(point), str(folder)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        return [f"the checkpoint cannot be exported: {ended.stderr}"]
    return ["the exported actor differs from the saved one"] * (not same_weights(folder, out / "actor"))


def same_weights(one: Path, other: Path) -> bool:
    """Whether two models' folders hold the same tensors to the last bit."""
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


@dataclass(frozen=True)
class Case:
    """A run with a fault, on its way to a row of the table.

    hosts, tiny: what it runs on. folder: of its own; out: its output folder.
    """

    hosts: TwoHosts
    tiny: Tiny
    folder: Path

    @property
    def out(self) -> Path:
        """The output folder, which both hosts see."""
        return self.folder / "out"


@contextlib.contextmanager
def mounted(case: Case, place: Path, *how: str) -> Iterator[None]:
    """Something else is seen in this place on the faulty host."""
    if case.hosts.start(FAULTY, ["mount", *how, str(place)]).wait():
        raise RuntimeError(f"nothing can be mounted over {place}")
    try:
        yield
    finally:
        case.hosts.start(FAULTY, ["umount", "--lazy", str(place)]).wait()


@contextlib.contextmanager
def replaced(case: Case, texts: Mapping[Path, str]) -> Iterator[None]:
    """Files with other texts on the faulty host."""
    with contextlib.ExitStack() as stack:
        for number, (place, text) in enumerate(texts.items()):
            other = case.folder / f"other{number}"
            other.write_text(text)
            stack.enter_context(mounted(case, place, "--bind", str(other)))
        yield


@contextlib.contextmanager
def link_cut(case: Case) -> Iterator[None]:
    """No packet comes through, and nobody is told."""
    case.hosts.cut()
    try:
        yield
    finally:
        case.hosts.mend()


@contextlib.contextmanager
def disk_full(case: Case) -> Iterator[None]:
    """The rank of the faulty host can write no more: the kernel lets none of its files grow."""
    for pid in case.hosts.processes(FAULTY):
        with contextlib.suppress(OSError):
            if WATCHED.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0--", 1)[0]:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (512, 512))
    yield


@contextlib.contextmanager
def caches_full(case: Case) -> Iterator[None]:
    """The faulty host's disk of temporary files and of caches has no room."""
    with mounted(case, Path(os.environ["TMPDIR"]), *FULL), mounted(case, Path(os.environ["XDG_CACHE_HOME"]), *FULL):
        yield


def without_model(case: Case) -> contextlib.AbstractContextManager:
    """The faulty host lacks the actor's files."""
    return mounted(case, case.tiny.folder / "sft", *EMPTY)


def other_deepspeed(case: Case) -> contextlib.AbstractContextManager:
    """The faulty host has another version of deepspeed, by its own word and by the package's."""
    package, version = (
        Path(importlib.util.find_spec("deepspeed").origin).parent,
        importlib.metadata.version("deepspeed"),
    )
    metadata = next(package.parent.glob("deepspeed-*.dist-info")) / "METADATA"
    told = (package / "git_version_info_installed.py", metadata)
    return replaced(case, {path: path.read_text().replace(version, OTHER) for path in told})


def broken_import(case: Case) -> contextlib.AbstractContextManager:
    """One of the files that the program imports before it begins is an older one on the faulty host."""
    return replaced(case, {ROOT / "engine" / "rlhf_engine.py": "class Engine:\n    pass\n"})


def without_ninja(case: Case) -> contextlib.AbstractContextManager:
    """The faulty host has no program of the name ninja."""
    searched = [*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/usr/local/bin"]
    folders = [Path(sys.executable).parent, *map(Path, searched)]
    return replaced(case, {path.resolve(): "" for folder in folders if (path := folder / "ninja").exists()})


@dataclass(frozen=True)
class Fault:
    """What is wrong with a host, and what comes of it.

    made: brings it about until the block is left. midway: in the middle of step 3, not from the start on. said: parts
    of the message. code: the exit code; 0 where the run comes to its end all the same. extension: what ranks load.
    """

    made: Callable[[Case], contextlib.AbstractContextManager]
    said: tuple[str, ...] = ()
    midway: bool = False
    code: int = 2
    extension: str = ""


FAULTS = {
    "link cut": Fault(link_cut, ("is cut off", "on node-b", "in phase train of step 3"), midway=True, code=1),
    "disk full": Fault(disk_full, ("CHECKPOINT NOT WRITTEN", "on node-b"), midway=True, code=0),
    "caches full": Fault(caches_full, code=0),
    "no ninja": Fault(without_ninja, ("on node-b", "ninja"), extension=EXTENSION),
    "no model": Fault(without_model, ("node-b", "sft")),
    "another deepspeed": Fault(other_deepspeed, ("node-b", "deepspeed", OTHER)),
    "import error": Fault(broken_import, ("on node-b", "ImportError")),
}


def tried(fault: Fault, launcher: str, case: Case, start_seconds: float) -> tuple[Ended, list[str]]:
    """How a run with this fault ended, and what is wrong with that. start_seconds: what a run needs here to begin."""
    case.folder.mkdir(parents=True)
    midway = (step3_rlhf.Fault("train", 3, rank=1, signal=None),) if fault.midway else ()
    watched = step3_rlhf.write_watch(case.folder, midway, extension=fault.extension)
    with contextlib.ExitStack() as stack:
        if not fault.midway:
            stack.enter_context(fault.made(case))
        flags, logs = words(case.tiny, case.out), case.folder / "logs"
        launched = launch(launcher, case.hosts, WATCHED, flags, logs, **watched)
        if fault.midway:
            if not launched.wait_for((case.folder / "fault0").exists):
                return (ended := launched.end(within=0.0)), [f"it did not come to step 3: {last_of(ended.text)}"]
            stack.enter_context(fault.made(case))
        within = LIMIT if fault.code == 0 else WITHIN if fault.midway else WITHIN + start_seconds
        ended = launched.end(within)
    return ended, judged(fault, launcher, ended)


def judged(fault: Fault, launcher: str, ended: Ended) -> list[str]:
    """What is wrong with how a run with a fault ended."""
    wrong = [f"left behind: {', '.join(ended.left)}"] * bool(ended.left)
    expected = min(fault.code, 1) if launcher == "torchrun" else fault.code  # its code is 1 for every other
    if launcher == "deepspeed" and fault.made is link_cut:
        expected = 255  # that of the ssh that has given its host up, which is the largest
    first = ended.codes[TwoHosts.names[0]]
    wrong += [f"exit code {first}, not {expected}"] * (first != expected)
    wrong += ["a stack trace"] * ("Traceback" in ended.text)
    wrong += [f"{part!r} is not said" for part in fault.said if part not in ended.text]
    if fault.code:
        sides = 2 if fault.made is link_cut else 1  # neither can hear what the other says
        wrong += [f"{len(ended.messages)} messages: {ended.messages}"] * (not 1 <= len(ended.messages) <= sides)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
