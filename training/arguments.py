"""Flags from dataclasses: `flag()` gives a field its help, `parse_flags` a dataclass from a command line."""
import argparse
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.errors import UserError

REQUIRED = dataclasses.MISSING


def flag(default, help: str, choices: Sequence[str] | None = None):
    """A dataclass field that is a flag; `default` REQUIRED for one that must be given."""
    metadata = {"help": help, "choices": choices}
    if isinstance(default, (list, tuple)):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(metadata=metadata) if default is REQUIRED else field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class RunFlags:
    """What all three steps share."""
    output_dir: str = flag(REQUIRED, "folder for models, metrics and restart points")
    overwrite_output_dir: bool = flag(False, "overwrite what stands in --output_dir")
    seed: int = flag(1234, "of data order, fresh weights and sampling")
    dtype: str = flag("fp32", "what models compute in", choices=("fp32", "fp16", "bf16"))

    def validate(self) -> None:
        """Raise UserError for values that cannot work; called after parsing."""
        self.at_least(0, "seed")
        self.at_most(2 ** 31 - 1, "seed")

    def at_least(self, lowest: float, *names: str) -> None:
        """Raise UserError unless each named flag that is set is at least `lowest`."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not value >= lowest:
                raise UserError(f"--{name} {value}: must be at least {lowest}.")
            if value is not None and value == math.inf:
                raise UserError(f"--{name} {value}: must be finite.")

    def above(self, bound: float, *names: str) -> None:
        """Raise UserError unless each named flag that is set is greater than `bound`."""
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}. --help lists the flags.")


def parse_flags(arguments_class: type, argv: Sequence[str], description: str):
    """The dataclass filled from a command line, and validated.

    Raises: UserError for an unknown flag (naming the nearest known one), a missing one, or a value of the wrong type.
    """
    parser = _Parser(description=description, allow_abbrev=False,
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the launcher's
    hints = typing.get_type_hints(arguments_class)
    names = [spec.name for spec in dataclasses.fields(arguments_class)]
    for spec in dataclasses.fields(arguments_class):
        parser.add_argument(f"--{spec.name}", **_argparse_options(spec, hints[spec.name]))
    _refuse_unknown(argv, [*names, "local_rank", "help"])
    known, stray = parser.parse_known_args(_negative_numbers_joined(argv))
    if stray:
        raise UserError(f"{stray[0]!r} belongs to no flag. --help lists the flags.")
    values = vars(known)
    del values["local_rank"]
    args = arguments_class(**values)
    args.validate()
    return args


def _refuse_unknown(argv: Sequence[str], names: Sequence[str]) -> None:
    for word in argv:
        name = word.split("=")[0]
        if name.startswith("--") and name[2:] not in names:
            near = difflib.get_close_matches(name[2:], names, 1, cutoff=0.5)
            raise UserError(f"unknown flag {name}." + (f" Did you mean --{near[0]}?" if near else
                                                       " --help lists the flags."))


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
    options = {"help": spec.metadata["help"]}
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if hint is bool and spec.default is False:
        return {**options, "action": "store_true"}
    if hint is bool:
        options |= {"type": _truth, "metavar": "true|false"}
    elif typing.get_origin(hint) is list:
        options |= {"type": typing.get_args(hint)[0], "nargs": "+"}
    else:
        options |= {"type": hint, "choices": spec.metadata["choices"]}
    if spec.default is not REQUIRED:
        return {**options, "default": spec.default}
    if spec.default_factory is not REQUIRED:
        return {**options, "default": spec.default_factory()}
    return {**options, "required": True}


def _truth(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() == "true"
