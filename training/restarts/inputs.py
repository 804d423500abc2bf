"""What a run reads at paths that it is given, besides data: fingerprints by which a run that goes on knows them again.

A restart point holds them among its settings.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from engine.models.checking import fingerprint, frozen_fingerprint
from engine.reward.built_in import BUILT_IN
from training.flags.rlhf_arguments import RLHFFlags
from training.flags.user_function import load_function, names_file

MODELS = ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")
FUNCTION = "reward_function"
BASE = "base of "  # before the flag: the weights that stay as they are beside LoRA's factors


def fingerprints(args: RLHFFlags) -> dict[str, str]:
    """By flag, those of the models and of the reward function's source that are on this machine; with LoRA also those
    of the models' bases, which differ where a model is an adapter."""
    found = {}
    for name in MODELS:
        path = getattr(args, name)
        if path is not None and args.looks_at(path):
            found[f"--{name}"] = fingerprint(path, f"--{name}")
            if any(map(args.lora, args.lora_models)):
                found[f"{BASE}--{name}"] = frozen_fingerprint(path, f"--{name}")
    if args.reward_function:
        found[f"--{FUNCTION}"] = sources_fingerprint(args.reward_function)
    return {name: value for name, value in found.items() if value is not None}


def sources_fingerprint(names: Sequence[str]) -> str | None:
    """A hash of the files of all functions; that of its file where there is one. None where there are no files."""
    found = [each for name in names if name not in BUILT_IN if (each := source_fingerprint(name)) is not None]
    return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest() if found else None


def source_fingerprint(name: str) -> str | None:
    """A hash of the files in which the reward function `name` is named and written; a class's too. None where there are
    none. What these files import is not looked at."""
    function, where = load_function(name), name.rpartition(":")[0]
    files = {where if names_file(where) else getattr(sys.modules[where], "__file__", None), _written_in(function)}
    texts = [Path(file).read_bytes() for file in sorted(filter(None, {_resolved(file) for file in files}))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else None


def changed_models(now: Mapping[str, object], then: Mapping[str, object], contents: Callable[[str], str]) -> list[str]:
    """Flags of models that name the same path in both settings, with other contents; contents: flag -> its key."""
    return [
        flag
        for flag in (f"--{name}" for name in MODELS)
        if now.get(flag) == then.get(flag)
        and None not in (now.get(contents(flag)), then.get(contents(flag)))
        and now[contents(flag)] != then[contents(flag)]
    ]


def _written_in(function: Callable) -> str | None:
    for candidate in (inspect.unwrap(function), type(function)):
        try:
            return inspect.getsourcefile(candidate)
        except TypeError:  # an object that can be called, or one that is built in
            continue
    return None


def _resolved(file: str | None) -> str | None:
    return None if file is None or not Path(file).is_file() else str(Path(file).resolve())
