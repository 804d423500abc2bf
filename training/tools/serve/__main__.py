"""Serve: models answer side by side over HTTP, and a reward model scores; with a page, and scores for training runs.

    python -m training.serve --models base=BASE sft=out/sft ppo=out/ppo/actor --reward_model_name_or_path out/reward

    curl -X PUT localhost:8000 -H 'Content-Type: application/json' -d '{"prompt": "Review : the film"}'

docs/serve.md describes all requests and answers. The program needs fastapi and uvicorn: pip install .[serve]
"""

import importlib.util
import sys
import warnings
from collections.abc import Sequence

from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.serve.flags:ServeFlags", __doc__)

from engine.errors import UserError
from training.config.parsing import parse_flags
from training.runtime.environment import program
from training.runtime.launch import leave, quiet_libraries
from training.tools.serve.flags import ServeFlags

NEEDED = ("fastapi", "uvicorn")


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Run the service with the flags of the command line until it is ended; returns the exit code."""
    args = parse_flags(ServeFlags, sys.argv[1:] if argv is None else argv, __doc__.splitlines()[0])
    check_installed()
    return run(args)


def check_installed() -> None:
    """Raise UserError if a package that only the service needs is not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"the service needs {' and '.join(missing)}, and {'it is' if len(missing) == 1 else 'they are'} not "
            "installed. Run: pip install '.[serve]' -c constraints.txt"
        )


def run(args: ServeFlags) -> int:
    """Load the models and answer requests until the service is ended; returns the exit code."""
    quiet_libraries()
    from transformers.utils import logging

    from training.tools.serve.models import load_models
    from training.tools.serve.server import begin_to_listen, listening_socket, serve
    from training.tools.serve.service import Service

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    listening = listening_socket(args.host, args.port)  # fails before models load, which may take minutes
    models = load_models(args)
    begin_to_listen(listening)
    if not args.is_local:
        print(
            f"WARNING: --host {args.host} lets other machines in, and there is no password. Put a proxy with a "
            "password before the service, or leave --host out and use ssh -L.",
            file=sys.stderr,
            flush=True,
        )
    service = Service(models, args.rows_at_once, args.queue_size, min(args.max_answer_seq_len, models.context - 1))
    host, port = listening.getsockname()[:2]
    named = f"[{host}]" if ":" in host else host
    told = [*models.by_name, *(["a reward model"] if models.scorer is not None else [])]
    print(f"serves {', '.join(told)} at http://{named}:{port}, {models.context} tokens each", flush=True)
    return serve(service, args, listening)


if __name__ == "__main__":
    leave(main())
