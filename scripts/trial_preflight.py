"""Preflight's tables for two hosts, which are network namespaces of this machine: healthy, and with one fault each.

    python scripts/trial_preflight.py                        all of them, about ten minutes on two CPU cores
    python scripts/trial_preflight.py --only "no ninja"      some

Prints what --preflight printed, and ends with code 0 only if each fault is named with its host, and nothing is found of
healthy hosts. Needs what scripts/harness/hosts.py needs, and root.
"""

import argparse
import base64
import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, it finds the project

from scripts.harness.host_launches import PORT, ROOT
from scripts.harness.hosts import TwoHosts
from scripts.harness.programs import Tiny, command_line

PROGRAM = ROOT / "training" / "step3_rlhf.py"
A, B = TwoHosts.names
LIMIT = 240.0  # seconds of a preflight on a busy machine
DISK = 4 << 20  # bytes of the full one
OLDER = "0.18.0"


@dataclass(frozen=True)
class Fault:
    """What is wrong with the second host. make: does it, in the host. words: all stand in what the hosts print."""

    make: Callable[[TwoHosts, "Place"], None]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Folders of the trial: models and data, what both hosts share, and the cache."""

    tiny: Tiny
    folder: Path

    @property
    def cache(self) -> Path:
        """Of tokenised data."""
        return self.folder / "cache"

    @property
    def settings(self) -> Path:
        """Of DeepSpeed's files."""
        return self.folder / "settings"


def healthy(hosts: TwoHosts, place: Place) -> None:
    """Nothing."""


