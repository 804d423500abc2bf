"""Models and data in texts that may become public: a name on the Hub as it is, of what stands on a disk the kind alone.

A run's flags have absolute paths for all that stands on the disk (training/flags/absolute_paths.py), so that what could
be a name on the Hub is one. File and folder names are left out as paths are: they may name customers or people.
"""

import re
from collections.abc import Iterable, Mapping

from training.data.records import ENDINGS
from training.data.sources import DEEPSPEED_CHAT_FILES

_NAME = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")


def is_hub_name(given: str) -> bool:
    """Whether a model's or data set's value of a run's flags is a name on the Hub."""
    found = _NAME.fullmatch(given) is not None and given != DEEPSPEED_CHAT_FILES
    return found and not given.removesuffix(".gz").removesuffix(".zst").endswith(ENDINGS)


def hub_names(given: Iterable[str], known: Mapping[str, str] | None = None) -> list[str]:
    """Those that are names on the Hub; for a folder that is `known` by a name, that."""
    names = [(known or {}).get(path, path) for path in given]
    return [name for name in names if is_hub_name(name)]


def publicly(given: str, what: str, known: Mapping[str, str] | None = None) -> str:
    """What may be said of a model or (`what` "data") a data set, in Markdown."""
    if is_hub_name(given):
        return f"[{given}](https://huggingface.co/{'datasets/' if what == 'data' else ''}{given})"
    if known and given in known:
        name = known[given]
        return f"a local {what}, not on the Hub, which began as [{name}](https://huggingface.co/{name})"
    return f"{'local files' if what == 'data' else f'a local {what}'}, not on the Hub"
