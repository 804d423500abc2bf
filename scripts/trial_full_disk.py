"""What becomes of a run whose disk is full in one place: one line for each of twelve places, as a table.

    python scripts/trial_full_disk.py          # as root, about five minutes on two CPU cores

Each place is a small file system of its own (tmpfs), which is full from the start, or is filled by the reward function
in the midst of the run. A run must end with one message and without a stack trace, its models on the disk if training
came to its end, and each of its files whole or named. A full disk has room for a few lines more where a block of a file
is not full yet. Where no file system can be mounted it says so, and ends.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.harness.programs import Tiny, command_line  # noqa: E402

SIZE = "6m"  # of a file system that is filled on the way; a run of the tiny models writes 2 MB
REWARD = """
import os
calls = 0

def fill():
    with open({filler!r}, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def score(prompts, responses):
    global calls
    calls += 1
    if calls == {fill}:
        fill()
    if calls == {free}:
        os.unlink({filler!r})
    return [0.5 + 0.1 * calls] * len(responses)
"""
# Held-out prompts are scored in calls 1 and 2, and after the last step in 5 and 6; the two steps in 3 and 4.
NEVER = 0
FIRST_STEP = 3
LAST_STEP = 4
LAST_EVALUATION = 5


@dataclass(frozen=True)
class Case:
    """mounted: the folder below the run's that is a file system of its own. fill, free: the calls of the reward
    function in which it is filled and emptied; NEVER to have it full from the start. code: the exit code to come, of
    a run of which something is lost."""

    place: str
    mounted: str
    fill: int = NEVER
    free: int = NEVER
    code: int = 1
    models: bool = True
    flags: dict = field(default_factory=dict)
    environment: Callable[[Path], dict] = lambda folder: {}
    step: int = 3


CASES = (
    Case("models, at the end", "out", fill=LAST_STEP),
    Case("models of step 1", "out", step=1),
    Case("samples", "out/samples"),
    Case("metrics.jsonl, for one step", "out", fill=FIRST_STEP, free=LAST_STEP),
    Case("metrics.jsonl, to the end", "out", fill=FIRST_STEP),
    Case("run.json and the lock, at the start", "out", code=2, models=False),
    Case("TensorBoard", "out/tensorboard"),
    Case("the last samples", "out", fill=LAST_EVALUATION),
    Case("checkpoints", "out/checkpoints", flags={"save_steps": 1}, code=0),
    Case("recordings", "out/profile", flags={"profile_steps": 1}),
    Case("cache of tokenised data", "cache", flags={"data_output_path": "cache"}, code=0),
    Case("temporary folder", "tmp", environment=lambda folder: {"TMPDIR": str(folder / "tmp")}, code=0),
)


def mount(folder: Path, size: str) -> bool:
    """Mount an empty file system; whether that is possible here."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def fill(folder: Path) -> None:
    """Take all space of the folder's file system."""
    with (folder / "filler.log").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def run(case: Case, tiny: Tiny, folder: Path) -> tuple[list[str], str]:
    """What is wrong with the run's end, and its last words."""
    mounted = folder / case.mounted
    if not mount(mounted, SIZE if case.fill else "64k"):
        sys.exit("skipped: no file system can be mounted here (mount -t tmpfs, which needs root).")
    try:
        if not case.fill and case.step == 3:
            fill(mounted)
        flags = tiny.flags(case.step, output_dir=folder / "out", resume="auto") | case.flags
        if case.mounted.startswith("out/"):  # the folder is not empty then; this makes it a run's that has just begun
            (folder / "out" / "run.json").write_text('{"starts": []}')
        if "data_output_path" in flags:
            flags["data_output_path"] = folder / "cache"
        if case.step == 3:
            judge = folder / "judge.py"
            judge.write_text(REWARD.format(filler=str(mounted / "filler.log"), fill=case.fill, free=case.free))
            flags["reward_function"] = f"{judge}:score"
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "XDG_CACHE_HOME": str(folder / "c"),
        }
        program = ROOT / "training" / {1: "step1_sft.py", 3: "step3_rlhf.py"}[case.step]
        result = subprocess.run(
            [sys.executable, str(program), *command_line(flags)],
            capture_output=True,
            text=True,
            cwd=folder,
            env={**environment, "PYTHONPATH": str(ROOT), **case.environment(folder)},
            timeout=600,
            check=False,
        )
        return problems(case, folder / "out", result), last_words(result)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def problems(case: Case, out: Path, result: subprocess.CompletedProcess) -> list[str]:
    """What should not be."""
    found, said = [], result.stdout + result.stderr
    code = case.code if case.code == 2 or "cannot be written" in said else 0
    if result.returncode != code:
        found.append(f"exit code {result.returncode} instead of {code}")
    if "Traceback" in said:
        found.append("a stack trace")
    if case.models and not any(saved(place) for place in (out / "actor", out, *elsewhere(said))):
        found.append("no model")
    if case.models and case.step == 3:
        steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        if steps != [0, 1, 2] and (case.free or not named(out / "metrics.jsonl", said)):
            found.append(f"metrics of steps {steps}")
        files = [out / name for name in ("samples/after.jsonl", "run.json")]
        missing = [file for file in files if not (file.is_file() and file.stat().st_size) and not named(file, said)]
        found += [f"{file.name} is not there, and nothing was said" for file in missing]
    if found:
        print(said[-6000:], file=sys.stderr)
    return found


def named(path: Path, said: str) -> bool:
    """Whether it was said of the file, or of the folder that it is in, that it cannot be written."""
    return any(f"{place} cannot be written" in said for place in (path, path.parent))


def elsewhere(said: str) -> list[Path]:
    """Where the message says that models are."""
    told = re.search(r"its models are saved: (.*)\.$", said, re.MULTILINE)
    return [Path(place) for place in told[1].split(", ")] if told else []


def saved(folder: Path) -> bool:
    """Whether a model stands there."""
    return (folder / "config.json").is_file() and any(file.stat().st_size for file in folder.glob("*.safetensors"))


def last_words(result: subprocess.CompletedProcess) -> str:
    """What the run said of it: its warnings and its last line."""
    lines = [
        line
        for line in result.stderr.splitlines()
        if re.match("(?i)warning:|error:|stopped:|training was done|checkpoint not", line)
    ]
    return " / ".join(lines) or (result.stdout.splitlines() or [""])[-1]


def main() -> int:
    """Run all cases; 1 if one ends otherwise than it should."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("places", nargs="*", help="only those whose names contain one of these")
    wanted = parser.parse_args().places
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        tiny = Tiny(Path(folder))
        print("| place | as it should | what was said |\n| --- | --- | --- |")
        for number, case in enumerate(CASES):
            if wanted and not any(part in case.place for part in wanted):
                continue
            place = Path(folder) / f"case{number}"
            found, said = run(case, tiny, place)
            wrong += bool(found)
            words = said.replace(f"{place}/", "").replace("|", "/")[:700]
            print(f"| {case.place} | {'; '.join(found) or 'yes'} | {words} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