def full_disk(hosts: TwoHosts, place: Place) -> None:
    """The second host's own cache is on a disk that is full."""
    inside(hosts, "mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place.cache)
    inside(hosts, "sh", "-c", f"cat /dev/zero > {place.cache}/filled 2> /dev/null; true")


def no_ninja(hosts: TwoHosts, place: Place) -> None:
    """No program of that name can be run."""
    nothing = place.folder / "nothing"
    nothing.touch(mode=0o644)
    folders = [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
    for program in {str((Path(folder) / "ninja").resolve()) for folder in folders if (Path(folder) / "ninja").exists()}:
        inside(hosts, "mount", "--bind", nothing, program)


def no_model(hosts: TwoHosts, place: Place) -> None:
    """An empty folder stands in its place."""
    empty = place.folder / "empty"
    empty.mkdir()
    inside(hosts, "mount", "--bind", empty, place.tiny.folder / "sft")


def other_deepspeed(hosts: TwoHosts, place: Place) -> None:
    """DeepSpeed says that it is of another version, in its metadata and by itself."""
    package = importlib.metadata.distribution("deepspeed")
    version = package.version
    files = [Path(package._path) / "METADATA", Path(package.locate_file("deepspeed/git_version_info_installed.py"))]
    for number, file in enumerate(files):
        changed = place.folder / f"changed_{number}"
        changed.write_text(file.read_text().replace(version, OLDER))
        inside(hosts, "mount", "--bind", changed, file)


def no_transformers(hosts: TwoHosts, place: Place) -> None:
    """The program's imports fail."""
    empty = place.folder / "empty"
    empty.mkdir()
    package = importlib.metadata.distribution("transformers").locate_file("transformers")
    inside(hosts, "mount", "--bind", empty, package)


def no_configuration(hosts: TwoHosts, place: Place) -> None:
    """The DeepSpeed file that a flag names is not there."""
    inside(hosts, "mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", place.settings)


def cut(hosts: TwoHosts, place: Place) -> None:
    """No packet goes from host to host."""
    hosts.cut()


FAULTS = {
    "healthy": Fault(healthy, ("preflight: all 2 nodes are healthy",)),
    "no ninja": Fault(no_ninja, (f"fault: {B}: no ninja", f"preflight: at fault: {B}")),
    "no model": Fault(no_model, (f"fault: {B}: --actor_model_name_or_path", f"preflight: at fault: {B}")),
    "other deepspeed": Fault(other_deepspeed, (f"fault: {B}: has deepspeed {OLDER}", f"preflight: at fault: {B}")),
    "no transformers": Fault(no_transformers, (f"fault: {B}: the program cannot begin: ", f"preflight: at fault: {B}")),
    "no configuration": Fault(no_configuration, (f"fault: {B}: --actor_ds_config", f"preflight: at fault: {B}")),
    "full disk": Fault(full_disk, (f"fault: {B}: nothing can be written to", f"preflight: at fault: {B}")),
    "link cut": Fault(cut, (f"fault: {B}: no answer from rank 1 within", f"preflight: at fault: {B}")),
}


def inside(hosts: TwoHosts, *argv: object) -> None:
    """Run a command in the second host; raises RuntimeError where it fails."""
    process = hosts.start(B, [str(word) for word in argv], stdout=subprocess.PIPE, text=True)
    told, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{argv}: {told}")


def preflight(hosts: TwoHosts, place: Place) -> dict[str, tuple[int, str]]:
    """The exit code and what was printed, by host. The hosts' launchers are started as DeepSpeed's runner does by ssh,
    for which a link that is cut is no use."""
    settings = place.settings / "zero3.json"
    flags = {"actor_ds_config": settings, "critic_zero_stage": 3, "output_dir": place.folder / "out", "preflight": True}
    words = command_line(place.tiny.flags(3, **flags, data_output_path=place.cache))
    world = base64.urlsafe_b64encode(json.dumps({name: [0] for name in hosts.names}).encode()).decode()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    processes = {}
    for number, name in enumerate(hosts.names):
        launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}"]
        where = [f"--node_rank={number}", f"--master_addr={hosts.address(A)}", f"--master_port={PORT}"]
        environment |= {"HF_HUB_OFFLINE": "1"}
        processes[name] = hosts.start(
            name,
            [*launcher, *where, str(PROGRAM), *words],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
    outcome = {}
    for name, process in processes.items():
        told, _ = process.communicate(timeout=LIMIT)
        outcome[name] = process.returncode, "\n".join(line for line in told.splitlines() if "launch.py:" not in line)
    return outcome


def trial(name: str, place: Place) -> list[str]:
    """Run one case and print its tables; returns what is wrong with them."""
    fault = FAULTS[name]
    with TwoHosts() as hosts:
        fault.make(hosts, place)
        outcome = preflight(hosts, place)
    for host, (code, told) in outcome.items():
        if told.strip():
            print(f"--- {name}: printed on {host}, exit code {code}\n{told}\n", flush=True)
    first, wanted = outcome[A], 0 if name == "healthy" else 2
    printed = "\n".join(told for _, told in outcome.values())
    wrong = [f"not said: {words}" for words in fault.words if words not in printed]
    wrong += [f"fault: {line}" for line in first[1].splitlines() if wanted == 0 and line.startswith("fault")]
    wrong += [f"exit code {code} on {host}, not {wanted}" for host, (code, _) in outcome.items() if code != wanted]
    return wrong + [f"a stack trace on {host}" for host, (_, told) in outcome.items() if "Traceback" in told]


@contextlib.contextmanager
def places() -> Iterator[Path]:
    """A folder for a case."""
    folder = Path(tempfile.mkdtemp(prefix="trial_preflight_"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns 0 if all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), help="cases")
    names = parser.parse_args(argv).only
    if reason := TwoHosts.refusal():
        print(f"not tried: {reason}")
        return 2
    wrong = {}
    for name in names:
        with places() as folder:
            place = Place(Tiny(folder / "models"), folder)
            for made in (place.cache, place.settings):
                made.mkdir()
            shutil.copy(ROOT / "configs" / "ds" / "zero3.json", place.settings)
            wrong[name] = trial(name, place)
    for name, found in wrong.items():
        print(f"{name:<16} {'; '.join(found) or 'as it should be'}")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
