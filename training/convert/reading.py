"""Configurations as they lie about: a YAML or JSON file of fields, or a shell script with a command line in it."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from engine.files import read_text
from engine.json_objects import unique
from training.flags.yaml_file import read_yaml

BETWEEN_COMMANDS = "();&|"


def read_fields(path: str, program: re.Pattern[str], program_name: str) -> dict[str, object]:
    """The fields of a configuration file; raises UserError for one that cannot be read or holds none.

    .json: an object. .yaml, .yml: a mapping; `env`, which TRL's command line reads for itself, is left out. Anything
    else: a command line, in a script or alone, as `read_command` takes it.
    """
    ending = Path(path).suffix.lower()
    if ending in (".yaml", ".yml"):
        return {name: value for name, value in _read_yaml(path).items() if name != "env"}
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    if ending != ".json":
        return read_command(text, path, program, program_name)
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise UserError(f"{path}: no valid JSON (brackets within brackets, too deep).") from None
    except ValueError as error:
        raise UserError(f"{path}: no valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise UserError(f'{path}: found no object of fields. Needed are lines like `"kl_coef": 0.05`.')
    return found


def _read_yaml(path: str) -> dict[str, object]:
    try:
        found = read_yaml(path)
    except UserError as error:
        raise UserError(str(error).removeprefix("--config ")) from None
    for name in found:
        if not isinstance(name, str):
            raise UserError(f"{path}: {name!r} is the name of no field. Take it out, or write it between quotes.")
    return found


def read_command(text: str, path: str, program: re.Pattern[str], program_name: str) -> dict[str, object]:
    """The flags of a command line by name, without dashes: a value, a list of several, or True for a bare one.

    Of a script the one command is read that calls the other system's program: flags stand behind the word in which
    `program` is found; program_name: what a message calls it. Raises: UserError for none or several, for a
    variable or a command in backticks, whose value only the shell knows, and for a flag that comes twice.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    lines = [line for line in joined.splitlines() if program.search(line) and not line.lstrip().startswith("#")]
    if len(lines) > 1:
        raise UserError(f"{path}: {program_name} is called {len(lines)} times. Give a file with one command.")
    if not lines and not joined.lstrip().startswith("--"):
        raise UserError(
            f"{path}: found no command that calls {program_name}, and no flags. Give a script that does, its flags "
            "alone, or a .yaml or .json file of fields."
        )
    try:
        words = _words(lines[0] if lines else joined)
    except ValueError as error:
        raise UserError(f"{path}: the command cannot be read ({error}).") from None
    start = next((place + 1 for place, word in enumerate(words) if program.search(word)), 0)
    return _flags(words[start:], path)


def _words(command: str) -> list[str]:
    """A shell's words; what stands between commands is a word of its own, without a space before it, too."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=BETWEEN_COMMANDS)
    lexer.whitespace_split = True
    return list(lexer)


def _flags(words: Sequence[str], path: str) -> dict[str, object]:
    found: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word == "EOF" or (not word.strip(BETWEEN_COMMANDS) and word) or re.match(r"\d*[<>]", word):
            break
        if "$" in word or "`" in word:
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
        name: [*map(_value, words)] if len(words) > 1 else _value(words[0]) if words else True
        for name, words in found.items()
    }


def _value(word: str) -> str | int | float | bool:
    """A word as the truth value or number that it is written as; 007 and 2024_05_01, which name folders, stay words."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if re.fullmatch(r"-?(0|[1-9]\d{0,99})", word, re.ASCII):
        return int(word)
    number = re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", word, re.ASCII | re.IGNORECASE)
    return float(word) if number and ("." in word or "e" in word.lower()) else word
