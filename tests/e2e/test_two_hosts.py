"""Two network hosts on this machine (scripts/harness/hosts.py): their link carries, is silent when cut, and nothing
stays; and step 3 on both has the numbers of one host. scripts/trial_two_hosts.py tries more.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.harness import ROOT
from scripts.harness.host_launches import launch
from scripts.harness.hosts import TwoHosts
from scripts.harness.programs import command_line, differences, program
from scripts.harness.ranks import ENVIRONMENT, run_ranks

REFUSAL = TwoHosts.refusal()
pytestmark = pytest.mark.skipif(REFUSAL is not None, reason=f"no two hosts on this machine: {REFUSAL}")

ECHO = """
import socket
connection = socket.create_server(("", 5002)).accept()[0]
while message := connection.recv(100):
    connection.sendall(socket.gethostname().encode() + b" heard " + message)
"""
ASK = """
import socket, sys, time
while True:
    try:
        connection = socket.create_connection(("node-b", 5002), timeout=1)
        break
    except OSError:
        time.sleep(0.1)
for line in sys.stdin:
    connection.settimeout(0.3 if line == "into the void\\n" else 60)
    try:
        connection.sendall(line.encode())
        print(connection.recv(100).decode().strip(), flush=True)
    except TimeoutError:
        print("silence", flush=True)
"""
KEEPER = """
import subprocess, sys
from scripts.harness.hosts import TwoHosts
with TwoHosts() as hosts:
    sleeper = hosts.start("node-b", ["sleep", "1000"], stdout=subprocess.DEVNULL)
    print(sleeper.pid, hosts.hostfile.parent, flush=True)
    sys.stdin.read()
"""


def test_a_connection_outlives_a_cut_that_nobody_is_told_of(tmp_path):
    (tmp_path / "own").mkdir()
    with TwoHosts(separate_disks={str(tmp_path / "own"): 1 << 20}) as hosts:
        hosts.start("node-b", [sys.executable, "-c", ECHO])
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        client = hosts.start("node-a", [sys.executable, "-c", ASK], **pipes)

        def answer(message: str) -> str:
            client.stdin.write(message + "\n")
            return client.stdout.readline().strip()

        assert answer("one") == "node-b heard one"
        hosts.cut()
        assert answer("into the void") == "silence"
        hosts.mend()
        assert answer("two").startswith("node-b heard into the void")  # the kernel sends again what was not confirmed

        for name in hosts.names:
            argv = ["sh", "-c", "cat own/host; hostname | tee own/host"]
            written = hosts.start(name, argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert written.communicate()[0] == name.encode() + b"\n", "the other host's file is seen"
    assert not list((tmp_path / "own").iterdir())


def test_hosts_end_with_the_program_that_made_them_even_when_it_is_killed():
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    sleeper, folder = keeper.stdout.readline().split()
    keeper.send_signal(signal.SIGKILL)
    keeper.communicate()
    ended = subprocess.run(["timeout", "60", "tail", f"--pid={sleeper}", "-f", "/dev/null"])
    assert ended.returncode == 0
    deadline = time.monotonic() + 60
    while Path(folder).exists():
        assert time.monotonic() < deadline, "the keys of its ssh are still there"
        time.sleep(0.05)


def test_two_hosts_give_the_numbers_and_models_of_one(tiny, tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    short = {"max_steps": 1, "actor_zero_stage": 3, "critic_zero_stage": 3}
    words = {name: command_line(tiny.flags(3, output_dir=tmp_path / name, **short)) for name in ("one", "two")}
    assert run_ranks("scripts.harness.programs:run_words", step=3, words=words["one"]) == [0, 0]
    with TwoHosts() as hosts:
        ended = launch("torchrun", hosts, program(3), words["two"], tmp_path / "printed").end(within=600.0)
    assert (ended.code, ended.left) == (0, ()), ended.text
    assert differences(tmp_path / "one", tmp_path / "two") == []
