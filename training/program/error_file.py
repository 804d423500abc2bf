"""The file in which torchrun looks for what befell a rank, to say it in its report of the failure."""

import contextlib
import json
import os
import time
from pathlib import Path

ENVIRONMENT = "TORCHELASTIC_ERROR_FILE"


def write_error_file(message: str) -> None:
    """Have torchrun's report end with this message, in place of a link to its manual; without torchrun, nothing."""
    path = os.environ.get(ENVIRONMENT)
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
