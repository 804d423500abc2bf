"""The environment that a launcher, or a script in its place, has given this process: what it lacks, what cannot be."""

import errno
import os
import socket
import sys
import sysconfig

from engine.errors import SharedError, UserError

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True" where torchrun serves the store


def own_programs_first() -> None:
    """Put the folder of this Python's programs at the beginning of PATH: ninja is one, which builds extensions.

    A process that was started through ssh, or by the full path of an environment's Python, has another PATH than the
    shell in which the environment was activated.
    """
    own, path = sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join([own, path])


def check_launch() -> None:
    """Raise UserError for what a launcher, or a script in its place, says of this process and that cannot be so."""
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
    """Raise UserError where several processes are to meet, and nothing says where: they would wait for ever."""
    world = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if os.environ.get(name, "0") in ("", "0")]
    if int(world) > 1 and missing:
        raise SharedError(
            f"the environment's WORLD_SIZE is {world}, but it has no {' and no '.join(missing)}, where the processes "
            "meet. Start by deepspeed, torchrun or srun, which need nothing to be set; or set MASTER_ADDR to the host "
            "of rank 0, and MASTER_PORT to a port that is free there, the same for all processes."
        )


def check_port() -> None:
    """Raise UserError on rank 0 where it is to serve the others at a port that is another's, a second run's mostly.

    It is asked for before the imports that take seconds: ranks that come later would join the other run, and end both.
    """
    port = int(os.environ.get("MASTER_PORT") or 0)
    served_by_torchrun = os.environ.get(AGENTS_STORE) == "True"
    group = sys.modules.get("torch.distributed")  # one that stands already, in a program that calls ours, has the port
    stands = group is not None and group.is_available() and group.is_initialized()
    if os.environ.get("RANK", "0") != "0" or served_by_torchrun or stands or port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does: one that was left just now is free
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(
                    f"port {port} (MASTER_PORT), where the ranks of this run are to meet, is in use, by another run "
                    f"perhaps. Give this one another: deepspeed --master_port NUMBER"
                ) from None


def check_gpus() -> None:
    """Raise UserError where this host has GPUs that torch cannot use; only the first of its ranks tells it."""
    from engine.zero.gpu_support import usable_gpus  # imports torch, which flags are not to wait for

    try:
        usable_gpus()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            raise
        raise SharedError(str(error)) from None
