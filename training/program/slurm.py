"""What SLURM tells a task that srun has started, as the environment that torch's launchers set.

    srun --nodes 4 --ntasks-per-node 8 python training/step3_rlhf.py ...

srun is then the launcher, one task a rank. What is set already stays: by a launcher that runs within the task, or by
the user, who may give MASTER_ADDR and MASTER_PORT where the first node or the port is not to be used.
"""

import re
from collections.abc import Mapping

from engine.errors import UserError

FIRST_PORT, PORTS = 20000, 12000  # below those that Linux gives to outgoing connections (32768 to 60999)

NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether srun has started this process, or a launcher that did; a batch script itself is no task."""
    return "SLURM_STEP_ID" in environment and "SLURM_PROCID" in environment


def as_launched(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT of a task, those that are not set yet; none
    of a task that is alone, or that another launcher has given its rank, and where srun did not start this process.

    Raises: UserError where SLURM says something that cannot be.
    """
    if not is_task(environment) or "RANK" in environment or "WORLD_SIZE" in environment:
        return {}
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks == 1:
        return {}
    told = {
        "RANK": _number(environment, "SLURM_PROCID"),
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": _number(environment, "SLURM_LOCALID"),
        "LOCAL_SIZE": _tasks_of_this_node(environment),
        "MASTER_ADDR": first_host(_given(environment, *NODE_LISTS)),
        "MASTER_PORT": FIRST_PORT + _number(environment, "SLURM_JOB_ID") % PORTS,
    }
    return {name: str(value) for name, value in told.items() if name not in environment}


def first_host(nodes: str) -> str:
    """The first of a list of nodes as SLURM writes it: "gpu07" of "gpu[07-09,12],login1"."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else "")


def hosts_by_rank(environment: Mapping[str, str]) -> dict[int, str]:
    """The node of each task of the step, by its number, where srun fills one node after the other (block, its default);
    none where srun did not start this process, or says too little."""
    names = next((environment[name] for name in NODE_LISTS if environment.get(name)), "")
    if not is_task(environment) or not names or "cyclic" in environment.get("SLURM_DISTRIBUTION", ""):
        return {}
    try:
        tasks = _tasks_by_node(environment)
    except UserError:
        return {}
    return dict(enumerate(host for host, count in zip(_hosts(names), tasks, strict=False) for _ in range(count)))


def _hosts(nodes: str) -> list[str]:
    """The nodes of a list as SLURM writes it: "gpu[07-09,12],login1"."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if match is None:
            found.append(part)
            continue
        for numbers in match[2].split(","):
            first, _, last = numbers.partition("-")
            run = range(int(first), int(last or first) + 1)
            found += [f"{match[1]}{number:0{len(first)}d}{match[3]}" for number in run]
    return found


def _tasks_of_this_node(environment: Mapping[str, str]) -> int:
    """How many tasks of the step run on this node."""
    counts, node = _tasks_by_node(environment), _number(environment, "SLURM_NODEID")
    if node >= len(counts):
        raise UserError(
            f"SLURM_NODEID is {node}, but SLURM names tasks of {len(counts)} nodes ({_tasks(environment)})."
        )
    return counts[node]


def _tasks(environment: Mapping[str, str]) -> str:
    return _given(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")


def _tasks_by_node(environment: Mapping[str, str]) -> list[int]:
    """How many tasks of the step run on each node, of numbers such as "8(x3),4"."""
    text = _tasks(environment)
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise UserError(f"SLURM says {text!r} of the tasks by node, which cannot be read. Set LOCAL_SIZE yourself.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _number(environment: Mapping[str, str], *names: str) -> int:
    value = _given(environment, *names)
    if not (value.isascii() and value.isdecimal()):
        raise UserError(f"the environment's {names[0]} is {value!r}, no whole number.")
    return int(value)


def _given(environment: Mapping[str, str], *names: str) -> str:
    """The first of these that is set; raises UserError where none is."""
    value = next((environment[name] for name in names if environment.get(name)), None)
    if value is None:
        raise UserError(
            f"srun has started this process, but its environment has no {' or '.join(names)}. Pass on what SLURM sets "
            "(srun --export=ALL), or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT."
        )
    return value
