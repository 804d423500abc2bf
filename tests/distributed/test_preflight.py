"""Two ranks as two hosts: the node at fault is named, and of healthy ones bandwidth is measured."""

import re

from scripts.harness.programs import Tiny, command_line
from tests.distributed.harness import run_ranks


def test_two_hosts_are_compared_and_measured(tmp_path):
    flags = Tiny(tmp_path).flags(3, output_dir=tmp_path / "out", actor_zero_stage=3, critic_zero_stage=3)
    words, missing = command_line(flags), command_line({**flags, "actor_model_name_or_path": str(tmp_path / "none")})
    first, second = run_ranks("tests.distributed.work_preflight:looked", words=words, broken=missing)

    raised, said = first["started alike"]
    assert raised is None
    assert re.fullmatch(r"2 nodes \(node-a, node-b\): torch \S+, deepspeed \S+\n", said)
    assert second["started alike"] == (None, "")

    raised, _ = first["started with another version"]
    assert re.fullmatch(
        r"the nodes of this run do not fit together: node-b: has deepspeed 0.18.0, the others \d\S*. Install the same "
        "on all nodes.",
        raised,
    )
    assert second["started with another version"] == (raised, "")

    code, said = first["without the model"]
    assert code == second["without the model"][0] == 2
    assert f"fault: node-b: --actor_model_name_or_path {tmp_path / 'none'}: " in said
    assert said.endswith("bandwidth: not measured, since a node is at fault\npreflight: at fault: node-b\n")

    code, said = first["healthy"]
    assert code == second["healthy"][0] == 0
    assert said.splitlines()[0].split() == ["node-a", "node-b"]
    assert re.search(r"^output shared +written +yes$", said, re.MULTILINE)
    assert re.search(r"between 2 nodes, 2 ranks: \S+ GB/s \(1 KiB .* ms, 64 KiB .* ms\)$", said, re.MULTILINE)
    assert said.endswith("preflight: all 2 nodes are healthy\n")
    assert second["healthy"][1] == ""
