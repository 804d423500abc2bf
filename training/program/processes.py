"""What the kernel says of processes: whose numbers mean the same, and of one of them its state and its beginning."""

import os
from pathlib import Path


def this_machine() -> str | None:
    """What two processes have in common that can see each other: the boot of the machine, and the container's process
    numbers; None where the kernel does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None


def state_of(pid: int) -> str | None:
    """The state of a process by the kernel: "R", "S", "T" where it is stopped; None where it is not there."""
    fields = _fields(pid)
    return fields[0] if fields else None


def start_of(pid: int) -> str | None:
    """When a living process began, in ticks since the machine did; None for one that is gone or only waited for."""
    fields = _fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def is_another_rank(pid: int) -> bool:
    """Whether this is another process of this user that was started with the same words, as ranks are but for
    --local_rank."""
    if pid == os.getpid():
        return False
    try:
        same_user = Path(f"/proc/{pid}").stat().st_uid == os.getuid()
        return same_user and _command(pid) == _command(os.getpid())
    except OSError:
        return False


def _command(pid: int) -> list[bytes]:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return [word for word in words if not word.startswith(b"--local_rank=")]


def _fields(pid: int) -> list[str]:
    """Those behind the name, which may hold anything: from the state on (proc(5)); none where there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
