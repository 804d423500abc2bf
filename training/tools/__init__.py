"""Further programs beside the three training steps, and what takes part in a run (`callbacks`). The steps know none of
them: only where they are started as programs do they ask for `callbacks()`."""

from training.runtime.callbacks import Callback


def callbacks() -> tuple[Callback, ...]:
    """What takes part in each run of the three programs. Cards come before the upload, which uploads them."""
    from training.tools import cards
    from training.tools.memory.callback import Compared

    return Compared(), cards.Cards(), cards.Upload()
