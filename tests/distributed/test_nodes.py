"""Ranks as hosts: what differs between them is named before models are loaded; so is a rank that does not come, or that
computes on another device."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from engine import distributed
from engine.errors import UserError
from scripts.harness import free_port
from scripts.harness.programs import Tiny, command_line
from scripts.harness.ranks import run_ranks
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.runtime import nodes


def compared(words: list[str], folders: list[str], other: str | None = None, **environment: str) -> tuple[str, str]:
    """What is raised and what is warned of, with one rank a host. folders: where each rank's data are. other: another
    version of deepspeed than the first host has; environment: of the second host."""
    rank, warned = distributed.rank(), []
    os.chdir(folders[rank])
    os.environ |= environment if rank else {}
    found = nodes.versions() | ({"deepspeed": other} if rank and other else {})
    with (
        mock.patch.object(socket, "gethostname", lambda: f"node-{'ab'[rank]}"),
        mock.patch.object(distributed, "local_rank", lambda: 0),
        mock.patch.object(nodes, "versions", lambda: found),
        mock.patch.object(nodes, "print_line", warned.append),
    ):
        try:
            nodes.check_nodes(parse_flags(RLHFFlags, words, ""))
        except UserError as error:
            return str(error), "".join(warned)
    return "", "".join(warned)


def all_compared(words: list[str], same: str, changed: str, without: str) -> list[tuple[str, str]]:
    """`compared` of hosts with the same data, another version, other data, no data, and other variables."""
    return [
        compared(words, [same, same]),
        compared(words, [same, same], other="0.18.0"),
        compared(words, [same, changed]),
        compared(words, [same, without]),
        compared(words, [same, same], NCCL_DEBUG="INFO", NCCL_SOCKET_IFNAME="eth1"),
    ]


def test_what_differs_between_two_hosts_is_named(tmp_path):
    for name, line in (("same", '{"prompt": "w04"}\n'), ("changed", '{"prompt": "w05"}\n'), ("without", None)):
        (tmp_path / name).mkdir()
        if line:
            (tmp_path / name / "rows.jsonl").write_text(line)
    words = command_line(Tiny(tmp_path).flags(3, output_dir=tmp_path / "out", data_path="rows.jsonl"))
    folders = {name: str(tmp_path / name) for name in ("same", "changed", "without")}
    found = run_ranks("tests.distributed.test_nodes:all_compared", words=words, **folders)
    (alike, version, data, absent, variables), second = found
    assert second[1:4] == [version, data, absent] and alike == ("", "")
    refused = "the nodes of this run do not fit together: node-b: has "
    assert version[0].startswith(f"{refused}deepspeed 0.18.0, the others ")
    assert data[0].startswith(f"{refused}--data_path rows.jsonl ") and data[0] != absent[0]
    assert "rows.jsonl not readable (there is no rows.jsonl), the others " in absent[0]
    assert variables == ("", "warning: node-b: has NCCL_DEBUG INFO, the others none")


def called(devices: list[str], world: int) -> str:
    """What rank 0 raises if so many of `world` ranks come, which compute on these devices."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    here = threading.local()

    def rank(number: int):
        here.on_gpu = devices[number] == "GPU"
        return nodes.roll_call(3.0, {**place, "RANK": str(number)})

    patched = mock.patch.object(nodes, "on_gpu", lambda: here.on_gpu)
    with patched, ThreadPoolExecutor(len(devices)) as ranks:
        calls = [ranks.submit(rank, number) for number in range(len(devices))]
        return str(calls[0].exception() or "")


def test_a_rank_that_does_not_come_or_computes_elsewhere_is_named(monkeypatch):
    monkeypatch.setattr(nodes, "ranks_of_this_machine", lambda: 1)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu07")
    assert called(["CPU", "CPU"], 2) == ""
    assert called(["CPU", "CPU"], 3).startswith("no answer from rank 2 (node 3 of 3) within 3 s")
    assert called(["GPU", "GPU", "CPU"], 3).startswith("gpu07 computes on CPU, the others on GPU")


def test_missing_ranks_are_told_by_node(monkeypatch):
    monkeypatch.setattr(nodes, "ranks_of_this_machine", lambda: 2)
    assert nodes.absent(dict.fromkeys((0, 1, 4), ("gpu07", "GPU")), 6) == (
        "ranks 2 to 3 (node 2 of 3), rank 5 (node 3 of 3)"
    )
