"""The environment of a process: the variables that a launcher or a script has set, and the streams for its output.

    srun --nodes 4 --ntasks-per-node 8 python training/step3_rlhf.py ...

srun can launch the ranks too, one task for each rank. The variables that SLURM sets for a task are then translated into
those that torch's launchers set. A variable that the user, or a launcher within the task, has already set is not
changed. Thus a user can set MASTER_ADDR and MASTER_PORT; their defaults are the first node and a port that depends on
the job's id.

A failure to print must not end a run: the reader of standard output may be gone, or the disk of a log may be full. Text
that cannot be printed is lost.
"""

import contextlib
import errno
import functools
import json
import os
import re
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.errors import SharedError, UserError

USER_ERROR = 2  # the exit code of a user's mistake
AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" if torchrun serves the store
FIRST_PORT, PORTS = 20000, 12000  # range of ports for srun, below Linux's ports of outgoing connections (from 32768)
NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


def on_several_hosts(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher (deepspeed, torchrun, srun) has started ranks on other hosts too. False in a dry run."""
    here = environment.get("LOCAL_SIZE") or environment.get("LOCAL_WORLD_SIZE")
    return "RANK" in environment and here is not None and here != environment.get("WORLD_SIZE", here)


def from_here(message: str) -> str:
    """The message, preceded by this host's name if there are several hosts: "on gpu07: there is no folder X"."""
    return f"on {socket.gethostname()}: {message}" if on_several_hosts() else message


def own_programs_first() -> None:
    """Put the folder of this Python's programs at the beginning of PATH. One of these programs is ninja, which builds
    extensions.

    If a process is started through ssh, or with the full path of an environment's Python, the environment is not
    activated, and PATH lacks this folder.
    """
    own, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, path])


def check_launch() -> None:
    """Raise UserError if a variable that the launcher sets is not a number, or if RANK is not below WORLD_SIZE."""
    numbers = {
        name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT") if name in os.environ
    }
    for name, value in numbers.items():
        if not (value.isascii() and value.isdecimal()):
            raise UserError(f"the environment's {name} is {value!r}, no whole number. Start by deepspeed or torchrun.")
    rank, world = numbers.get("RANK", "0"), numbers.get("WORLD_SIZE", "1")
    if int(rank) >= int(world):
        raise UserError(
            f"the environment's RANK is {rank} of WORLD_SIZE {world}: ranks count from 0. Use deepspeed or torchrun."
        )


def check_meeting_point() -> None:
    """Raise UserError if there are several processes but MASTER_ADDR or MASTER_PORT is not set: they would wait for
    each other for ever."""
    world = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name, "0") in ("", "0")]
    if int(world) > 1 and missing:
        raise SharedError(
            f"the environment's WORLD_SIZE is {world}, but it has no {' and no '.join(missing)}, where the processes "
            "meet. Start by deepspeed, torchrun or srun, which need nothing to be set; or set MASTER_ADDR to the host "
            "of rank 0, and MASTER_PORT to a port that is free there, the same for all processes."
        )


def check_port() -> None:
    """Raise UserError on rank 0 if another process, usually another run, already uses the port MASTER_PORT, at which
    rank 0 has to serve the store.

    This is checked before the imports, which take seconds. If it were checked after them, this run's other ranks would
    join the other run meanwhile, and both runs would end.
    """
    port = int(os.environ.get("MASTER_PORT") or 0)
    served_by_torchrun = os.environ.get(AGENTS_STORE) == "True"
    group = sys.modules.get("torch.distributed")  # if the calling program has a process group, it uses the port
    stands = group is not None and group.is_available() and group.is_initialized()
    if os.environ.get("RANK", "0") != "0" or served_by_torchrun or stands or port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as torch does: a port that was just closed is free
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"port {port} (MASTER_PORT), where the ranks of this run are to meet, is in use, by another run "
                    f"perhaps. Give this one another: deepspeed --master_port NUMBER"
                ) from None


def check_gpus() -> None:
    """Raise UserError if this host has GPUs that torch cannot use. Only the host's first rank raises it."""
    from engine.zero.gpu_support import usable_gpus  # imports torch, which takes seconds; flags are checked first

    try:
        usable_gpus()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise SharedError(str(error)) from None


# SLURM


