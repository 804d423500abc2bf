"""Configurations as they lie about: a YAML or JSON file of fields, or a shell script with a command line in it."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from engine.files import read_text
from training.flags.yaml_file import read_yaml

ENTRY = "train_ppo_ray"  # OpenRLHF's program: flags stand behind it


def read_fields(path: str) -> dict[str, object]:
    """The fields of a configuration file; raises UserError for one that cannot be read or holds none.

    .json: an object. .yaml, .yml: a mapping; `env`, which TRL's command line reads for itself, is left out. Anything
    else: a command line, in a script or alone.
    """
    ending = Path(path).suffix.lower()
    if ending in (".yaml", ".yml"):
        return {name: value for name, value in _read_yaml(path).items() if name != "env"}
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if ending != ".json":
        return read_command(text, path)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f'{path}: found no object of fields. Needed are lines like `"kl_coef": 0.05`.')
    return found


def _read_yaml(path: str) -> dict[str, object]:
    try:
        return read_yaml(path)
    except UserError as error:
        raise UserError(str(error).removeprefix("--config ")) from None


def read_command(text: str, path: str) -> dict[str, object]:
    """The flags of a command line by name, without dashes: a value, a list of several, or True for a bare one.

    Of a script the one command is read that calls OpenRLHF's program. Raises: UserError for none or several, for a
    variable, whose value only the shell knows, and for a flag that comes twice.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [line for line in joined.splitlines() if ENTRY in line and not line.lstrip().startswith("#")]
    if len(lines) > 1:
        raise UserError(f"{path}: {ENTRY} is called {len(lines)} times. Give a file with one command.")
    if not lines and not joined.lstrip().startswith("--"):
        raise UserError(f"{path}: found no command that calls {ENTRY}, and no flags.")
    try:
        words = shlex.split(lines[0] if lines else joined, comments=True)
    except ValueError as error:
        raise UserError(f"{path}: the command cannot be read ({error}).") from None
    start = next((place + 1 for place, word in enumerate(words) if ENTRY in word), 0)
    return _flags(words[start:], path)


def _flags(words: Sequence[str], path: str) -> dict[str, object]:
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word in ("&", ";", "|", "&&", "EOF") or word.startswith((">", "2>")):
            break
        if "$" in word:
            raise UserError(f"{path}: {word} is a variable, whose value only the shell knows. Write the value there.")
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            if name in found:
                raise UserError(f"{path}: --{name} is given twice. Leave one.")
            found[name] = [value] if sign else []
        elif name is None:
            raise UserError(f"{path}: {word!r} belongs to no flag.")
        else:
            found[name].append(word)
    return {
        name: [*map(_number, words)] if len(words) > 1 else _number(words[0]) if words else True
        for name, words in found.items()
    }


def _number(word: str) -> str | int | float:
    try:
        return int(word)
    except ValueError:
        return float(word) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", word, re.IGNORECASE) and word.count(".") < 2 else word
