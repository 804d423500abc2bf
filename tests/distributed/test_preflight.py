"""Two ranks as two hosts: the node at fault is named, and of healthy ones bandwidth is measured."""

import contextlib
import io
import os
import re
import socket
from dataclasses import replace
from unittest import mock

from engine import distributed
from engine.errors import UserError
from scripts.harness.programs import Tiny, command_line
from scripts.harness.ranks import run_ranks
from training.config.parsing import parse_flags
from training.config.step3 import RLHFFlags
from training.tools.preflight import facts, preflight


def looked(words: list[str], broken: list[str]) -> dict[str, tuple[int | str | None, str]]:
    """(exit code or message, what was printed) by case; `broken`: words with a model that is not there, of rank 1."""
    rank, found = distributed.rank(), {}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    preflight.REPORTS = 60.0
    preflight.SIZES_CPU, preflight.A_SIZE = (1 << 10, 1 << 16), 0.01

    def case(name: str, call, words: list[str], other: str | None = None) -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(len(found))  # the store is the same each time
        args = parse_flags(RLHFFlags, words, "")
        args.dtype = "fp32"
        code, versions = None, facts.all_versions()
        if other:
            versions["deepspeed"] = replace(versions["deepspeed"], shown=other, same=other)
        with contextlib.ExitStack() as held:
            said = held.enter_context(contextlib.redirect_stdout(io.StringIO()))
            held.enter_context(contextlib.redirect_stderr(said))
            held.enter_context(mock.patch.object(socket, "gethostname", lambda: f"node-{'ab'[rank]}"))
            held.enter_context(mock.patch.object(facts, "all_versions", lambda: versions))
            try:
                code = call(args)
            except UserError as error:
                code = str(error)
        found[name] = code if isinstance(code, int | str) else None, said.getvalue()

    case("started alike", preflight.agree, words)
    case("started with another version", preflight.agree, words, "0.18.0" if rank else None)
    case("without the model", preflight.run, broken if rank else words)
    case("healthy", preflight.run, words)
    return found


def test_two_hosts_are_compared_and_measured(tmp_path):
    flags = Tiny(tmp_path).flags(3, output_dir=tmp_path / "out", actor_zero_stage=3, critic_zero_stage=3)
    words, missing = command_line(flags), command_line({**flags, "actor_model_name_or_path": str(tmp_path / "none")})
    first, second = run_ranks("tests.distributed.test_preflight:looked", words=words, broken=missing)

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
