"""What the link between two hosts carries: python -m scripts.two_hosts.measure [--bits_per_s 1e9] [--delay_s 0.005]

Prints the time of an empty message there and back, the rate of one TCP connection, and the relay's share of a core.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from scripts.two_hosts.hosts import Link, TwoHosts

PORT, BYTES, MESSAGES = 5001, 256 << 20, 20
SERVER = f"""
import socket
connection = socket.create_server(("", {PORT})).accept()[0]
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range({MESSAGES}):
    connection.sendall(connection.recv(1))
left = {BYTES}
while left:
    left -= len(connection.recv(min(left, 1 << 20)))
connection.sendall(b".")
"""
CLIENT = f"""
import socket, sys, time
for _ in range(100):
    try:
        connection = socket.create_connection((sys.argv[1], {PORT}))
        break
    except OSError:
        time.sleep(0.1)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range({MESSAGES}):
    begun = time.monotonic()
    connection.sendall(b".")
    connection.recv(1)
    times.append(time.monotonic() - begun)
begun = time.monotonic()
connection.sendall(bytes({BYTES}))
connection.recv(1)
print(sorted(times)[{MESSAGES} // 2], {BYTES} * 8 / (time.monotonic() - begun), time.monotonic() - begun)
"""


def measure(hosts: TwoHosts) -> tuple[float, float, float]:
    """Seconds there and back (median), bits a second of one connection, and the relay's CPU seconds a second."""
    server = hosts.start("node-b", [sys.executable, "-c", SERVER])
    client = hosts.start("node-a", [sys.executable, "-c", CLIENT, "node-b"], stdout=subprocess.PIPE)
    before = _cpu_seconds(hosts)
    there_and_back, rate, seconds = map(float, client.communicate()[0].split())
    server.wait()
    return there_and_back, rate, (_cpu_seconds(hosts) - before) / seconds


def _cpu_seconds(hosts: TwoHosts) -> float:
    if hosts.relay is None:
        return 0.0
    fields = Path(f"/proc/{hosts.relay.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits_per_s", type=float, default=1e9)
    parser.add_argument("--delay_s", type=float, default=0.005)
    arguments = parser.parse_args()
    with TwoHosts(link=Link(arguments.bits_per_s, arguments.delay_s)) as hosts:
        there_and_back, rate, cpu = measure(hosts)
        by = "the kernel" if hosts.relay is None else f"a relay, which takes {cpu:.2f} of a core"
    print(f"{there_and_back * 1e3:.2f} ms there and back, {rate / 1e9:.3f} Gb/s, by {by}")


if __name__ == "__main__":
    main()
