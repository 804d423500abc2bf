"""srun and scontrol for two hosts on one machine: what SLURM sets in each task, and how it ends a job step.

    srun [--kill-on-bad-exit=1] [--wait=SECONDS] [--OPTION[=VALUE] ...] COMMAND ARGUMENTS ...
    scontrol requeue JOB | scontrol show hostnames LIST

`install` writes both into a folder for the PATH of a batch script. TWO_HOSTS in the environment says how a process is
started on each node ({node: [words before the command]}); a real srun has SLURM's daemons there. One task a node. The
exit code is the largest of the tasks', as srun's. With --kill-on-bad-exit a task that fails has the others asked to end
(TERM) at once, and killed after KILL_WAIT.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

KILL_WAIT = 30.0  # seconds, SLURM's default
REQUEUED = "requeued"  # the file beside the stand-ins that names each job to be put back into the queue


def install(folder: Path) -> None:
    """Write the programs srun and scontrol."""
    folder.mkdir(parents=True)
    for name in ("srun", "scontrol"):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{Path(__file__).resolve()}" {name} "$@"\n')
        program.chmod(0o755)


def batch_environment(nodes: Sequence[str], job: int) -> dict[str, str]:
    """What sbatch --nodes N --ntasks-per-node 1 sets in the batch script, which runs on the first node."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_JOBID": str(job),
        "SLURM_JOB_NAME": "slurm.sh",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_NODELIST": ",".join(nodes),
        "SLURM_JOB_NUM_NODES": str(len(nodes)),
        "SLURM_NNODES": str(len(nodes)),
        "SLURM_NTASKS": str(len(nodes)),
        "SLURM_NPROCS": str(len(nodes)),
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_TASKS_PER_NODE": f"1(x{len(nodes)})",
        "SLURM_SUBMIT_DIR": str(Path.cwd()),
        "SLURM_SUBMIT_HOST": nodes[0],
        "SLURMD_NODENAME": nodes[0],
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": "0",
    }


def task_environment(batch: Mapping[str, str], number: int) -> dict[str, str]:
    """What srun sets in a task, beside what the batch script has."""
    nodes = batch["SLURM_JOB_NODELIST"].split(",")
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEPID": "0",
        "SLURM_STEP_NODELIST": batch["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_NODES": str(len(nodes)),
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(nodes)})",
        "SLURM_STEP_LAUNCHER_PORT": "41000",
        "SLURM_LAUNCH_NODE_IPADDR": nodes[0],
        "SLURM_SRUN_COMM_HOST": nodes[0],
        "SLURM_PROCID": str(number),
        "SLURM_NODEID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_GTIDS": str(number),
        "SLURMD_NODENAME": nodes[number],
    }


def srun(words: list[str]) -> int:
    """Run the command as one task on each node; returns the exit code."""
    options = []
    while words and words[0].startswith("-"):
        options.append(words.pop(0))
    nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
    where = json.loads(os.environ["TWO_HOSTS"])
    here = ["env", f"--chdir={Path.cwd()}"]
    tasks = {
        node: subprocess.Popen([*where[node], *here, *words], env=os.environ | task_environment(os.environ, number))
        for number, node in enumerate(nodes)
    }
    for asked in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(asked, lambda number, _: signal_all(tasks, number))
    bad_exit = "--kill-on-bad-exit=1" in options
    deadline = None
    told = set()
    while any(task.poll() is None for task in tasks.values()):
        failed = {node: task.returncode for node, task in tasks.items() if task.returncode}
        for number, (node, code) in enumerate(failed.items()):
            if node not in told:
                told.add(node)
                print(f"srun: error: {node}: task {number}: Exited with exit code {code}", file=sys.stderr, flush=True)
        if failed and bad_exit and deadline is None:
            deadline = time.monotonic() + KILL_WAIT
            signal_all(tasks, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            signal_all(tasks, signal.SIGKILL)
        time.sleep(0.05)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks.values())


def signal_all(tasks: Mapping[str, subprocess.Popen], number: int) -> None:
    """Send a signal to each task that runs."""
    for task in tasks.values():
        if task.poll() is None:
            with contextlib.suppress(OSError):
                task.send_signal(number)


def scontrol(words: list[str]) -> int:
    """Note a job that is put back into the queue, or print the hosts of a list."""
    if words[0] == "requeue":
        place = Path(os.environ["PATH"].split(os.pathsep)[0]) / REQUEUED
        with place.open("a") as file:
            file.write(words[1] + "\n")
        return 0
    print("\n".join(words[2].split(",")))
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](sys.argv[2:]))
