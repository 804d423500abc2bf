"""--preflight: each rank tells of itself, rank 0 compares and prints, and healthy nodes measure their bandwidth.

Facts travel through the store where ranks are to meet (mailbox.py), before there is a process group and before anything
that can fail on one node alone.
"""

import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine import distributed
from engine.errors import UserError
from training.flags.arguments import RunFlags
from training.preflight import bandwidth, comparison, gathering, promised, run_plan
from training.preflight.comparison import Finding, Weight
from training.preflight.launched import hosts_by_rank
from training.preflight.letters import answer_all, collect, letter, linger, nodes_of
from training.preflight.mailbox import BETWEEN, Mailbox, NoAnswer
from training.preflight.node import Node
from training.preflight.patience import Patience
from training.preflight.table import table, told, verdict
from training.program.joining import MeetingPoint
from training.program.phases import phase
from training.program.roll_call import USER_ERROR
from training.program.watch import JOINING, Watch, watching

REPORTS = 45.0  # seconds without a further report, after which those that are missing are missed
OTHERS = 15.0  # seconds that others are waited for when one cannot begin
LOOKS = 3.0  # seconds that a node looks for what rank 0 has written
SAMPLES = 3  # of clocks
STUCK = 3.0  # minutes in which no rank moves while bandwidth is measured
HEALTHY = 0


def run(args: RunFlags) -> int:
    """Look at all nodes; returns the exit code, 0 where they are healthy and 2 where one is at fault."""
    try:
        if distributed.rank() == 0:
            return _lead(args)
        return _follow(args)
    except (UserError, NoAnswer) as error:
        print(f"error: on {socket.gethostname()}: {error}", file=sys.stderr, flush=True)
        return USER_ERROR


# Rank 0


def _lead(args: RunFlags) -> int:
    world, own = distributed.world_size(), letter(args)
    box = Mailbox.served("preflight") if world > 1 else None
    failed = _Failure()
    letters = collect(box, own, world, REPORTS, failed.settled) if box else {0: own}
    nodes = nodes_of(letters)
    if box:
        nodes = _seeing(box, nodes, Path(args.output_dir))
    planned = run_plan.planned_or_why(args)
    room = 0 if isinstance(planned, str) else run_plan.written(planned)
    silent = comparison.absent(hosts_by_rank(world), letters, REPORTS)
    told_of = {host for one in failed.findings for host in one.hosts}
    silent = [*failed.findings, *(one for one in silent if not told_of.intersection(one.hosts))]
    found = [*silent, *comparison.findings(nodes, room)]
    print("\n".join([*table(nodes, found), "", *told(found)]), flush=True)
    code = USER_ERROR if any(one.weight is Weight.FAULT for one in found) else HEALTHY
    measured = code == HEALTHY and world > 1
    if box:
        answer_all(box, letters, {"measure": measured, "code": code})
    if measured:
        found = [*found, *_with_group(args, nodes)]
    elif world > 1:
        print("bandwidth: not measured, since a node is at fault", flush=True)
        linger(box, len(letters) - 1)
        failed.let_others_hear()
    print(verdict(len(nodes), found), flush=True)
    return code


class _Failure:
    """What a rank has said that cannot begin (training/program/joining.py), and whether others need be waited for."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._meeting_point, self._since = MeetingPoint(), float("inf")

    def settled(self) -> bool:
        """Whether it is known for a while, in which others may have come."""
        if not self.findings and (failure := self._meeting_point.failure()) is not None:
            self.findings, self._since = [comparison.cannot_begin(failure[0])], time.monotonic()
        return time.monotonic() > self._since + OTHERS

    def let_others_hear(self) -> None:
        """The rank need not print it."""
        if self.findings:
            self._meeting_point.let_others_hear()


def _seeing(box: Mailbox, nodes: Sequence[Node], output_dir: Path) -> list[Node]:
    """The nodes with whether they see what rank 0 writes beside its output folder, where it can write there."""
    others = {node.ranks[0]: None for node in nodes[1:]}
    try:
        with tempfile.NamedTemporaryFile(dir=gathering.nearest(output_dir.absolute()), prefix=".preflight_") as file:
            for rank in others:
                box.answer(rank, {"look": file.name})
            deadline = time.monotonic() + 2 * LOOKS
            while None in others.values() and time.monotonic() < deadline:
                for letter in box.letters():
                    if "sees" in letter and letter["rank"] in others:
                        others[letter["rank"]] = bool(letter["sees"])
                time.sleep(BETWEEN)
    except OSError:  # which the table has already
        return list(nodes)
    return [nodes[0], *(replace(node, sees_output=others[node.ranks[0]]) for node in nodes[1:])]


# The others


def _follow(args: RunFlags) -> int:
    own = letter(args)
    box = Mailbox.reached("preflight", REPORTS)
    with Patience(REPORTS) as patience:
        if "node" in own:
            own["clock"] = _clock(box, patience)
        box.post(own)
        while "measure" not in (answer := box.wait(float("inf"), patience.renew)):
            box.post({"sees": _sees(Path(answer["look"]))})
        box.post({"heard": True})
    if answer["measure"]:
        _with_group(args, [])
    return answer["code"]


def _clock(box: Mailbox, patience: Patience) -> dict[str, float]:
    """This clock against rank 0's, by the fastest of several questions: rank 0 answers in the middle of the time that a
    question takes, within half of it (Cristian 1989, Probabilistic clock synchronization)."""
    samples = []
    for _ in range(SAMPLES):
        began, asked = time.monotonic(), time.time()
        box.post({"ask": True})
        told = box.wait(float("inf"), patience.renew)["time"]
        half = (time.monotonic() - began) / 2
        samples.append((half, asked + half - told))
    within, ahead = min(samples)
    return {"ahead": ahead, "within": within}


def _sees(file: Path) -> bool:
    deadline = time.monotonic() + LOOKS
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


# All, where nothing is at fault


def _with_group(args: RunFlags, nodes: Sequence[Node]) -> list[Finding]:
    """Join the process group and measure; rank 0 prints, and gets the nodes that are slow (all ranks call this).

    A host that is cut off meanwhile is named by the watch, which then ends this process with code 1.
    """
    from engine.zero.communication import init

    with watching(args.grace_seconds, STUCK) as watch:
        with phase(JOINING):
            init(STUCK * 10, args.by_node)
            watch.join()
        with phase("measuring bandwidth"):
            everywhere, within = bandwidth.measure()
        found = []
        if distributed.is_main():
            said = promised.lines(nodes, everywhere, within)
            found = [
                Finding(
                    (host,), "bandwidth", "its ranks exchange at less than half of the others' rate", Weight.WARNING
                )
                for host in promised.slower(nodes, within)
            ]
            print(*said, *told(found), sep="\n", flush=True)
        _leave(watch)
    return found


def _leave(watch: Watch) -> None:
    distributed.barrier()
    watch.leave(HEALTHY)
    distributed.shutdown()
