"""Looks at a program's command line before the imports that take seconds: `--help`, and a flag that is misspelt, are
answered at once.

    if __name__ == "__main__":
        first_look("training.config.step3:RLHFFlags", __doc__)

The flags' choices are tables of the library (advantage estimators, ...), whose functions need torch. So the look is
taken in a forked process, in which an empty class stands for whatever other libraries would give: the tables have their
names, and none of their functions is called. The flags' values are checked later, with the libraries.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys

from engine.errors import SharedError, UserError
from training.runtime.environment import flush_all, on_several_hosts, print_error

GO_ON = 3  # exit code of the forked process: the program may begin
REAL = ("engine", "training", "psutil", "yaml")  # imported as they are, as Python's own modules


def first_look(flags: str, description: str) -> None:
    """End the program if its command line asks for help (code 0) or cannot be parsed (code 2). With several hosts
    nothing is done: a mistake may be one host's alone, and telling the others needs torch.

    flags: the dataclass of the program's flags, as MODULE:CLASS. description: the program's docstring.
    """
    if on_several_hosts() or "SLURM_PROCID" in os.environ:
        return
    flush_all(0)
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code in (0, 2):
            os._exit(code)
        return
    code = GO_ON
    with contextlib.suppress(BaseException):  # whatever it is, the program itself will meet it and report it
        code = _look(*flags.split(":"), description)
    flush_all(code)
    os._exit(code)


def _look(module: str, name: str, description: str) -> int:
    """The code with which the program should end, or GO_ON."""
    sys.meta_path.insert(0, _Finder())
    parsing = importlib.import_module("training.config.parsing")
    flags = getattr(importlib.import_module(module), name)
    try:
        parsing.parse_flags(flags, sys.argv[1:], description, validate=False)
    except UserError as error:
        return print_error(SharedError(*error.args))  # all ranks were given the same flags
    except SystemExit:  # argparse has printed the help
        return 0
    return GO_ON


class _StandIn(type):
    """The class of the empty classes: each attribute, and the result of each call, is such a class again."""

    def __getattr__(cls, name: str):
        if name.startswith("__") and name != "__len__":  # Python asks for these to learn what an object can do
            raise AttributeError(name)
        return _empty(name)

    def __call__(cls, *args, **kwargs):
        return _empty(cls.__name__)


def _empty(name: str) -> _StandIn:
    return _StandIn(name, (), {})


class _Finder(importlib.abc.Loader):
    """Finds, for every module of another library, a module of empty classes."""

    def find_spec(self, fullname, path=None, target=None):
        root = fullname.partition(".")[0]
        if root in REAL or root in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module):
        module.__getattr__ = _empty
