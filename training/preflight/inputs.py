"""What the run reads, as this node finds it: models, data and files, with fingerprints that cost little."""

import hashlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import huggingface_hub

from engine.errors import UserError
from engine.models.fingerprint import BLOCK, block_starts, fingerprint
from engine.models.places import base_of, can_be_hub_name, one_line, require_model
from engine.reward.http_exchange import is_this_machine
from training.data.sources import DEEPSPEED_CHAT_FILES, is_path
from training.flags.arguments import RunFlags
from training.flags.user_function import names_file
from training.preflight.node import Input

MODELS, DATA = "model_name_or_path", ("data_path", "dataset_name")
OTHER_REWARDS = ("reward_function", "reward_url")
CONNECT_SECONDS = 5.0  # to a reward server
FILES_READ = 256  # of a folder with more, their names and sizes count alone


def inputs_of(args: RunFlags) -> dict[str, Input]:
    """Each model, data set, function, template and configuration file that the flags name, by flag and value."""
    return {f"--{name} {value}": looked_at(name, value) for name, value in _named(args)}


def _named(args: RunFlags) -> Iterator[tuple[str, str]]:
    for name, value in args.as_dict().items():
        if name.endswith((MODELS, *DATA, "ds_config", "chat_template")) or name in OTHER_REWARDS:
            yield from ((name, one) for one in (value if isinstance(value, list) else [value]) if one)


def looked_at(name: str, value: str) -> Input:
    """What stands at the value of a flag of this name, on this machine or on the Hub."""
    looks: Callable[[str, str], str] = _file
    if name.endswith(MODELS):
        looks = _model
    elif name.endswith(DATA):
        looks = _data
    elif name == "reward_function":
        looks = _function
    elif name == "reward_url":
        looks = _server
    try:
        return Input(content=looks(name, value))
    except (UserError, OSError) as error:
        return Input(problem=one_line(error))


def _model(name: str, path: str) -> str:
    """Its fingerprint, or "" of a name on the Hub that is yet to be fetched."""
    require_model(path, f"--{name}")
    base_of(path, f"--{name}")
    return fingerprint(path, f"--{name}") or ""


def _data(name: str, value: str) -> str:
    if value == DEEPSPEED_CHAT_FILES:
        return content(Path("data"))
    path = Path(value).expanduser()
    if path.exists() or is_path(value) or not can_be_hub_name(value):
        return content(path)
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            return f"commit {huggingface_hub.HfApi().dataset_info(value, timeout=10).sha}"
        except Exception as error:  # of the HTTP library's own kinds too, whichever that is
            raise UserError(
                f"--{name}: there is no file {value}, and no data set of that name on the Hub can be reached "
                f"({one_line(error)})"
            ) from None
    return ""


def _function(name: str, value: str) -> str:
    where = value.rpartition(":")[0]
    return content(Path(where)) if names_file(where) else ""


def _server(name: str, url: str) -> str:
    """An empty text, where the server, or the proxy before it, can be connected to from here; OSError where not."""
    parts = urlsplit(url)
    if not is_this_machine(url) and not proxy_bypass(str(parts.hostname)):
        parts = urlsplit(getproxies().get(parts.scheme, url))
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    with socket.create_connection((parts.hostname, port), timeout=CONNECT_SECONDS):
        return ""


def _file(name: str, value: str) -> str:
    return content(Path(value).expanduser())


def content(path: Path) -> str:
    """A hash of a file, or of all files of a folder: their names, sizes and, of at most so many, blocks at even
    distances, as a model's fingerprint has them.

    Raises: UserError where nothing stands there, OSError where it cannot be read.
    """
    if not path.exists():
        raise UserError(f"there is no {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for number, file in enumerate(files):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size} ".encode())
        if number < FILES_READ:
            with file.open("rb") as opened:
                for start in block_starts(size):
                    opened.seek(start)
                    digest.update(opened.read(BLOCK))
    return digest.hexdigest()
