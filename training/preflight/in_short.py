"""What nodes of a run have to agree on, compared at its start, in the second that they need to find each other."""

from engine import distributed
from engine.errors import SharedError, UserError
from training.flags.arguments import RunFlags
from training.preflight import comparison
from training.preflight.comparison import Weight
from training.preflight.letters import answer_all, collect, letter, linger, nodes_of
from training.preflight.mailbox import Mailbox, NoAnswer
from training.preflight.table import told, told_hosts
from training.program.hosts import on_several_hosts


def agree(args: RunFlags) -> Mailbox | None:
    """At the start of a run on several hosts (all ranks call this, before they join): compare what is known without
    measuring, print what differs, and raise SharedError on all ranks where they cannot work together.

    Returns: what is to be kept until the process group stands. Ranks that do not come are missed by the watch.
    """
    if not on_several_hosts():
        return None
    own = letter(args, thorough=False)
    if distributed.rank():
        box = Mailbox.reached("start", float("inf"))
        box.post(own)
        try:
            refusal = box.wait(float("inf"))["refusal"]
            box.post({"heard": True})
        except NoAnswer as error:
            raise UserError(f"{error}. Look at what it has printed.") from None
    else:
        box = Mailbox.served("start")
        letters = collect(box, own, distributed.world_size(), float("inf"))
        nodes = nodes_of(letters)
        found = comparison.in_short(nodes)
        refusal = "\n".join(told([one for one in found if one.weight is Weight.FAULT]))
        versions = ", ".join(f"{name} {nodes[0].versions[name]}" for name in ("torch", "deepspeed"))
        print(f"{len(nodes)} nodes ({told_hosts([node.host for node in nodes])}): {versions}", flush=True)
        print(*told([one for one in found if one.weight is Weight.WARNING]), sep="\n", end="\n" * bool(found))
        answer_all(box, letters, {"refusal": refusal})
        if refusal:
            linger(box, len(letters) - 1)
    if refusal:
        raise SharedError(f"the nodes of this run do not fit together.\n{refusal}")
    return box
