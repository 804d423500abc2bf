"""The reward that a user names: module:function or path/to/file.py:function; a RewardSource class will do, too."""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from engine.errors import UserError, shortened
from engine.reward.base import RewardSource


def load_function(name: str) -> Callable:
    """Import a function that can be called as `function(prompts, responses)`, or with `rows=` as well; or a class of
    RewardSource that is made of the tokenizer.

    Modules are also looked for in the current directory, behind all else. A file's folder may hold modules that it
    imports.

    Raises: UserError, naming the flag, for a module that is not found or whose import raises, and for a name
    that it lacks or that cannot be called so.
    """
    what = f"--reward_function {name}"
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise UserError(f"{what}: give module:function or path/to/file.py:function.")
    module = _imported_file(Path(where), what) if where.endswith(".py") else _imported(where, Path.cwd(), what)
    if not hasattr(module, attribute):
        raise UserError(f"{what}: {_origin(module)} has no {attribute}. Give the name of a function in it.")
    function = getattr(module, attribute)
    if not callable(function):
        raise UserError(
            f"{what}: {attribute} in {_origin(module)} is {shortened(function, 60)}, which cannot be "
            "called. Give the name of a function."
        )
    _check_parameters(function, what)
    return function


def is_source(function: Callable) -> bool:
    """Whether it is a class of RewardSource, whose objects score rollouts."""
    return isinstance(function, type) and issubclass(function, RewardSource)


def _imported_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path} (relative paths start from {Path.cwd()}).")
    module = _imported(path.stem, path.resolve().parent, what)
    if Path(_origin(module)).resolve() != path.resolve():
        raise UserError(f"{what}: the name {path.stem} belongs to another module, {_origin(module)}. Rename the file.")
    return module


def _imported(module: str, folder: Path, what: str) -> ModuleType:
    """The module, looked for in `folder` too; it stays on the path, for what the module imports later."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(_import_failed(error, module, what)) from None
        raise UserError(f"{what}: there is no module {module}, neither installed nor in {folder}.") from None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UserError(_import_failed(error, module, what)) from None


def _import_failed(error: BaseException, module: str, what: str) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    place = f"{frames[-1].filename}, line {frames[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}, line {error.lineno}"
    return f"{what}: importing {module} raised {type(error).__name__}: {str(error)[:300]} ({place}). Mend the module."


def _check_parameters(function: Callable, what: str) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        raise UserError(f"{what}: its parameters cannot be read. Give a function that is written in Python.") from None
    named = {"rows": []} if "rows" in signature.parameters else {}
    called = "the tokenizer alone"
    try:
        if is_source(function):
            signature.bind(None)
            return
        called = "the prompts and the responses, and rows by name where it has such a parameter"
        signature.bind([], [], **named)
    except TypeError as error:
        raise UserError(f"{what}: it takes {signature}, but is called with {called} ({error}).") from None


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__
