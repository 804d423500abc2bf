"""Two network hosts on this machine, as namespaces of the kernel, joined by a cable as fast as memory.

    with TwoHosts() as hosts:
        hosts.start("node-a", ["ping", "-c3", "node-b"]).wait()

Each has a host name, a network, a loopback, file systems to mount and /dev/shm of its own; processes, users, clock and
all other files are this machine's.

Needs Linux, iproute2 and util-linux, and root or user namespaces; ssh needs root. Nothing is left behind: the hosts end
with the block, with the process that made them, and when that is killed.
"""

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.harness.host_anchor import processes_in

ANCHOR = Path(__file__).with_name("host_anchor.py")
ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
PROGRAMS = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "hostname": "hostname",
}
SHARED_MEMORY = 1 << 30  # bytes of each host's /dev/shm
PATIENCE = 10.0  # seconds for sshd to stand
SSH_SETTINGS = "/etc/ssh/ssh_config"
SSH_PORT = 22  # of each host's own network
SSH_ENVIRONMENT = {  # what deepspeed is told: a host that has not answered for 30 seconds is given up
    "PDSH_RCMD_TYPE": "ssh",
    "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=10 -o ServerAliveCountMax=3",
}
DEVICE = "cable0"
NOBODY = "02:00:00:00:00:fe"  # no device has this address
USER = ["unshare", "--user", "--map-root-user"]
NAMESPACES = ["--net", "--mount", "--uts"]


