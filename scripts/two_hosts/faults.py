"""Step 3 on two hosts of which one has a fault, from the start or from the middle of a step on."""

import contextlib
import importlib.metadata
import importlib.util
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.two_hosts.healthy import LIMIT, last_of, words
from scripts.two_hosts.hosts import TwoHosts
from scripts.two_hosts.launches import ROOT, Ended, launch
from tests.e2e.programs import Tiny

FAULTY = "node-b"
WITHIN = 60.0  # seconds until all has ended
OTHER = "0.16.1"  # no version of deepspeed that is admitted
FULL = ("-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "tmpfs")  # has no room for a file
EMPTY = ("-t", "tmpfs", "tmpfs")
RANKS_PROGRAM = """
import sys, time
from pathlib import Path

sys.path.insert(0, ROOT)
import training.program.import_errors
from engine.zero.extensions import load_extension
from training.program import phases

enter = phases.Place.enter


def announce(place, phase):
    enter(place, phase)
    if phase == "train" and place.step == 3:
        (Path(__file__).parent / "reached").touch()
        time.sleep(3)  # in the middle of the step, for what now happens
    if phase == "loading models" and EXTENSION:
        load_extension(EXTENSION)


phases.Place.enter = announce
from training import step3_rlhf

if __name__ == "__main__":
    step3_rlhf.program()
"""
EXTENSION = "ShareMemCommBuilder"  # which CPUs can build, in the place of those for GPUs' offloading


@dataclass(frozen=True)
class Case:
    """A run with a fault, on its way to a row of the table.

    hosts, tiny: what it runs on. folder: of its own; out: its output folder.
    """

    hosts: TwoHosts
    tiny: Tiny
    folder: Path

    @property
    def program(self) -> Path:
        """Step 3 that says where it is."""
        return self.folder / "step3_rlhf.py"

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
            if case.program.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0--", 1)[0]:
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
    "disk full": Fault(disk_full, ("RESTART POINT NOT WRITTEN", "on node-b"), midway=True, code=0),
    "caches full": Fault(caches_full, code=0),
    "no ninja": Fault(without_ninja, ("on node-b", "ninja"), extension=EXTENSION),
    "no model": Fault(without_model, ("on node-b", "sft")),
    "another deepspeed": Fault(other_deepspeed, ("node-b", "deepspeed", OTHER)),
    "import error": Fault(broken_import, ("on node-b", "ImportError")),
}


def tried(fault: Fault, launcher: str, case: Case, start_seconds: float) -> tuple[Ended, list[str]]:
    """How a run with this fault ended, and what is wrong with that. start_seconds: what a run needs here to begin."""
    case.folder.mkdir(parents=True)
    text = RANKS_PROGRAM.replace("ROOT", repr(str(ROOT))).replace("EXTENSION", repr(fault.extension))
    case.program.write_text(text)
    with contextlib.ExitStack() as stack:
        if not fault.midway:
            stack.enter_context(fault.made(case))
        launched = launch(launcher, case.hosts, case.program, words(case.tiny, case.out), case.folder / "logs")
        if fault.midway:
            if not launched.wait_for((case.folder / "reached").exists):
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
