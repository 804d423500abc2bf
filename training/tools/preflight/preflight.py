"""Checks that nodes are fit for a run: thoroughly with --preflight, and quickly at the start of each run on several
hosts.

    run(args)      each rank sends its facts to rank 0, and rank 0 compares them and prints a table; if all nodes are
                   healthy, the ranks join and time an all-reduce; no model is loaded
    agree(args)    facts that need no measuring are compared, and a run whose nodes differ is refused

Facts are collected before the process group exists. Therefore a node can report its facts even if it has another
version of a library or cannot be reached by NCCL.
"""

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine import distributed
from engine.distributed import RankGroup
from engine.errors import SharedError, UserError
from engine.zero.accelerator import on_gpu
from training.config.flags import RunFlags
from training.runtime.agreement import USER_ERROR, MeetingPoint
from training.runtime.environment import harmless, on_several_hosts
from training.runtime.processes import phase
from training.runtime.watch import JOINING, watching
from training.tools.preflight.exchange import Exchange, facts_of_rank, hosts_by_rank, nodes_of
from training.tools.preflight.facts import Fact, nearest
from training.tools.preflight.table import (
    Finding,
    absent,
    cannot_begin,
    findings,
    hosts_in_short,
    lines_of,
    table,
    verdict,
)

REPORTS = 45.0  # seconds without a further report, after which the remaining ranks count as missing
OTHERS = 15.0  # seconds for which rank 0 waits for other ranks' facts if one rank's program cannot begin
LOOKS = 3.0  # seconds for which a node looks for the file that rank 0 has written
STUCK = 3.0  # minutes: the measurement of bandwidth ends if no rank has moved for so long
SIZES_GPU = (1 << 10, 1 << 20, 1 << 25, 1 << 28)  # sizes of the timed all-reduces in bytes, on GPUs
SIZES_CPU = (1 << 10, 1 << 16, 1 << 20, 1 << 23)  # the same on CPUs
A_SIZE, MOST = 0.4, 20  # limits for one size: seconds of all calls together, and number of calls
ENOUGH = 2.0  # seconds; if one call takes longer, no larger size is timed


def run(args: RunFlags) -> int:
    """Check all nodes; returns the exit code: 0 if all are healthy, 2 if one is at fault."""
    try:
        return _follow(args) if distributed.rank() else _lead(args)
    except UserError as error:
        print(harmless(f"error: on {socket.gethostname()}: {error}"), file=sys.stderr, flush=True)
        return USER_ERROR


def agree(args: RunFlags) -> Exchange | None:
    """Compare the facts that need no measuring, at the start of a run on several hosts, and print differences (all
    ranks call this, before the process group exists).

    Returns: an object that must be kept until the process group exists; None on a single host. This function has no
    time limit of its own, because the watch thread notices ranks that do not arrive.
    Raises: SharedError on all ranks if the nodes cannot work together.
    """
    if not on_several_hosts():
        return None
    own = facts_of_rank(args, thorough=False)
    if distributed.rank():
        exchange = Exchange.reached("start", float("inf"))
        exchange.post(own)
        refusal = str(exchange.published("verdict").get("refusal", ""))
    else:
        exchange = Exchange.served("start")
        nodes = nodes_of(exchange.facts(own, distributed.world_size(), float("inf")))
        found = findings(nodes)
        versions = ", ".join(f"{name} {nodes[0].fact(name).shown}" for name in ("torch", "deepspeed"))
        _print(f"{len(nodes)} nodes ({hosts_in_short([node.host for node in nodes])}): {versions}")
        _print(*lines_of([one for one in found if one.warning]))
        faults = [f"{hosts_in_short(one.hosts)}: {one.text}" for one in found if not one.warning]
        refusal = "; ".join(faults)
        exchange.publish("verdict", {"refusal": refusal})
        if refusal:
            exchange.linger("verdict", distributed.world_size() - 1)
    if refusal:
        raise SharedError(f"the nodes of this run do not fit together: {refusal}.")
    return exchange


# --preflight


def _lead(args: RunFlags) -> int:
    """Rank 0's part of --preflight; returns the exit code."""
    world, failed = distributed.world_size(), _CannotBegin()
    exchange = Exchange.served("preflight") if world > 1 else None
    with _file_beside(Path(args.output_dir)) as file:
        if exchange:
            exchange.publish("look", {"file": file})
        own = facts_of_rank(args)
        if file and exchange:
            own["facts"]["output shared"] = asdict(Fact(shown="written"))
        posted = exchange.facts(own, world, REPORTS, failed.known_for_a_while) if exchange else {0: own}
    nodes = nodes_of(posted)
    silent = absent(hosts_by_rank(world), posted, REPORTS)
    told = {host for one in failed.findings for host in one.hosts}
    silent = [*failed.findings, *(one for one in silent if not told.intersection(one.hosts))]
    found = [*silent, *findings(nodes)]
    _print(*table(nodes, found), "", *lines_of(found))
    fault = any(not one.warning for one in found)
    if exchange:
        exchange.publish("verdict", {"fault": fault})
        if not fault:
            _measure(args, len(nodes))
        else:
            _print("bandwidth: not measured, since a node is at fault")
            exchange.linger("verdict", len(posted) - 1)
            failed.let_others_hear()
    _print(verdict(len(nodes), found))
    return USER_ERROR if fault else 0