def is_slurm_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process or its launcher. False in a batch script, which is not a task."""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def of_srun(environment: Mapping[str, str]) -> dict[str, str]:
    """{name: value} of those variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT that are
    not set yet, computed from SLURM's variables. {} if srun did not start this process, if the step has a single task,
    or if another launcher has set the rank.

    Raises: UserError if SLURM's variables are invalid.
    """
    if not is_slurm_task(environment) or "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks == 1:
        return {}
    counts, node = _tasks_by_node(environment), _number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise UserError(f"SLURM_NODEID is {node}, but SLURM names tasks of {len(counts)} nodes ({counts}).")
    told = {
        "RANK": _number(environment, "SLURM_PROCID"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": _number(environment, "SLURM_LOCALID"),
        "LOCAL_SIZE": counts[node],
        "MASTER_ADDR": first_host(_given(environment, *NODE_LISTS)),
        "MASTER_PORT": FIRST_PORT + _number(environment, "SLURM_JOB_ID") % PORTS,
    }
    return {name: str(value) for name, value in told.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first node of a list in SLURM's notation: "gpu07" for "gpu[07-09,12],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else "")


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """The number of tasks of the SLURM step on each node. SLURM writes [8, 8, 8, 4] as "8(x3),4"."""
    text = _given(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"SLURM says {text!r} of the tasks by node, which cannot be read. Set LOCAL_SIZE yourself.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(environment: Mapping[str, str], *names: str) -> int:
    value = _given(environment, *names)
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"the environment's {names[0]} is {value!r}, no whole number.")
    return int(value)


def _given(environment: Mapping[str, str], *names: str) -> str:
    """The value of the first one of these variables that is set. Raises UserError if none is set."""
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None:
        raise UserError(
            f"srun has started this process, but its environment has no {' or '.join(names)}. Pass on what SLURM sets "
            "(srun --export=ALL), or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    return value


# Output.

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun sets this variable for its ranks


class Unfailing:
    """A stream whose `write` and `flush` never raise an error. Text that cannot be written is lost. Control characters
    are written as escapes (`harmless`), since names of files, models and columns may be a stranger's."""

    def __init__(self, stream):
        self.stream, self.lost = stream, False

    def write(self, text: str) -> int:
        """Write the text if this is possible."""
        try:
            bar = text.startswith("\r")  # a progress bar, which begins its line again
            self.stream.write("\r" * bar + harmless(text[bar:]))
        except (OSError, ValueError):  # ValueError: the stream was closed
            self.lost = True
        return len(text)

    def flush(self) -> None:
        """Flush the stream if this is possible."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self.lost = True

    def __getattr__(self, name: str):
        return getattr(self.stream, name)


def keep_printing() -> None:
    """Replace standard output and standard error, so that from now on printing never raises an error, and never writes
    a control character. Each program calls this first."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(
            stream, Unfailing
        ):  # None: the stream was closed when the process began
            setattr(sys, name, Unfailing(stream))


def print_error(error: UserError) -> int:
    """Print a mistake once, on rank 0 or on the only rank that raised it; returns the exit code."""
    if os.environ.get("RANK", "0") == "0" or not isinstance(error, SharedError):
        text = shown(error)
        message = f"error: {text if isinstance(error, SharedError) else from_here(text)}"
        print(message, file=sys.stderr, flush=True)
        write_error_file(message)
    else:
        time.sleep(5)  # the launcher kills all ranks when one ends: let the main rank print first
    return USER_ERROR


def program(main: Callable[..., int]) -> Callable[..., int]:
    """The main function of a program of one process, which prints mistakes and then returns exit code 2."""

    @functools.wraps(main)
    def run(*args, **kwargs) -> int:
        keep_printing()
        try:
            return main(*args, **kwargs)
        except UserError as error:
            return print_error(error)

    return run


def flush_all(code: int) -> None:
    """Flush the output. If some output was lost, end the process immediately with this exit code: Python's normal exit
    would try to write again, and fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if any(getattr(stream, "lost", False) for stream in (sys.stdout, sys.stderr)):
        os._exit(code)


def visible(text: str) -> str:
    """The text in one line. Newlines, tabs and unprintable characters are shown as escapes: \\n, \\t, \\x1b."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown(error: UserError) -> str:
    """The error's mistakes, each in one line."""
    return "\n".join(visible(str(mistake)) for mistake in error.args)


def harmless(text: str) -> str:
    """The text with control characters escaped (\\x1b), for text that another process may have written."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def print_line(message: str) -> None:
    """Print the message on standard error with control characters escaped (`harmless`), if standard error can be
    written."""
    with contextlib.suppress(OSError):
        print(harmless(message), file=sys.stderr, flush=True)


def write_error_file(message: str) -> None:
    """Have torchrun's report of a failure end with this message instead of a link to torchrun's manual. Does nothing
    without torchrun."""
    path = os.environ.get(ERROR_FILE)
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
