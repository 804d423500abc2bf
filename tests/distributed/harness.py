"""Run a function in several real processes that form a process group, and bring back what each returns.

    one, two = run_ranks("tests.distributed.work_gradients:stage_gradients", world=2, stage=3)

On CPUs the processes are forked from one that has imported the libraries, once a session: their imports take longer
than most of what is asked. Starting still costs, so one launch should answer many questions; the assertions stand in
the parent.
"""

import gc
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch

from scripts.harness import free_port

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0  # seconds
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
IMPORTED = ["training.ppo_trainer"]  # and no pyarrow, which starts a thread


def run_ranks(target: str, world: int = 2, timeout: float = TIMEOUT, **kwargs) -> list:
    """What `target`, "package.module:function", returns for `kwargs` on each of `world` ranks, in rank order.

    Arguments and results travel by torch.save. Raises RuntimeError with the end of the failing rank's error output when
    a rank fails, and with everyone's when the time is over; all processes are then killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.save(kwargs, Path(folder) / "kwargs.pt")
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        context = _context()
        processes = []
        try:
            for rank in range(world):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(context.Process(target=_main, args=(target, folder, own), daemon=True))
                processes[-1].start()
            _wait(processes, target, folder, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world)]


def _context() -> multiprocessing.context.BaseContext:
    """How ranks are started: forked on CPUs; anew on GPUs, which no forked process can use after its parent."""
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # libraries read theirs when they are imported
        forkserver.ensure_running()
    return context


def _wait(processes: list[BaseProcess], target: str, folder: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        codes = [process.exitcode for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(1.0)  # the rank that failed first may not be the one noticed first: show all that have by now
            failed = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
            raise RuntimeError(f"{target}: failed on rank {failed}\n" + _tails(folder, failed))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{target}: not done after {timeout:.0f} s\n" + _tails(folder, range(len(processes))))
        time.sleep(0.05)


def _tails(folder: str, ranks) -> str:
    return "\n".join(f"--- rank {rank}\n{_log(folder, rank).read_text(errors='replace')[-6000:]}" for rank in ranks)


def _log(folder: str, rank: int) -> Path:
    return Path(folder) / f"log_{rank}.txt"


def _result(folder: str, rank: int) -> Path:
    return Path(folder) / f"result_{rank}.pt"


def _main(target: str, folder: str, environment: dict[str, str]) -> None:
    """One rank: join the group, call the function, leave its result in a file."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with _log(folder, int(environment["RANK"])).open("wb") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())

    from engine import distributed
    from engine.zero.communication import init

    init(timeout_minutes=TIMEOUT / 60)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    gc.freeze()  # the engines collect garbage as they are built, which need not walk through all of torch each time
    result = function(**torch.load(Path(folder) / "kwargs.pt", weights_only=False))
    torch.save(result, _result(folder, distributed.rank()))
    distributed.barrier()
    distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # in an orderly exit gloo's threads may abort (seen), though all is done
