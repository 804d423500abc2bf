"""The link between two hosts: a virtual cable, slowed by the kernel where it can, else by a relay in user space."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

RELAY = Path(__file__).with_name("relay.py")
NOBODY = "02:00:00:00:00:fe"  # no device has this address
DEVICE = "cable0"


@dataclass(frozen=True)
class Link:
    """What a link carries in each direction: bits a second, and the seconds that a packet takes one way."""

    bits_per_s: float
    delay_s: float


class Inside(Protocol):
    """Gives a command as it has to be started to run in the network of a host."""

    def __call__(self, name: str, argv: list[str]) -> list[str]: ...


class Cable:
    """A veth pair, which is as fast as memory is; with netem where it is to be slower."""

    def __init__(self, inside: Inside, pids: dict[str, int], addresses: dict[str, str], link: Link | None):
        self._inside, self._addresses = inside, addresses
        first, second = pids
        peer = ["peer", "name", DEVICE, "netns", str(pids[second])]
        self._run(first, "ip", "link", "add", DEVICE, "type", "veth", *peer)
        for name, address in addresses.items():
            self._run(name, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
            self._run(name, "ip", "link", "set", DEVICE, "up")
        if link is not None:
            self.shape(link)

    def shape(self, link: Link) -> None:
        """Make both directions as slow as this. Raises subprocess.CalledProcessError where the kernel has no netem."""
        limit = max(1000, int(link.bits_per_s * (link.delay_s + 0.5) / 8 / 1500))  # packets that may wait
        shape = ["delay", f"{link.delay_s * 1e6:.0f}us", "rate", f"{link.bits_per_s:.0f}bit", "limit", str(limit)]
        for name in self._addresses:
            self._run(name, "tc", "qdisc", "replace", "dev", DEVICE, "root", "netem", *shape)

    def cut(self) -> None:
        """Send packets to a hardware address that is nobody's: they are dropped, and no one is told."""
        self._neighbours("replace", "lladdr", NOBODY, "nud", "permanent")

    def mend(self) -> None:
        """Send packets to the other host again."""
        self._neighbours("del")

    def close(self) -> None:
        """Nothing: the devices go with the namespaces."""

    def _neighbours(self, action: str, *more: str) -> None:
        for name in self._addresses:
            other = next(address for host, address in self._addresses.items() if host != name)
            self._run(name, "ip", "neighbour", action, other, "dev", DEVICE, *more)

    def _run(self, name: str, *argv: str) -> None:
        subprocess.run(self._inside(name, list(argv)), check=True)


class Relay:
    """The program of relay.py, which is told what to do by its standard input."""

    def __init__(self, outside: list[str], pids: dict[str, int], addresses: dict[str, str], link: Link):
        shape = [str(link.bits_per_s), str(link.delay_s)]
        argv = [sys.executable, "-IS", str(RELAY), *map(str, pids.values()), *addresses.values(), *shape]
        self.process = subprocess.Popen(
            outside + argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._answer()

    def shape(self, link: Link) -> None:
        """Make both directions as slow as this, for packets that come from now on."""
        self._tell(f"shape {link.bits_per_s} {link.delay_s}")

    def cut(self) -> None:
        """Drop all packets, those on their way too."""
        self._tell("cut")

    def mend(self) -> None:
        """Carry packets again."""
        self._tell("mend")

    def close(self) -> None:
        """End the program, and with it both devices."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _tell(self, command: str) -> None:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        if self.process.stdout.readline() != "ok\n":
            raise RuntimeError(f"the relay between the hosts has ended with code {self.process.wait()}")


def kernel_delays(inside: Inside, name: str) -> bool:
    """Whether the kernel can delay packets (netem)."""
    argv = ["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "0ms"]
    if subprocess.run(inside(name, argv), capture_output=True).returncode:
        return False
    subprocess.run(inside(name, ["tc", "qdisc", "del", "dev", "lo", "root"]), check=True)
    return True
