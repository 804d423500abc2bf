"""What can have happened to a checkpoint: each is a function of its folder and that of an older checkpoint's.

    for name, damage in DAMAGES.items():
        damage(newest, older)
        print(name, tried(output_dir, newest, older))

The checkpoints are those of two ranks, with actor, critic and moving average.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from engine.errors import UserError
from training.checkpoints.resuming import Checkpoint

Damage = Callable[[Path, Path], None]
ACTOR, OTHER = "actor/rank_00000.safetensors", "actor/rank_00001.safetensors"
CRITIC, AVERAGE = "critic/rank_00000.safetensors", "ema/rank_00001.safetensors"
STATE = "trainer_state.json"
MANIFEST = "manifest.json"
CONFIG = "config/actor/config.json"
TOKENS = "config/actor/tokenizer.json"


def flip(name: str, place: float, checkpoint: Path, older: Path) -> None:
    """Another bit at this part of a file."""
    data = bytearray((checkpoint / name).read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    (checkpoint / name).write_bytes(data)


def cut(name: str, keep: float, checkpoint: Path, older: Path) -> None:
    """This part of a file is left."""
    os.truncate(checkpoint / name, int(keep * (checkpoint / name).stat().st_size))


def remove(name: str, checkpoint: Path, older: Path) -> None:
    """A file or folder is missing."""
    path = checkpoint / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def take_older(name: str, checkpoint: Path, older: Path) -> None:
    """A file or folder is the older checkpoint's; "" for all of it."""
    if name:
        remove(name, checkpoint, older)
    else:
        shutil.rmtree(checkpoint)
    source = older / name
    shutil.copytree(source, checkpoint / name) if source.is_dir() else shutil.copy(source, checkpoint / name)


def exchange(one: str, other: str, checkpoint: Path, older: Path) -> None:
    """Two files have each other's place."""
    paths = checkpoint / one, checkpoint / other
    texts = [path.read_bytes() for path in paths]
    for path, text in zip(paths, reversed(texts)):
        path.write_bytes(text)


def write(name: str, data: bytes, checkpoint: Path, older: Path) -> None:
    """A file has other content."""
    (checkpoint / name).write_bytes(data)


def append(name: str, checkpoint: Path, older: Path) -> None:
    """A file has grown."""
    with (checkpoint / name).open("ab") as file:
        file.write(b"\0" * 8)


def blank(name: str, checkpoint: Path, older: Path) -> None:
    """A block of a file is zeros, as after a power cut."""
    path = checkpoint / name
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"\0" * 4096 + data[middle + 4096 :])


def edit(change: Callable[[dict], None], checkpoint: Path, older: Path) -> None:
    """The manifest was changed by hand."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    change(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def drop_with_line(checkpoint: Path, older: Path) -> None:
    """A file is missing, and its line in the manifest."""
    remove(OTHER, checkpoint, older)
    edit(lambda manifest: manifest["files"].pop(OTHER), checkpoint, older)


def other_line(change: Callable[[dict], object], checkpoint: Path, older: Path) -> None:
    """A file's line in the manifest says something else."""
    edit(lambda manifest: manifest["files"].update({ACTOR: change(manifest["files"])}), checkpoint, older)


def rename(checkpoint: Path, older: Path) -> None:
    """The checkpoint is named after a later step."""
    checkpoint.rename(checkpoint.with_name("step_000099"))


def replace(name: str, make: Callable[[Path], object], checkpoint: Path, older: Path) -> None:
    """Something else than a file stands in a file's place."""
    (checkpoint / name).unlink()
    make(checkpoint / name)


class Marked:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def pickled(name: str, checkpoint: Path, older: Path) -> None:
    """A pickle that runs code stands in a file's place."""
    (checkpoint / name).write_bytes(pickle.dumps(Marked(str(checkpoint.parent / "unpickled"))))


