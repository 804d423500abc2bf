"""Serve: models answer side by side over HTTP, and a reward model scores; with a page, and scores for training runs.

    four-engine-rlhf serve --models base=BASE sft=out/sft ppo=out/ppo/actor --reward_model_name_or_path out/reward

    curl -X PUT localhost:8000 -H 'Content-Type: application/json' -d '{"prompt": "Review : the film"}'

docs/serve.md describes all requests and answers.
"""

import signal
import sys
from collections.abc import Sequence

from training.runtime.first_look import first_look

if __name__ == "__main__":
    first_look("training.tools.serve.flags:ServeFlags", __doc__)

from training.config.parsing import parse_flags
from training.runtime.environment import program
from training.runtime.launch import leave, quiet_libraries
from training.tools.serve.flags import ServeFlags


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Load the models, and answer requests until TERM or Ctrl-C; returns the exit code."""
    args = parse_flags(ServeFlags, sys.argv[1:] if argv is None else argv, __doc__)
    quiet_libraries()
    from transformers.utils import logging

    from training.tools.serve.models import load_models
    from training.tools.serve.server import Server

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    server = Server(args)  # fails before models load, which may take minutes; until then requests wait
    models = load_models(args)
    if not args.is_local:
        print(
            f"WARNING: --host {args.host} lets other machines in, and there is no password. Put a proxy with a "
            "password before the service, or leave --host out and use ssh -L.",
            file=sys.stderr,
            flush=True,
        )
    told = list(models.by_name)
    if models.scorer is not None:
        limit = models.scorer.reader.limit
        told.append("a reward model" + f" (texts of up to {limit} of its own tokens)" * (limit != models.context))
    print(f"serves {', '.join(told)} at {server.url}, {models.context} tokens each", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve(models)
    except KeyboardInterrupt:
        print("ended", flush=True)
    return 0


if __name__ == "__main__":
    leave(main())