def _follow(args: RunFlags) -> int:
    """The other ranks' part of --preflight; returns the exit code."""
    own = facts_of_rank(args)
    exchange = Exchange.reached("preflight", REPORTS)
    file = str(exchange.published("look").get("file", ""))
    if "facts" in own and file:
        own["facts"]["output shared"] = asdict(_sees(Path(file)))
    exchange.post(own)
    if exchange.published("verdict").get("fault", True):
        return USER_ERROR
    _measure(args, 0)
    return 0


class _CannotBegin:
    """Looks for the message of a rank whose program cannot begin (`MeetingPoint`), and decides how long rank 0 then
    still waits for other ranks' facts."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._meeting_point, self._since = MeetingPoint(), float("inf")

    def known_for_a_while(self) -> bool:
        """Whether the message has been known for OTHERS seconds, so that other ranks have had time to post."""
        if not self.findings and (failure := self._meeting_point.failure()) is not None:
            self.findings, self._since = [cannot_begin(failure[0])], time.monotonic()
        return time.monotonic() > self._since + OTHERS

    def let_others_hear(self) -> None:
        """Tell the failed rank that rank 0 has read its message, so that the rank need not print the message."""
        if self.findings:
            self._meeting_point.let_others_hear()


@contextlib.contextmanager
def _file_beside(output_dir: Path) -> Iterator[str]:
    """Write a new file in or above the output folder, so that the other nodes can look for it; yields its path. The
    path is "" if nothing can be written there; the table reports this."""
    with contextlib.ExitStack() as stack:
        try:
            place = nearest(output_dir.absolute())
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=place, prefix=".preflight_")).name
        except OSError:
            file = ""
        yield file


def _sees(file: Path) -> Fact:
    """Whether this node sees the file that rank 0 has written. A network file system may take a moment to show it."""
    deadline = time.monotonic() + LOOKS
    while not file.exists():
        if time.monotonic() > deadline:
            problem = "does not see what rank 0 writes beside --output_dir, which has to be one folder for all nodes"
            return Fact(shown="no", problem=problem)
        time.sleep(0.1)
    return Fact(shown="yes")


def _print(*lines: str) -> None:
    if lines:
        print(harmless("\n".join(lines)), flush=True)


# Bandwidth, measured if all nodes are healthy


def _measure(args: RunFlags, nodes: int) -> None:
    """Join the process group and time an all-reduce over all ranks; rank 0 prints the result (all ranks call this).

    If a host is cut off in the meantime, the watch names the host and ends this process with exit code 1.
    """
    from engine.zero.communication import init

    with watching(args.grace_seconds, STUCK) as watch:
        with phase(JOINING):
            init(STUCK * 10)
            watch.join()
        with phase("measuring bandwidth"):
            found = timed()
        if distributed.is_main():
            between = f"between {nodes} nodes" if nodes > 1 else "within one node"
            _print("bandwidth of each rank's link, by all-reduce:", f"  {between}, {found}")
        distributed.barrier()
        watch.leave(0)
        distributed.shutdown()


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of an all-reduce. ranks: number of ranks. seconds: {bytes of each rank's tensor: seconds of a call}."""

    ranks: int
    seconds: dict[int, float]

    @property
    def bandwidth(self) -> float:
        """The bandwidth in bytes per second of each rank's link, measured with the largest tensor. In a ring of n
        ranks, each link carries 2 (n - 1) / n of the tensor's bytes (NVIDIA/nccl-tests, doc/PERFORMANCE.md,
        03a204a1f38aaea17f1a777885bb2d9600ba7eff)."""
        size = max(self.seconds)
        return 2 * (self.ranks - 1) / self.ranks * size / self.seconds[size]

    def __str__(self) -> str:
        sizes = ((f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB") for size in self.seconds)
        times = ", ".join(f"{size} {1e3 * one:.3g} ms" for size, one in zip(sizes, self.seconds.values(), strict=True))
        return f"{self.ranks} ranks: {self.bandwidth / 1e9:.3g} GB/s ({times})"


def timed() -> Timed:
    """Time an all-reduce of several sizes. The times are those of the slowest rank (all ranks call this)."""
    group = RankGroup(distributed.world_size())

    def slowest(tensor: torch.Tensor, times: int) -> float:
        finish()
        group.all_objects(None)  # wait until all ranks are here
        began = time.perf_counter()
        for _ in range(times):
            group.sum_(tensor)
        finish()
        return max(1e-9, *group.all_objects((time.perf_counter() - began) / times))

    def finish() -> None:
        if on_gpu():
            torch.cuda.synchronize()

    seconds: dict[int, float] = {}
    for size in SIZES_GPU if on_gpu() else SIZES_CPU:
        tensor = torch.zeros(size // 4, device=distributed.device())
        for _ in range(2):  # the first call also makes the connections
            once = slowest(tensor, 1)
        seconds[size] = slowest(tensor, max(1, min(MOST, int(A_SIZE / once))))
        if once > ENOUGH:
            break
    return Timed(group.size, seconds)
