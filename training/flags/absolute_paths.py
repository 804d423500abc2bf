"""Paths of flags made absolute before anything runs that could change the working directory, as a user's code may."""

import dataclasses
import os
from pathlib import Path

from training.flags.arguments import ProgramFlags

WRITTEN = ("output_dir", "tensorboard_path", "data_output_path")
"""Folders that may still have to be made; what is read is a path only if it stands there, else a name on the Hub."""
READ = ("_path", "_dataset_name", "config", "chat_template", "resume", "reward_function")


def make_paths_absolute(args: ProgramFlags) -> None:
    """Replace each flag's relative path by the absolute one; links stay as they are."""
    for spec in dataclasses.fields(args):
        value = getattr(args, spec.name)
        if spec.name in WRITTEN and value is not None:
            setattr(args, spec.name, _to_be_made(value))
        elif spec.name.endswith(READ) and isinstance(value, str):
            setattr(args, spec.name, _if_there(value, spec.name))
        elif spec.name.endswith(READ) and isinstance(value, list):
            setattr(args, spec.name, [_if_there(item, spec.name) for item in value])


def _to_be_made(value: str) -> str:
    """The absolute path, without `..`: behind a folder that is yet to be made, that would name another place later."""
    path = Path(value).expanduser().absolute()
    return os.path.realpath(path) if ".." in path.parts else str(path)


def _if_there(value: str, name: str) -> str:
    """The absolute path of what stands there, of a function's file too; the name as it is where nothing does."""
    if name == "resume" and value == "auto":
        return value
    where, colon, function = value.rpartition(":") if name == "reward_function" else (value, "", "")
    path = Path(where).expanduser()
    try:
        there = bool(where) and path.exists() and not (colon and path.is_dir())
    except OSError:  # a name that is too long, a folder that may not be entered
        there = False
    return f"{path.absolute()}{colon}{function}" if there else value
