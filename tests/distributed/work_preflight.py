"""Run by ranks, each of which stands for a host of its own: --preflight, and what is compared at a run's start."""

import contextlib
import io
import os
import socket
from dataclasses import replace
from unittest import mock

from engine import distributed
from engine.errors import UserError
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
