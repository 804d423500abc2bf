"""Reward models in other systems' formats: DeepSpeed-Chat's and OpenRLHF's.

DeepSpeed-Chat's is pytorch_model.bin with `rwtransformer.*` and `v_head.weight`. OpenRLHF's is a Hugging Face folder
whose config.json says what its head is called, and what its scores are normalised by.

Source: OpenRLHF/OpenRLHF 3c3be623, models/model.py (`_get_reward_model`), cli/train_rm.py, trainer/rm_trainer.py.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.errors import UserError
from engine.models.reading import read_tokenizer
from engine.models.weight_files import headers, tensors_of, weight_files

FILE = "pytorch_model.bin"


def is_deepspeed_chat_scorer(path: str, what: str) -> bool:
    """Whether a reward model of this format stands in the folder `path`.

    Raises: UserError, naming `what` (a flag), where weights are broken, or there are none.
    """
    folder = Path(path)
    if not folder.is_dir() or weight_files(folder, what) != [folder / FILE]:
        return False
    return "v_head.weight" in headers(folder, what)


def deepspeed_chat_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """Hugging Face's name for each weight. prefix: the prefix that its model class has for the layers."""
    return {name: name.replace("rwtransformer.", f"{prefix}.", 1).replace("v_head.", "score.", 1) for name in names}


def deepspeed_chat_state(path: str, prefix: str) -> dict:
    """The weights under Hugging Face's names."""
    file = Path(path) / FILE
    state = torch.load(file, mmap=True, weights_only=True) | tensors_of(file)
    names = deepspeed_chat_names(state, prefix)
    return {names[name]: tensor for name, tensor in state.items()}


def take_pad_token(config, path: str, what: str, trust_remote_code: bool = False) -> None:
    """Put the pad token that the model was trained with into its configuration, or None.

    DeepSpeed-Chat reads the score before the first pad token, and config.json says that this is EOS whatever it was.
    It was EOS, and the score stands on the token before it, unless the model that the reward model was made from has
    "llama" in its name: those keep their own pad token, or get one that is added, and are read at EOS. Such a folder
    has a tokenizer_config.json only if its user put it there, and then that one says which the pad token is.

    Source: microsoft/DeepSpeedExamples 83757d9c, dschat/utils: utils.py, `get_tokenizer` and `save_hf_format`;
    model/model_utils.py, `create_hf_model`.
    """
    tokenizer_config = Path(path) / "tokenizer_config.json"
    if tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("pad_token"):
        config.pad_token_id = read_tokenizer(path, what, trust_remote_code=trust_remote_code).pad_token_id
        return
    saved = json.loads((Path(path) / "config.json").read_text())
    if "llama" in (saved.get("_name_or_path") or saved["model_type"]):
        config.pad_token_id = None


ARCHITECTURE = "RewardModel"  # their class, by config.json
_SETTINGS = ("value_head_prefix", "normalize_reward", "mean", "std")


def head_name(config) -> str:
    """The name of the score head in a reward model's files: "score", as in transformers, unless config.json gives
    another."""
    return getattr(config, "value_head_prefix", "score")


def names_for_transformers(config) -> dict[str, str]:
    """{name in the files: transformers' name}, where these differ."""
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
    """The factor of the head's output and the offset added after it: (score - mean) / std with normalize_reward.

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
