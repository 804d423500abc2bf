"""One check's run: where it may write, and what it says it found."""

import contextlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Figure = float | int | str | bool
SO_FAR = "so_far.json"


class Skipped(Exception):
    """A check that this machine cannot make, and why; no failure."""


@dataclass
class Trial:
    """What a check is given, and what it fills.

    dry: there is no GPU, and models are tiny: the check goes through its logic and tells what it leaves out.
    folder: its own. models: a folder of models with random weights, which all checks share.
    figures: what it measured, by name. left_out: what needs CUDA and was not done. failures: what is wrong, in words.
    """

    dry: bool
    folder: Path
    models: Path
    figures: dict[str, Figure] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def expect(self, condition: bool, otherwise: str) -> None:
        """Note a failure unless the condition holds; the check goes on."""
        if not condition:
            self.failures.append(otherwise)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What is raised within is a failure of this part alone; the check goes on behind it.

        What was found so far is written to the folder's SO_FAR, for a check that does not live to tell.
        """
        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        finally:
            so_far = {"figures": self.figures, "left_out": self.left_out, "failures": self.failures}
            (self.folder / SO_FAR).write_text(json.dumps(so_far))

    def needs_gpu(self, what: str) -> bool:
        """Whether there is a GPU to do `what` with; where there is none, that is told."""
        if self.dry:
            self.left_out.append(what)
        return not self.dry
