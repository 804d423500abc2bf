"""Starts and ends the programs: parses their flags, reports a user's mistake once, and exits with one of these codes:

    0     done: everything is saved
    1     stopped: something went wrong in the middle of the run (a NaN, a reward function that raises, a dead rank)
    2     a user's mistake, found before anything was written: the same command would fail again in the same way
    75    ended early on request (TERM, USR1, Ctrl-C, the end of the launcher); the run can be resumed

torchrun exits with code 1 if a rank's code is not 0. DeepSpeed's launcher does this too if a signal asked the launcher
itself to end. srun passes the ranks' codes on.
"""

import atexit
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from engine import distributed
from engine.errors import EndedEarly, RunStopped, SharedError, UserError
from engine.files import rust_panics
from training.config.flags import RunFlags, make_paths_absolute
from training.config.parsing import parse_flags
from training.reporting.trackers import check_trackers
from training.runtime import environment, output_folder, stopping
from training.runtime.environment import (
    USER_ERROR,
    flush_all,
    from_here,
    keep_printing,
    print_error,
    print_line,
    visible,
)
from training.runtime.output_folder import check_output_dirs
from training.runtime.processes import phase
from training.runtime.ranks import MeetingPoint
from training.runtime.watch import ENDED_EARLY, JOINING, STOPPED, Watch, watching

COLLECTIVES = 7 * 24 * 60.0  # timeout of a collective call in minutes; the watch thread ends calls that hang earlier


def run(main: Callable, arguments_class: type, description: str, argv: Sequence[str] | None = None) -> int:
    """Parse the flags, join the process group and call `main(args)`; returns the exit code.

    With --dry_run no process group is joined, and only rank 0 calls `main`. A UserError is printed once, without a
    stack trace, by rank 0 or by the only rank that raised it.
    """
    try:
        stopping.forget_unwritten()
        _leave_stdin()
        keep_printing()
        quiet_libraries()
        environment.own_programs_first()
        os.environ.update(environment.of_srun(os.environ))
        environment.check_launch()
    except UserError as error:
        return print_error(error)
    try:
        args = _parse(arguments_class, sys.argv[1:] if argv is None else argv, description)
        make_paths_absolute(args)
    except UserError as error:
        return _print_error_on_all_hosts(error)
    try:
        if not args.dry_run:
            environment.check_port()
        from engine.zero.accelerator import natural_dtype  # imports take seconds; mistyped flags are reported first

        _quiet_transformers()
        args.dtype = args.dtype or natural_dtype()
        if args.dry_run:
            if distributed.is_main():
                with rust_panics():
                    main(args)
            return 0
        environment.check_meeting_point()
        environment.check_gpus()
    except UserError as error:
        return print_error(error)
    try:
        with watching(args.grace_seconds, args.timeout_minutes) as watch:
            return _in_group(main, args, watch)
    finally:
        output_folder.release_lock()


def _in_group(main: Callable, args: RunFlags, watch: Watch) -> int:
    """Join the process group and call `main(args)`; returns the exit code."""
    from engine.zero.communication import init

    try:
        with phase(JOINING):
            store = None
            if environment.on_several_hosts():
                from training.runtime import nodes  # a run on one host needs nothing of it

                store = nodes.roll_call(args.timeout_minutes * 60)
            init(COLLECTIVES)
            watch.join()
        if store is not None:
            nodes.check_nodes(args)
            del store  # rank 0 has served it until all ranks have joined
        with rust_panics():
            main(args)
        if args.preflight and distributed.is_main():
            print("preflight: all ranks are fit for this run", flush=True)
        return _left_together(0, watch)
    except EndedEarly as end:
        if distributed.is_main():
            print_line(str(end))
        return _left_together(ENDED_EARLY, watch)
    except SharedError as error:
        stopping.let_through()  # when one rank ends, a launcher asks the others to; ignore it
        watch.leave(USER_ERROR)
        return print_error(error)
    except UserError as error:
        watch.tell(visible(str(error)), USER_ERROR)
        return USER_ERROR
    except RunStopped as stop:
        watch.tell(f"stopped: {stop}")
    except (SystemExit, KeyboardInterrupt) as leaving:
        place = traceback.extract_tb(leaving.__traceback__)[-1]
        watch.tell(
            f"stopped: {type(leaving).__name__}({leaving}) was raised in {place.filename}, line {place.lineno}, in the "
            "middle of the run: nothing that the run calls may end it. Raise an error that says what is wrong instead."
        )
    except BaseException:
        watch.tell(traceback.format_exc())
    return STOPPED


def _left_together(code: int, watch: Watch) -> int:
    """Leave the process group together with the other ranks; returns the exit code. A launcher could take it for a
    failure if one rank ended before the others."""
    stopping.let_through()
    distributed.barrier()
    watch.leave(code)
    distributed.shutdown()
    return code


def _leave_stdin() -> None:
    """Make standard input empty, so that a library that asks the user a question does not wait for an answer."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)


def _parse(arguments_class: type, argv: Sequence[str], description: str):
    def say(line: str) -> None:
        if int(os.environ.get("RANK", 0)) == 0:
            print(line, flush=True)

    try:
        return parse_flags(arguments_class, argv, description, say)
    except UserError as error:
        raise SharedError(*error.args) from None  # all ranks were given the same flags


def _print_error_on_all_hosts(error: UserError) -> int:
    """Print a mistake in flags; returns the exit code. With several hosts, a mistake may exist on some hosts only, for
    example if a file is missing there. The other ranks learn of it through the store at which the ranks meet."""
    if not environment.on_several_hosts() or not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        return print_error(error)
    text = environment.shown(error)
    if os.environ["RANK"] == "0":
        print_error(error)
        MeetingPoint().announce(f"error: {text}", USER_ERROR)
    elif not MeetingPoint().announce(f"error: {from_here(text)}", USER_ERROR):
        print_line(f"error: {from_here(text)}")
    return USER_ERROR


def leave(code: int) -> NoReturn:
    """End this process with the exit code of `run`.

    The process ends without running the destructors of libraries: in them, gloo's threads have aborted after finished
    runs, which changes the exit code, and NCCL may wait for ranks that have ended. After a finished run the exit
    functions registered in Python are called, so that libraries close their files.
    """
    if not code:
        atexit._run_exitfuncs()
    flush_all(code)
    os._exit(code)


def quiet_libraries() -> None:
    """Have libraries print only warnings and errors, and no progress bars."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler logs its starts and stops at level 5
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch|deepspeed|transformers")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").addFilter(_not_a_missing_gpu)


def _not_a_missing_gpu(record: logging.LogRecord) -> bool:
    """A filter of log records: False for torch's warning that a CUDA toolkit is installed but the machine has no GPU.
    The warning is useless, since extensions are then built for the CPU. Other warnings, such as those about compilers,
    are printed."""
    return not str(record.msg).startswith(("No CUDA runtime is found", "No ROCm runtime is found"))


def _quiet_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if "datasets" in sys.modules:  # imported before its environment variable was set
        sys.modules["datasets"].disable_progress_bars()


def check_run(args: RunFlags, resumed: bool = False) -> None:
    """The first checks of all three training steps: the machine, the output folders, and trackers.

    resumed: whether the output folder holds the run that is resumed. Raises: UserError.
    """
    if not args.dry_run:
        from engine.zero.accelerator import why_not

        reason = why_not(args.dtype)
        if reason is not None:
            raise UserError(f"--dtype {args.dtype}: {reason}")
    check_trackers(args.reports)
    check_output_dirs(args, resumed)
