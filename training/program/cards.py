"""Model cards put beside saved models: written with the model, and once more when the run's last evaluation is there.

A card ends with the hash of what stands above it. One that a user has edited has another: it is the user's from then
on, and is kept as any file of theirs is.
"""

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import huggingface_hub

from engine.errors import UserError
from engine.files import read_text
from engine.models.places import base_of
from engine.whole_files import write_whole
from training.program.unwritten import note
from training.reporting.hub_names import is_hub_name
from training.reporting.merge_card import merge_card
from training.reporting.metrics_file import METRICS_FILE, read_metrics
from training.reporting.model_card import MODEL_FLAGS, RunFacts, model_card
from training.reporting.run_record import RUN_FILE, git_state, read_run_record, versions

CARD = "README.md"
_SIGNED = re.compile(r"<!-- card of four-engine-rlhf ([0-9a-f]{64}): .* -->\n\Z")


def signed(text: str) -> str:
    """A card's text with the line by which it is known as made by the program."""
    return f"{text}\n<!-- card of four-engine-rlhf {_digest(text)}: a later save replaces it, if nobody edits it -->\n"


def is_edited(path: Path) -> bool:
    """Whether a README.md stands there that is not, or not any more, as this program wrote it. Raises: OSError."""
    if not path.is_file():
        return False
    text = path.read_bytes().decode(errors="replace")
    found = _SIGNED.search(text)
    return found is None or found[1] != _digest(text[: found.start() - 1])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def facts(output_dir: Path, steps: int | None = None) -> RunFacts | None:
    """What is known of the run in a folder; None without a run.json. steps: no later ones than these.

    Raises: OSError, and UserError where run.json is no record.
    """
    if not (output_dir / RUN_FILE).is_file():
        return None
    start, metrics = read_run_record(output_dir / RUN_FILE)[-1], output_dir / METRICS_FILE
    rows = [
        row for row in (read_metrics(metrics) if metrics.is_file() else []) if steps is None or row["step"] <= steps
    ]
    return RunFacts(
        start=start, rows=rows, steps=steps, known=known_names([start["flags"].get(f) for f in MODEL_FLAGS])
    )


def known_names(paths: list[str | None]) -> dict[str, str]:
    """By path, the Hub's name of what a model on the disk began as, where the card says so that this program wrote."""
    found = {}
    for path in paths:
        if path is None or is_hub_name(path):
            continue
        with contextlib.suppress(OSError, UserError, ValueError):
            name = base_of(path, "model")
            if name == path and _SIGNED.search(text := read_text(Path(path) / CARD)):
                name = huggingface_hub.ModelCard(text).data.to_dict().get("base_model")
            if isinstance(name, str) and is_hub_name(name):
                found[path] = name
    return found


def add_card(folder: Path, output_dir: Path, name: str) -> None:
    """Write the card of the model that the run in `output_dir` saves as `name` into `folder`.

    A model is saved whatever becomes of its card: what goes wrong here is told, and once more at the run's end.
    """
    with _failures_noted(output_dir / name, folder):
        run = facts(output_dir)
        if run is not None:
            (folder / CARD).write_text(signed(model_card(run, name)), encoding="utf-8")


def add_run_card(folder: Path, output_dir: Path, name: str, steps: int) -> None:
    """The same for a model that a restart point of the run in `output_dir` holds, after so many steps; where no
    run.json tells of the run (the point was moved, say), there is none, and that is said."""
    with _failures_noted(folder, folder):
        run = facts(output_dir, steps)
        if run is None:
            print(f"no model card: {output_dir / RUN_FILE}, which tells of the run, is not there", file=sys.stderr)
        else:
            (folder / CARD).write_text(signed(model_card(run, name)), encoding="utf-8")


def add_merge_card(folder: Path, source: Mapping) -> None:
    """The same for a merged model; source: what its note says of where it comes from."""
    with _failures_noted(folder, folder):
        known = known_names([source["sft"], *source["trained"]])
        text = signed(merge_card(source, versions(), git_state(Path(__file__).parent), known))
        (folder / CARD).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _failures_noted(model: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of what a file holds, too: hours of training stand against a page of text
        (folder / CARD).unlink(missing_ok=True)
        note(f"the model card {model / CARD}", error)


def renew_cards(output_dir: Path, saved: Mapping[str, Path]) -> None:
    """Write the cards of saved models once more, with what was measured since; one that was edited stays (one process
    calls this)."""
    for name, folder in saved.items():
        try:
            run = facts(output_dir)
            if run is not None and (folder / CARD).is_file() and not is_edited(folder / CARD):
                write_whole(folder / CARD, signed(model_card(run, name)))
        except Exception as error:
            note(f"the model card {folder / CARD}", error)
