"""What the programs make of the environment that they are started in."""

import os
import shutil
import socket
import sysconfig

import pytest
import torch

from engine import distributed
from engine.errors import UserError
from scripts.harness import free_port
from training.program.environment import AGENTS_STORE, check_port, own_programs_first


def test_programs_of_this_python_are_found_without_its_activation(tmp_path, monkeypatch):
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    own_programs_first()
    assert shutil.which("ninja") == str(tmp_path / "ninja")
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"
    own_programs_first()
    assert os.environ["PATH"] == f"{tmp_path}:/usr/bin:/bin"


@pytest.fixture
def port(monkeypatch) -> int:
    """Where this process, a run's rank 0, is to serve the others; tests before may have left it a group that stands."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name in ("RANK", AGENTS_STORE):
        monkeypatch.delenv(name, raising=False)
    found = free_port()
    monkeypatch.setenv("MASTER_PORT", str(found))
    return found


def test_a_port_that_another_run_meets_at_is_refused_on_rank_0_alone(port, monkeypatch):
    check_port()
    served = distributed.key_value_store("127.0.0.1", port, serve=True)
    with pytest.raises(UserError, match=rf"port {port} .* is in use.*--master_port"):
        check_port()
    monkeypatch.setenv("RANK", "1")
    check_port()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(AGENTS_STORE, "True")  # torchrun serves it
    check_port()
    monkeypatch.delenv(AGENTS_STORE)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)  # it is this process's own store
    check_port()
    del served


def test_a_port_that_a_run_has_just_left_is_free(port):
    with socket.create_server(("127.0.0.1", port)) as server:
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps the port in TIME_WAIT
        client.close()
    check_port()


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_process_without_a_port_asks_for_none(value, port, monkeypatch):
    if value is None:
        monkeypatch.delenv("MASTER_PORT")
    else:
        monkeypatch.setenv("MASTER_PORT", value)
    check_port()
