"""What nodes of a run have to agree on, compared at its start, in the second that they need to find each other."""

from engine import distributed
from engine.errors import SharedError, UserError
from training.flags.arguments import RunFlags
from training.preflight import comparison
from training.preflight.comparison import Weight
from training.preflight.letters import answer_all, collect, letter, linger, nodes_of
from training.preflight.mailbox import Mailbox, NoAnswer
from training.preflight.patience import Patience
from training.preflight.table import told
from training.preflight.words import told_hosts
from training.program.hosts import on_several_hosts

ANSWER = 45.0  # seconds in which rank 0's store answers, once it was reached


def agree(args: RunFlags) -> Mailbox | None:
    """At the start of a run on several hosts (all ranks call this, before they join): compare what is known without
    measuring, print what differs, and raise SharedError on all ranks where they cannot work together.

    Returns: what is to be kept until the process group stands. Ranks that do not come are missed by the watch.
    """
    if not on_several_hosts():
        return None
    own = letter(args, thorough=False)
    box, refusal = _told_by_first(own) if distributed.rank() else _compared(own)
    if refusal:
        raise SharedError(f"the nodes of this run do not fit together: {refusal}.")
    return box


def _told_by_first(own: dict) -> tuple[Mailbox, str]:
    """What rank 0 finds."""
    box = Mailbox.reached("start", float("inf"))
    try:
        with Patience(ANSWER) as patience:
            box.post(own)
            refusal = box.wait(float("inf"), patience.renew)["refusal"]
            box.post({"heard": True})
    except NoAnswer as error:
        raise UserError(f"{error}. Look at what it has printed.") from None
    return box, refusal


def _compared(own: dict) -> tuple[Mailbox, str]:
    """By rank 0: who is there, and why they cannot work together, empty if they can. Warnings are printed."""
    box = Mailbox.served("start")
    letters = collect(box, own, distributed.world_size(), float("inf"))
    nodes = nodes_of(letters)
    found = comparison.in_short(nodes)
    versions = ", ".join(f"{name} {nodes[0].versions[name]}" for name in ("torch", "deepspeed"))
    print(f"{len(nodes)} nodes ({told_hosts([node.host for node in nodes])}): {versions}", flush=True)
    for line in told([one for one in found if one.weight is Weight.WARNING]):
        print(line, flush=True)
    faults = [one for one in found if one.weight is Weight.FAULT]
    refusal = "; ".join(f"{told_hosts(one.hosts)}: {one.text}" for one in faults)
    answer_all(box, letters, {"refusal": refusal})
    if refusal:
        linger(box, len(letters) - 1)
    return box, refusal
