"""Reward models in DeepSpeed-Chat's format: pytorch_model.bin with `rwtransformer.*` and `v_head.weight`."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from engine.models.on_disk import tensors_of
from engine.models.reading import read_tokenizer
from engine.models.weight_files import headers, weight_files

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
    """What each weight is called by Hugging Face; prefix: the one that its model class has for the trunk."""
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
