"""Several real processes that form a process group: a function in them, or a whole program.

    one, two = run_ranks("tests.distributed.work_gradients:stage_gradients", world=2, stage=3)
    code = ForkedProgram("training/step3_rlhf.py", words, ranks=2, stdout=log, stderr=log).wait()

On CPUs they are forked from a process that has imported the libraries, once a session: imports take longer than most of
what is asked. Starting still costs, so one start should answer many questions; the assertions stand in the parent.
Functions also run on fewer GPUs than ranks, which then share them.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch

from scripts.harness import ROOT, free_port

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
        processes = _started(_function, world, (target, folder), {})
        try:
            _wait(processes, target, folder, timeout)
        finally:
            _killed(processes)
        return [torch.load(_result(folder, rank), weights_only=False) for rank in range(world)]


class ForkedProgram:
    """A program on so many ranks, as if a launcher had started it: where one fails, the others are asked to end.

    program: a file, or a module's name. stdout, stderr: files that all ranks append to. environment: beside this
    process's own.
    """

    def __init__(
        self,
        program: Path | str,
        words: Sequence[str],
        ranks: int = 2,
        *,
        stdout: Path,
        stderr: Path,
        environment: Mapping[str, str] | None = None,
    ):
        given = str(program), list(words), str(Path.cwd()), str(stdout), str(stderr)
        self._processes = _started(_program, ranks, given, environment or {})

    def poll(self) -> int | None:
        """The exit code of the rank that failed first, or 0; None while one runs. A signal's is negative."""
        codes = [process.exitcode for process in self._processes]
        failed = next((code for code in codes if code), None)
        if failed and None in codes:
            self._end()
        return failed if failed or None in codes else 0

    def wait(self, timeout: float = TIMEOUT) -> int:
        """What `poll` says at the end; after so many seconds all are killed, and TimeoutError raised."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"not done after {timeout:.0f} s")
            time.sleep(0.05)
        return code

    def kill(self) -> None:
        """End all ranks at once, and wait until they are gone."""
        _killed(self._processes)

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(30.0)
        self.kill()


def _started(main, world: int, args: tuple, environment: Mapping[str, str]) -> list[BaseProcess]:
    """Processes that call `main(*args, environment)`, each with the environment of its rank."""
    context = _context()
    group = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            own = {**os.environ, **ENVIRONMENT, **group, "RANK": str(rank), "LOCAL_RANK": str(rank), **environment}
            processes.append(context.Process(target=main, args=(*args, own), daemon=True))
            processes[-1].start()
    except BaseException:
        _killed(processes)
        raise
    return processes


def _context() -> multiprocessing.context.BaseContext:
    """How ranks are started: forked on CPUs; anew on GPUs, which no forked process can use after its parent."""
    if os.environ.get("DS_ACCELERATOR") != "cpu" and torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # libraries read theirs when they are imported
        forkserver.ensure_running()
    return context


def _killed(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


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


def _function(target: str, folder: str, environment: Mapping[str, str]) -> None:
    """One rank: join the group, call the function, leave its result in a file."""
    log = _log(folder, int(environment["RANK"]))
    _become(environment, ROOT, log, log)

    from engine import distributed
    from engine.zero.communication import init

    init(timeout_minutes=TIMEOUT / 60, share_gpus=True)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    gc.freeze()  # the engines collect garbage as they are built, which need not walk through all of torch each time
    result = function(**torch.load(Path(folder) / "kwargs.pt", weights_only=False))
    torch.save(result, _result(folder, distributed.rank()))
    distributed.barrier()
    distributed.shutdown()
    sys.stdout.flush()
    os._exit(0)  # in an orderly exit gloo's threads may abort (seen), though all is done


def _program(
    program: str, words: list[str], folder: str, stdout: str, stderr: str, environment: Mapping[str, str]
) -> None:
    """One rank: what Python does with a program's command line."""
    _become(environment, folder, stdout, stderr)
    sys.argv = [program, *words]
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def _become(environment: Mapping[str, str], folder: Path | str, stdout: Path | str, stderr: Path | str) -> None:
    """Have this process the environment, the working directory and the files that its output is added to."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        with Path(path).open("ab") as file:
            os.dup2(file.fileno(), stream.fileno())
