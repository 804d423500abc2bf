"""Command lines and YAML files that a user may get wrong, by the hundred.

    world = BadWorld(tmp_path / "bad", tiny)
    for case in cases(world, count=300, seed=0):
        result = run(case.step, case.words(out))
        assert case.problem(result, out) is None        # one message, exit code 2, nothing written

Every mistake stands alone in a command line that would otherwise train. `seed` draws which mistakes are taken, and how
names are misspelt.
"""

import itertools
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.bad_files import files, models
from tests.e2e.bad_flags import contradictions, values_of_flags, words_that_are_none
from tests.e2e.bad_values import YAML
from tests.e2e.bad_world import BadWorld
from tests.e2e.mistake import Mistake
from tests.e2e.programs import PROGRAMS, Result, command_line, snapshot

STALE = {
    "metrics.jsonl": '{"step": 1, "samples": 8}\n',
    "checkpoints/step_000001/trainer_state.json": "{}",
    "config.json": "{}",
    "tensorboard/events": "x",
}  # what an earlier run left


@dataclass(frozen=True)
class Case:
    """A mistake to be tried. occupied: whether an earlier run stands in the output folder, to be overwritten."""

    mistake: Mistake
    occupied: bool
    world: BadWorld

    @property
    def step(self) -> int:
        return self.mistake.step

    def words(self, output_dir: Path) -> list[str]:
        """The command line behind the program's name; the output folder is made what it has to be."""
        shutil.rmtree(output_dir, ignore_errors=True)
        flags = self.world.tiny.flags(self.step, **{"output_dir": output_dir, **self.mistake.changes})
        if self.occupied:
            flags["overwrite_output_dir"] = True
            for name, text in STALE.items():
                (output_dir / name).parent.mkdir(parents=True, exist_ok=True)
                (output_dir / name).write_text(text)
        words = [*command_line(flags), *self.mistake.words]
        if self.mistake.yaml is not None:
            text = self.mistake.yaml
            self.world.settings.write_bytes(text if isinstance(text, bytes) else text.encode())
            words += ["--config", str(self.world.settings)]
        return words

    def problem(self, result: Result, output_dir: Path) -> str | None:
        """What is wrong with how the program ended, or None."""
        left = {name: text.decode(errors="replace") for name, text in snapshot(output_dir).items()}
        if output_dir.exists() != self.occupied or left != (STALE if self.occupied else {}):
            return f"something was written into the output folder (exit code {result.code}): {result.stderr[-300:]!r}"
        return message_problem(result)

    def __str__(self) -> str:
        wrong = command_line(self.mistake.changes) + list(self.mistake.words)
        text = " ".join(repr(word)[1:-1] for word in wrong) or repr(self.mistake.yaml)
        return f"{self.mistake.kind}, step {self.step}: {text if len(text) <= 120 else text[:117] + '...'}"


def message_problem(result: Result) -> str | None:
    """What is wrong with how a program ended that had one thing to say, or None."""
    printed = result.stdout + result.stderr
    if "Traceback" in printed:
        return f"a stack trace: {result.stderr.strip().splitlines()[-1][:300]!r}"
    if result.code != 2:
        return f"exit code {result.code}: {printed[-300:]!r}"
    messages = sum(line.startswith("error: ") for line in printed.splitlines())
    if messages != 1 or "error: " not in result.stderr:
        return f"{messages} messages: {printed[-300:]!r}"
    if result.stderr.count("\n") != 1 or not result.stderr.rstrip("\n").isprintable():
        return f"more than one clean line: {result.stderr[-300:]!r}"
    if result.stderr.rstrip()[-1] not in ".?":
        return f"no sentence that says what to do: {result.stderr[-300:]!r}"
    return None


def cases(world: BadWorld, count: int, seed: int) -> list[Case]:
    """So many cases, of every kind in turn while there are any."""
    rng = random.Random(seed)
    kinds: dict[str, list[Mistake]] = {}
    for mistake in every_mistake(world, rng):
        kinds.setdefault(mistake.kind, []).append(mistake)
    for found in kinds.values():
        rng.shuffle(found)
    turns = itertools.zip_longest(*kinds.values())
    taken = itertools.islice((mistake for turn in turns for mistake in turn if mistake is not None), count)
    return [Case(mistake, rng.random() < 0.5 and "output_dir" not in mistake.changes, world) for mistake in taken]


def every_mistake(world: BadWorld, rng: random.Random) -> Iterator[Mistake]:
    """All of them, step by step."""
    for step in PROGRAMS:
        yield from words_that_are_none(step, rng)
        yield from values_of_flags(step)
        yield from contradictions(step, world)
        yield from files(step, world)
        yield from models(step, world)
        for text in YAML:
            yield Mistake("YAML", step, yaml=text)