class TwoHosts:
    """Two hosts for as long as the block lasts; `names`, `hostfile` and `ssh_environment` are there within it.

    separate_disks: folders, which exist, that each host has a file system of its own in, of so many bytes.
    Raises: RuntimeError where this machine cannot (`refusal` says so before).
    """

    names = tuple(ADDRESSES)

    def __init__(self, separate_disks: Mapping[str, int] | None = None):
        self._disks = dict(separate_disks or {})
        self._anchors: dict[str, subprocess.Popen] = {}
        self._house: subprocess.Popen | None = None
        self._started: list[subprocess.Popen] = []
        self._handler = None

    @staticmethod
    def refusal() -> str | None:
        """Why this machine can have no hosts of this kind; None if it can."""
        for program, package in PROGRAMS.items():
            if shutil.which(program) is None:
                return f"there is no {program} ({package} is needed)"
        trial = "ip link add cable0 type veth peer name cable1 && hostname a && mount -t tmpfs tmpfs /dev/shm"
        argv = [*([] if _is_root() else USER), "unshare", *NAMESPACES, "sh", "-c", trial]
        outcome = subprocess.run(argv, capture_output=True, text=True)
        if outcome.returncode:
            return f"network namespaces are not permitted here ({' '.join(outcome.stderr.split())})"
        return None

    @staticmethod
    def ssh_refusal() -> str | None:
        """Why no sshd can stand in the hosts; None if one can."""
        if not _is_root() or Path("/proc/self/setgroups").read_text().strip() != "allow":
            return "sshd needs root to let anyone in, and not that of a user namespace"
        for program in ("ssh", "ssh-keygen", "sshd", "pdsh"):
            if _which(program) is None:
                return f"there is no {program} (openssh-server, openssh-client and pdsh are needed)"
        return None if Path(SSH_SETTINGS).is_file() else f"there is no {SSH_SETTINGS}"

    def __enter__(self) -> "TwoHosts":
        if reason := self.refusal():
            raise RuntimeError(reason)
        self._folder = Path(tempfile.mkdtemp(prefix="two_hosts_"))
        atexit.register(self._close)
        try:
            self._handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        except ValueError:  # not the main thread, which then has to see to it
            self._handler = None
        try:
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        stdout=None,
        **options,
    ) -> subprocess.Popen:
        """Start a process in a host; its number is the program's own. stderr goes with stdout unless it is given.

        env: the whole environment (this process's where None). options: subprocess.Popen's.
        """
        options.setdefault("stderr", subprocess.STDOUT if stdout is not None else None)
        options.setdefault("stdin", subprocess.DEVNULL)
        where = ["env", f"--chdir={Path(cwd or '.').absolute()}"]  # within the host, whose folders may be its own
        argv = self.inside(name, [*where, *map(str, argv)])
        process = subprocess.Popen(argv, env=None if env is None else dict(env), stdout=stdout, **options)
        self._started.append(process)
        return process

    def inside(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command that runs this one in a host."""
        user = [] if _is_root() else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self._anchors[name].pid}", *user, *NAMESPACES, "--", *argv]

    def processes(self, name: str) -> list[int]:
        """The processes in a host, its anchor and what sshd has of its own aside."""
        own = self._anchors[name].pid
        network = str(Path(f"/proc/{own}/ns/net").readlink())
        return [pid for pid in processes_in(network) if pid != own and _name_of(pid) != "sshd"]

    def cut(self) -> None:
        """Send packets to a hardware address that is nobody's: they are dropped, and no one is told."""
        self._neighbours("replace", "lladdr", NOBODY, "nud", "permanent")

    def mend(self) -> None:
        """Send packets to the other host again."""
        self._neighbours("del")

    def _neighbours(self, action: str, *more: str) -> None:
        for name, other in zip(self.names, reversed(self.names), strict=True):
            self._run(name, "ip", "neighbour", action, ADDRESSES[other], "dev", DEVICE, *more)

    def _run(self, name: str, *argv: str) -> None:
        subprocess.run(self.inside(name, argv), check=True)

    def _build(self) -> None:
        names = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        binds = {"/etc/hosts": str(self._folder / "hosts")}
        with_ssh = self.ssh_refusal() is None
        if with_ssh:
            binds |= write_ssh_files(self._folder)
        outside: list[str] = []
        if not _is_root():
            self._house = self._anchor(USER, {})
            outside = ["nsenter", f"--target={self._house.pid}", "--user", "--preserve-credentials", "--"]
        disks = {"/dev/shm": SHARED_MEMORY} | self._disks
        for name in self.names:
            settings = {"name": name, "folder": str(self._folder), "binds": binds, "disks": disks}
            self._anchors[name] = self._anchor([*outside, "unshare", *NAMESPACES], settings)
        first, second = self.names
        peer = ["peer", "name", DEVICE, "netns", str(self._anchors[second].pid)]
        self._run(first, "ip", "link", "add", DEVICE, "type", "veth", *peer)
        for name, address in ADDRESSES.items():
            self._run(name, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            self._run(name, "ip", "link", "set", DEVICE, "up")
        self.hostfile = self._folder / "hostfile"
        self.hostfile.write_text("".join(f"{name} slots=1\n" for name in self.names))
        self.ssh_environment = SSH_ENVIRONMENT if with_ssh else {}
        if with_ssh:
            with (self._folder / "sshd.log").open("wb") as log:
                for name in self.names:
                    self.start(name, [_which("sshd"), "-D", "-e", "-f", str(self._folder / "sshd_config")], stdout=log)
            self._wait_for_ssh()

    def _anchor(self, before: list[str], settings: dict) -> subprocess.Popen:
        argv = [*before, sys.executable, "-IS", str(ANCHOR), json.dumps(settings)]
        anchor = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        if anchor.stdout.readline() != "ready\n":
            raise RuntimeError(f"a host could not be made ready (exit code {anchor.wait()})")
        return anchor

    def _wait_for_ssh(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for name in self.names:
            while self.start(name, ["ssh", name, "true"], stdout=subprocess.DEVNULL).wait():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"sshd does not stand in {name}: {(self._folder / 'sshd.log').read_text()}")
                time.sleep(0.1)

    def _close(self) -> None:
        atexit.unregister(self._close)
        for anchor in [*self._anchors.values(), *filter(None, [self._house])]:
            anchor.stdin.close()
        for anchor in [*self._anchors.values(), *filter(None, [self._house])]:
            anchor.wait()
            anchor.stdout.close()
        self._anchors, self._house = {}, None
        for process in self._started:
            process.wait()
        self._started.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None


def _is_root() -> bool:
    return os.geteuid() == 0


def _name_of(pid: int) -> str:
    """The name of a process's program; "sshd" for one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "sshd"


def write_ssh_files(folder: Path) -> dict[str, str]:
    """Write keys, and settings of ssh's server and client; what is to be seen in their place: {place: file}.

    No setting of the user's is used or changed: an `ssh` in a host finds this key and asks nothing.
    """
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"Port {SSH_PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\n"
        "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nMaxStartups 100\n"
        "UseDNS no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  Port {SSH_PORT}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  BatchMode yes\n"
        "  LogLevel ERROR\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  GlobalKnownHostsFile /dev/null\n"
    )
    return {SSH_SETTINGS: str(folder / "ssh_config")}


def _which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")
