"""How a run ends whose models are saved already: whatever goes wrong then is told together with where they are."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.errors import RunStopped


@contextlib.contextmanager
def models_told(saved: Mapping[str, Path]) -> Iterator[None]:
    """Have what goes wrong in here say where the trained models are, where `saved` holds any by then.

    Raises: RunStopped for a stop, for an error of the system (a full disk) and for an exit from within; another
    exception as it is, with a note.
    """
    try:
        yield
    except (RunStopped, OSError, SystemExit) as error:
        if not saved:
            raise
        what = str(error) if isinstance(error, RunStopped) else f"{type(error).__name__}: {error}"
        raise RunStopped(f"{what}\n{where(saved)}") from None
    except Exception as error:
        if saved:
            error.add_note(where(saved))
        raise


def where(saved: Mapping[str, Path]) -> str:
    """A sentence on the models that are saved."""
    return "Training was done by then, and its models are saved: " + ", ".join(map(str, saved.values())) + "."
