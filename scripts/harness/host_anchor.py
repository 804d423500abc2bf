"""The process that holds a host's namespaces: it makes the host ready, says so, and waits for the end.

    unshare --net --mount --uts python host_anchor.py '{"name": ..., "folder": ..., "binds": ..., "disks": ...}'

Its end is the end of its standard input, however the program at the other side came to its own. All processes in the
host's network namespace are then killed, and the folder of keys and settings goes. Needs none of the project's
environment.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Hold a host until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a Ctrl-C is for the program, which then ends the standard input
    settings = json.loads(sys.argv[1])
    if settings:
        prepare(settings)
    print("ready", flush=True)
    sys.stdin.read()
    here = str(Path("/proc/self/ns/net").readlink())
    while settings and (others := [pid for pid in processes_in(here) if pid != os.getpid()]):
        for pid in others:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if settings:
        shutil.rmtree(settings["folder"], ignore_errors=True)


def prepare(settings: dict) -> None:
    """Name the host, mount what is its own, and start its loopback.

    settings: name; binds, {place: file that is seen there}; disks, {folder: bytes of a file system of its own}.
    """
    subprocess.run(["hostname", settings["name"]], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    disks = dict(settings["disks"])
    if not Path("/run/sshd").is_dir():  # sshd wants it, and need not write there
        disks["/run"] = 1 << 20
    for folder, size in disks.items():
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for place, source in settings["binds"].items():
        subprocess.run(["mount", "--bind", source, place], check=True)


def processes_in(namespace: str) -> list[int]:
    """The processes of a network namespace ("net:[4026531840]"), those that have ended aside."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if str((folder / "ns" / "net").readlink()) == namespace:
                found.append(int(folder.name))
        except OSError:  # ended, or another user's
            continue
    return found


if __name__ == "__main__":
    main()
