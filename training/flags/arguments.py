"""Flags from dataclasses.

`flag()` gives a field its help, `parse_flags` a dataclass from a command line and a YAML file.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from engine.errors import UserError
from training.flags.yaml_file import read_yaml
from training.reporting.sample_tables import visible

REQUIRED = dataclasses.MISSING


def flag(default, help: str, choices: Sequence[str] | None = None, group: str = "", adds_up: bool = False):
    """A dataclass field that is a flag; `default` REQUIRED for one that must be given.

    group: the heading that it stands under, and those after it until the next heading. adds_up: a list that grows each
    time the flag is given, where otherwise the last one counts.
    """
    metadata = {"help": help, "choices": choices, "group": group, "adds_up": adds_up}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(metadata=metadata) if default is REQUIRED else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class OldFlag:
    """A flag of DeepSpeed-Chat's that has nothing left to do here.

    kind: of its value; bool for one without. instead: what does its work now. allowed: the only values that are
    accepted, where another would ask for something that is not there; all of them if None.
    """

    kind: type
    instead: str
    allowed: tuple | None = None


@dataclass(kw_only=True)
class RunFlags:
    """What all three steps share."""

    old_flags: ClassVar[dict[str, OldFlag]] = {}

    config: str | None = flag(
        None, "YAML file with flags by name (without dashes); those on the command line win", group="the run"
    )
    output_dir: str = flag(REQUIRED, "folder for models, metrics and restart points")
    overwrite_output_dir: bool = flag(False, "overwrite what stands in --output_dir")
    dry_run: bool = flag(
        False,
        "check everything that needs no GPU and no download, print the command and each "
        "engine's configuration, and end",
    )
    seed: int = flag(1234, "of data order, fresh weights and sampling")
    dtype: str | None = flag(
        None,
        "what models compute in; by default bf16 on GPUs that have it, fp16 on others, fp32 on CPUs",
        choices=("fp32", "fp16", "bf16"),
    )
    enable_tensorboard: bool = flag(True, "write curves, tables and histograms for TensorBoard")
    tensorboard_path: str | None = flag(
        None,
        "folder in which this run's TensorBoard files get a folder of their own; by default OUTPUT_DIR/tensorboard",
    )
    wandb_project: str | None = flag(None, "Weights & Biases project to send the same to (pip install wandb)")

    def validate(self) -> None:
        """Raise UserError for values that cannot work; called after parsing."""
        self.at_least(0, "seed")
        self.at_most(2**31 - 1, "seed")
        for spec in dataclasses.fields(self):
            for value in _texts(getattr(self, spec.name)) if spec.name != "stop" else ():
                _check_name(spec.name, value)
        if self.wandb_project is not None and not self.enable_tensorboard:
            raise UserError("--wandb_project needs --enable_tensorboard true: it sends what TensorBoard is given.")

    def as_dict(self) -> dict:
        """All flags by name."""
        return dataclasses.asdict(self)

    def looks_at(self, path: str) -> bool:
        """Whether the model at `path` is to be read: in a dry run only if it is on this machine."""
        return not self.dry_run or Path(path).exists()

    def at_least(self, lowest: float, *names: str) -> None:
        """Raise UserError unless each named flag that is set is at least `lowest`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise UserError(f"--{name} {value}: must be at least {lowest}.")
            if value is not None and value == math.inf:
                raise UserError(f"--{name} {value}: must be finite.")

    def above(self, bound: float, *names: str) -> None:
        """Raise UserError unless each named flag that is set is finite and greater than `bound`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value > bound:
                raise UserError(f"--{name} {value}: must be greater than {bound}.")

    def at_most(self, highest: float, *names: str) -> None:
        """Raise UserError unless each named flag that is set is at most `highest`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value <= highest:
                raise UserError(f"--{name} {value}: must be at most {highest}.")

    def finite(self, *names: str) -> None:
        """Raise UserError unless each named flag that is set is a finite number."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise UserError(f"--{name} {value}: must be finite.")


LONGEST_PATH, LONGEST_PART = 4095, 255  # bytes of a path and of a name in it, by Linux


def _texts(value) -> list[str]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]


def _check_name(name: str, value: str) -> None:
    """Raise UserError for a text that can name nothing, before a library is given it."""
    if not value.strip():
        what = "no name of a file or folder" if name.endswith(("_dir", "_path", "config")) else "no name of anything"
        raise UserError(f"--{name} {value!r}: {what}. Leave the flag out, or give one.")
    if re.search("[\0-\x1f\x7f\ud800-\udc7f\udd00-\udfff]", value):  # \udc80 to \udcff: bytes that are no UTF-8
        raise UserError(f"--{name} {value!r}: a control character or half a character stands in it. Take it out.")
    encoded = os.fsencode(value)
    if len(encoded) > LONGEST_PATH or any(len(part) > LONGEST_PART for part in encoded.split(b"/")):
        raise UserError(
            f"--{name} {reprlib.repr(value)}: {len(value)} characters are too long for a name. Give a shorter one."
        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{_shortened(message)}. --help lists the flags.")


def parse_flags(
    arguments_class: type[RunFlags],
    argv: Sequence[str],
    description: str,
    say: Callable[[str], None] = lambda line: None,
):
    """The dataclass filled from a command line, and from the YAML file that it names, and validated.

    say: is given one line for each flag that has nothing left to do. Raises: UserError for an unknown flag or key
    (naming the nearest known one), a missing one, a value of the wrong type, or one that asks for what is not there.
    """
    parser = _parser(arguments_class, description)
    known = [spec.name for spec in dataclasses.fields(arguments_class)] + list(arguments_class.old_flags)
    _refuse_unknown(argv, [*known, "local_rank", "help"])
    words = [*_config_words(arguments_class, argv, known), *_negative_numbers_joined(argv)]
    found, stray = parser.parse_known_args(words)
    if stray:
        raise UserError(f"{stray[0]!r} belongs to no flag. --help lists the flags.")
    values = vars(found)
    del values["local_rank"]
    old = {name: values.pop(name) for name in arguments_class.old_flags}
    for name, value in old.items():
        _tell_old(arguments_class.old_flags[name], name, value, say)
    args = arguments_class(**values)
    args.validate()
    return args


def _parser(arguments_class: type[RunFlags], description: str) -> _Parser:
    parser = _Parser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the launcher's
    hints = typing.get_type_hints(arguments_class)
    group = parser
    for spec in dataclasses.fields(arguments_class):
        if spec.metadata["group"]:
            group = parser.add_argument_group(spec.metadata["group"])
        group.add_argument(f"--{spec.name}", **_argparse_options(spec, hints[spec.name]))
    if arguments_class.old_flags:
        group = parser.add_argument_group("DeepSpeed-Chat's flags that have nothing left to do")
    for name, old in arguments_class.old_flags.items():
        options = (
            {"nargs": "?", "const": True, "type": _truth, "metavar": "true|false"}
            if old.kind is bool
            else {"type": old.kind}
        )
        group.add_argument(f"--{name}", default=None, help=old.instead.replace("%", "%%"), **options)
    return parser


def _tell_old(old: OldFlag, name: str, value, say: Callable[[str], None]) -> None:
    if value is None or value is False:
        return
    given = f"--{name}" if value is True else f"--{name} {value}"
    if old.allowed is not None and value not in old.allowed:
        raise UserError(f"{given}: {old.instead}")
    if old.allowed is None:
        say(f"{given}: {old.instead}")


def _shortened(text: str) -> str:
    """The text in one line that can be read, without what a terminal would take for a command."""
    line = visible(text)
    return line if len(line) <= 400 else f"{line[:300]} ... {line[-97:]}"


def _refuse_unknown(argv: Sequence[str], names: Sequence[str]) -> None:
    for word in argv:
        name, _, value = word.partition("=")
        if name.startswith("--") and name[2:] not in names:
            raise UserError(f"unknown flag {_shortened(name)}.{_nearest(name[2:], names, '--')}")
        if name.startswith("--") and value == "--":  # argparse would make an empty list of it
            raise UserError(f"{word}: -- is no value. --help lists the flags.")


def _nearest(name: str, names: Sequence[str], dashes: str) -> str:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.5)
    return f" Did you mean {dashes}{near[0]}?" if near else " --help lists the flags."


def _config_words(arguments_class: type[RunFlags], argv: Sequence[str], known: Sequence[str]) -> list[str]:
    """The YAML file's settings as words of a command line, each tried on its own so that a mistake names its key."""
    path = _Parser(add_help=False, allow_abbrev=False)
    path.add_argument("--config")
    path = path.parse_known_args(argv)[0].config
    if path is None:
        return []
    _check_name("config", path)
    words = []
    for key, value in read_yaml(path).items():
        if key == "config" or key not in known:
            raise UserError(f"{path}: unknown key {_shortened(str(key))}.{_nearest(str(key), known, '')}")
        own = _words(path, key, value)
        parser = _parser(arguments_class, "")
        for action in parser._actions:
            action.required = False
        try:
            stray = parser.parse_known_args(own)[1]
        except UserError as error:
            raise UserError(f"{path}, key {key}: {error}") from None
        if stray:
            raise UserError(f"{path}, key {key}: {reprlib.repr(value)} is more than one value. --help lists the flags.")
        words += own
    return words


