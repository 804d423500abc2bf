"""Reward models of OpenRLHF: config.json says what their head is called, and what their scores are normalised by.

Source: OpenRLHF/OpenRLHF 3c3be623, models/model.py (`_get_reward_model`), cli/train_rm.py, trainer/rm_trainer.py.
"""

import math
from pathlib import Path

from engine.errors import UserError
from engine.models.on_disk import tensors_of
from engine.models.weight_files import weight_files

ARCHITECTURE = "RewardModel"  # their class, by config.json
_SETTINGS = ("value_head_prefix", "normalize_reward", "mean", "std")


def head_name(config) -> str:
    """What the score head is called in a reward model's files: "score", as transformers has it, unless config.json
    gives another name."""
    return getattr(config, "value_head_prefix", "score")


def names_for_transformers(config) -> dict[str, str]:
    """The names in the files that transformers has others for."""
    head = head_name(config)
    return {} if head == "score" else {f"{head}.weight": "score.weight"}


def renamed_state(path: str, config, what: str) -> dict | None:
    """The weights in a folder by transformers' names; None where they have these already.

    Raises: UserError, naming `what` (a flag), for a name on the Hub.
    """
    names = names_for_transformers(config)
    if not names:
        return None
    if not Path(path).is_dir():
        raise UserError(
            f"{what}: the head of {path} is called {head_name(config)} (value_head_prefix of config.json), which is "
            "read from a folder alone. Download it (hf download), and give its folder."
        )
    found = {name: tensor for file in weight_files(Path(path), what) for name, tensor in tensors_of(file).items()}
    return {names.get(name, name): tensor for name, tensor in found.items()}


def gain_and_offset(config, path: str, what: str) -> tuple[float, float]:
    """What the head's output is multiplied by, and what is added then: (score - mean) / std with normalize_reward.

    Raises: UserError, naming `what` (a flag), where config.json has something else for them than numbers.
    """
    if not getattr(config, "normalize_reward", False):
        return 1.0, 0.0
    mean, std = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
    numbers = all(isinstance(value, int | float) and math.isfinite(value) for value in (mean, std))
    if not numbers or std <= 0:
        raise UserError(
            f"{what}: {path}/config.json has normalize_reward, with mean {mean!r} and std {std!r}: these are to be a "
            "number and a positive one. Mend them, or set normalize_reward to false."
        )
    return 1 / std, -mean / std


def take_settings(config, path: str, what: str) -> float:
    """Have a configuration say in our words what it says in OpenRLHF's, if it does: scores are read at the last token,
    EOS included, whatever pads; and their offset.

    Returns: what the head's weight is still to be multiplied by.
    Raises: UserError as `gain_and_offset` does.
    """
    if not any(hasattr(config, name) for name in _SETTINGS[:2]):
        return 1.0
    gain, config.score_offset = gain_and_offset(config, path, what)
    config.score_position = "last"
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in ends:
        config.pad_token_id = None  # by which transformers' own class reads what is saved at EOS, too
    for name in _SETTINGS:
        vars(config).pop(name, None)
    return gain
