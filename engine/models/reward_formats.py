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
    """Set the configuration's pad token to the one that the reward model was trained with, or to None.

    DeepSpeed-Chat reads the score at the token before the first pad token. Its config.json always gives EOS as pad
    token. This is true unless the reward model was made from a model with "llama" in its name: then the pad token was
    the tokenizer's own or an added one, and the score is read at EOS. DeepSpeed-Chat writes no tokenizer_config.json;
    if the user has put one into the folder, the pad token is taken from there.

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
    """The factor for the head's output, and the offset that is added then. If config.json has normalize_reward, they
    make (score - mean) / std; otherwise they are 1 and 0.

    Raises: UserError, naming `what` (a flag), if mean or std in config.json is no number, or std is not positive.
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
    """Replace OpenRLHF's settings in a configuration by our own, if it has any: the score is read at the last token
    (EOS, if it is there), and an offset is added.

    Returns: the factor by which the head's weight must still be multiplied.
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