def _words(path: str, key: str, value) -> list[str]:
    values = value if isinstance(value, list) else [value]
    for item in values:
        if not isinstance(item, (str, int, float, bool, type(None))) or (item is None and isinstance(value, list)):
            raise UserError(
                f"{path}, key {key}: {reprlib.repr(value)} is no text, number, truth value or list of these."
            )
    if value is None:
        return []
    texts = [str(item).lower() if isinstance(item, bool) else str(item) for item in values]
    if len(texts) == 1 and texts != ["--"]:
        return [f"--{key}={texts[0]}"]
    if any(text.startswith("--") for text in texts):
        raise UserError(f"{path}, key {key}: a value that begins with -- cannot stand in a list.")
    return [f"--{key}", *texts]


def _negative_numbers_joined(argv: Sequence[str]) -> list[str]:
    """`--flag -1e-5` as `--flag=-1e-5`: argparse takes a negative number with an exponent for a flag of its own."""
    words = []
    for word in argv:
        if words and words[-1].startswith("--") and "=" not in words[-1] and _is_negative_number(word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _is_negative_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return word.startswith("-")


def _argparse_options(spec: dataclasses.Field, hint) -> dict:
    default = spec.default if spec.default is not REQUIRED else None
    if spec.default_factory is not REQUIRED:
        default = spec.default_factory()
    told = "" if default in (None, [], False) else f" (default: {default})"
    options = {
        "help": (spec.metadata["help"] + told).replace("%", "%%"),
        "default": default,
        "required": spec.default is REQUIRED and spec.default_factory is REQUIRED,
    }
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if hint is bool:
        # Bare for yes; a value takes back what a file or a script before it said.
        return options | {"type": _truth, "metavar": "true|false", "nargs": "?", "const": True}
    if typing.get_origin(hint) is list:
        return options | {
            "type": typing.get_args(hint)[0],
            "nargs": "+",
            "action": "extend" if spec.metadata["adds_up"] else "store",
        }
    return options | {"type": hint, "choices": spec.metadata["choices"]}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
