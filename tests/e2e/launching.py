"""The launchers, one for each model size, with programs on the PATH that stand in for `python` and `deepspeed`."""

import shutil
import subprocess
from pathlib import Path

from scripts.harness import ROOT


def stand_in(program: Path, prints: str) -> None:
    """Write a program that prints these words of a shell, a NUL behind each."""
    program.write_text(f"#!/bin/sh\nprintf '%s\\0' {prints}\n")
    program.chmod(0o755)


def write_hostfile(file: Path, nodes: int) -> str:
    """A hostfile that names so many nodes of eight slots; returns its path."""
    file.write_text("# a comment\n" + "".join(f"node{number} slots=8\n" for number in range(nodes)))
    return str(file)


def words_of(stand_ins: Path, launcher: str, *arguments: str, **settings: str) -> list[str]:
    """What the launcher would start."""
    ended = launched(stand_ins, launcher, *arguments, **settings)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split("\0")[:-1]


def launched(
    stand_ins: Path, launcher: str, *arguments: str, path: str = ":/usr/bin:/bin", **settings: str
) -> subprocess.CompletedProcess:
    """The launcher's end; path: what comes behind the stand-ins in PATH."""
    return subprocess.run(
        [shutil.which("bash"), str(ROOT / "scripts" / f"{launcher}.sh"), *arguments],
        env={"PATH": f"{stand_ins}{path}", **settings},
        text=True,
        capture_output=True,
        timeout=60,
    )


def flag_of(words: list[str], name: str) -> str:
    """The value that counts: the last one."""
    return words[len(words) - words[::-1].index(f"--{name}")]