DAMAGES: dict[str, Damage] = {
    **{
        f"flipped bit: {name}, at {place:.0%}": partial(flip, name, place)
        for name, place in (
            (ACTOR, 0.0),
            (ACTOR, 0.02),
            (ACTOR, 0.6),
            (OTHER, 1.0),
            (CRITIC, 0.5),
            (AVERAGE, 0.7),
            (STATE, 0.3),
            (MANIFEST, 0.5),
            (CONFIG, 0.5),
            (TOKENS, 0.5),
        )
    },
    **{
        f"cut to {keep:.1%}: {name}": partial(cut, name, keep)
        for name, keep in ((ACTOR, 0.5), (CRITIC, 0.999), (AVERAGE, 0.0), (STATE, 0.5), (STATE, 0.0))
    },
    **{f"cut to {keep:.0%}: {MANIFEST}": partial(cut, MANIFEST, keep) for keep in (0.5, 0.0)},
    **{f"missing: {name}": partial(remove, name) for name in (OTHER, "critic", "ema", "config", STATE, MANIFEST)},
    **{
        f"the older checkpoint's: {name or 'everything'}": partial(take_older, name)
        for name in (ACTOR, "critic", "ema", STATE, MANIFEST, "")
    },
    "exchanged: the ranks' files": partial(exchange, ACTOR, OTHER),
    "exchanged: actor and critic": partial(exchange, ACTOR, CRITIC),
    "not written by the run: one more rank's file": partial(write, "actor/rank_00002.safetensors", b"\0" * 64),
    "not written by the run: notes.txt": partial(write, "notes.txt", b"mine"),
    f"grown: {ACTOR}": partial(append, ACTOR),
    f"zeros in a block: {CRITIC}": partial(blank, CRITIC),
    "named after a later step": rename,
    "a folder in a file's place": partial(replace, ACTOR, Path.mkdir),
    "a pipe in a file's place": partial(replace, ACTOR, os.mkfifo),
    "a link that leads nowhere": partial(replace, ACTOR, lambda path: path.symlink_to("nowhere")),
    f"a pickle: {ACTOR}": partial(pickled, ACTOR),
    f"a pickle: {STATE}": partial(pickled, STATE),
    "manifest: another step": partial(edit, lambda manifest: manifest.update(step=manifest["step"] + 1)),
    "manifest: another format": partial(edit, lambda manifest: manifest.update(format=2)),
    "manifest: a file and its line are gone": drop_with_line,
    "manifest: a line names another file": partial(other_line, lambda files: files[CRITIC]),
    "manifest: a size is a text": partial(other_line, lambda files: ["many", files[ACTOR][1]]),
    "manifest: files are a list": partial(edit, lambda manifest: manifest.update(files=[1, 2])),
    "manifest: a list": partial(write, MANIFEST, b"[1, 2, 3]"),
    "manifest: null": partial(write, MANIFEST, b"null"),
    "manifest: no text": partial(write, MANIFEST, b"\xff\xfe\x00"),
    "manifest: brackets without end": partial(write, MANIFEST, b"[" * 100_000),
}


def tried(output_dir: Path, newest: Path, older: Path) -> str:
    """What --resume makes of a damaged checkpoint, by its run's folder and by its own name; begins with "FAILED" where
    the checkpoint was used, or something else than a message came of it."""
    try:
        checkpoint = Checkpoint.find(str(output_dir), str(output_dir), with_ema=True)
    except Exception as error:
        return f"FAILED: {type(error).__name__}: {error}"
    named = newest if newest.exists() else newest.with_name("step_000099")
    if checkpoint is None or checkpoint.folder != older or str(named) not in " ".join(checkpoint.passed_over):
        return f"FAILED: {checkpoint and checkpoint.folder.name} was used"
    try:
        Checkpoint.find(str(named), str(output_dir), with_ema=True)
        return "FAILED: it was used by its name"
    except UserError as refusal:
        message = str(refusal)
    except Exception as error:
        return f"FAILED: by its name, {type(error).__name__}: {error}"
    if "Give the run's output folder" not in message or "\n" in message:
        return f"FAILED: {message}"
    if (newest.parent / "unpickled").exists():
        return "FAILED: code in it was run"
    return message.partition(" is damaged: ")[2].partition(". Give the run's")[0]
