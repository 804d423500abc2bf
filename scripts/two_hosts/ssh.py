"""ssh between two hosts, with keys that are thrown away: what `deepspeed --hostfile` and pdsh need."""

import shutil
import subprocess
from pathlib import Path

CLIENT = "/etc/ssh/ssh_config"
PORT = 22  # of each host's own network


def refusal() -> str | None:
    """Why `deepspeed --hostfile` cannot be tried here; None if it can."""
    for program in ("ssh", "ssh-keygen", "sshd", "pdsh"):
        if _which(program) is None:
            return f"there is no {program} (openssh-server, openssh-client and pdsh are needed)"
    return None if Path(CLIENT).is_file() else f"there is no {CLIENT}"


def write_files(folder: Path) -> dict[str, str]:
    """Write keys and settings of server and client; what is to be seen in their place: {place: file}.

    No setting of the user's is used or changed: an `ssh` in a host finds this key and asks nothing.
    """
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"Port {PORT}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nPidFile none\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\nMaxStartups 100\nUseDNS no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  Port {PORT}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  BatchMode yes\n"
        "  LogLevel ERROR\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n"
        "  GlobalKnownHostsFile /dev/null\n"
    )
    return {CLIENT: str(folder / "ssh_config")}


def server(folder: Path) -> list[str]:
    """The command of a host's sshd, which stays in the foreground."""
    return [str(_which("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")]


def environment() -> dict[str, str]:
    """What deepspeed is told: to reach hosts by ssh, which gives a host up that has not answered for 30 seconds."""
    return {
        "PDSH_RCMD_TYPE": "ssh",
        "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=10 -o ServerAliveCountMax=3",
    }


def _which(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin:/usr/local/sbin")
