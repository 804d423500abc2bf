"""The reward that a user names: module:function or path/to/file.py:function; a RewardSource class will do, too."""

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from engine.errors import UserError, shortened
from engine.git_lfs import refuse_pointers
from engine.reward.base import AgreedReward, RewardSource
from engine.reward.built_in import BUILT_IN
from engine.reward.function import FunctionReward, Signature


def load_function(name: str) -> Callable:
    """Import a function that can be called as `engine.reward.function` has it; or a class of RewardSource that is made
    of the tokenizer.

    Modules are also looked for in the current directory, behind all else. A file's folder may hold modules that it
    imports.

    Raises: UserError, naming the flag, for a module that is not found or whose import raises, and for a name
    that it lacks or that cannot be called so.
    """
    what = f"--reward_function {name}"
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        built_in = " or ".join(BUILT_IN)
        raise UserError(f"{what}: give module:function or path/to/file.py:function, or a built-in one: {built_in}.")
    module = _imported_file(Path(where), what) if names_file(where) else _imported(where, Path.cwd(), what)
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


def names_file(where: str) -> bool:
    """Whether what stands before the function's name is a file's path, of any ending, and not a module's name."""
    return where.endswith(".py") or "/" in where or _is_file(Path(where))


def is_source(function: Callable) -> bool:
    """Whether it is a class of RewardSource, whose objects score rollouts."""
    return isinstance(function, type) and issubclass(function, RewardSource)


def function_source(function: Callable, given: str, tokenizer, rows: Sequence[dict]) -> RewardSource:
    """What --reward_function names, as it scores: a RewardSource class, or a function of texts and of the data's rows.

    given: as the flag names it. rows: rows[index] for the indices of the prompts.
    """
    if is_source(function):
        return AgreedReward.made(function, tokenizer, f"the reward source {given}")
    return FunctionReward(function, tokenizer, rows, given)


def _imported_file(path: Path, what: str) -> ModuleType:
    """The module in a file of any name, which may be a link, and called like an installed module."""
    if not _is_file(path):
        raise UserError(f"{what}: there is no file {path} (relative paths start from {Path.cwd()}).")
    refuse_pointers([path], what)
    path = path.absolute()
    for folder in (path.resolve().parent, path.parent):
        _add_to_path(folder)
    if path.suffix == ".py" and path.stem.isidentifier() and _by_name(path.stem) == path:
        return _imported(path.stem, path.parent, what)  # so that processes which it starts can import it, too
    name = f"reward_function {path}"  # a name that no import statement can mean
    if name not in sys.modules:
        loader = SourceFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, (Exception, SystemExit)):  # whatever the user's code raises
                raise UserError(_import_failed(error, path.name, what)) from None
            raise
    return sys.modules[name]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be entered
        return False


def _by_name(name: str) -> Path | None:
    """The file that `import name` would take the module from, or has taken it from."""
    if name in sys.modules:
        return Path(getattr(sys.modules[name], "__file__", None) or "/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin else None


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    importlib.invalidate_caches()


def _imported(module: str, folder: Path, what: str) -> ModuleType:
    """The module, looked for in `folder` too; it stays on the path, for what the module imports later."""
    _add_to_path(folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UserError(_import_failed(error, module, what)) from None
        file = f"{module}.py"  # a dot in a module's name stands for a folder, in a file's name for nothing
        meant = f" For the file give {file}:{what.rpartition(':')[2]}." if _is_file(folder / file) else ""
        raise UserError(f"{what}: there is no module {module}, neither installed nor in {folder}.{meant}") from None
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
    called = "the tokenizer alone"
    try:
        if is_source(function):
            signature.bind(None)
            return
        called = "the prompts and the responses, and by name with rows, or columns of the data"
        Signature.of(function)
    except TypeError as error:
        raise UserError(f"{what}: it takes {signature}, but is called with {called} ({error}).") from None


def _origin(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or module.__name__
