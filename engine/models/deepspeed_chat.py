"""Reward models in DeepSpeed-Chat's format: pytorch_model.bin with `rwtransformer.*` and `v_head.weight`."""

import json
import zipfile
from pathlib import Path

import torch

from engine.models.reading import read_tokenizer


def is_deepspeed_chat_scorer(path: str) -> bool:
    """Whether a reward model of this format stands in the folder `path`."""
    weights = Path(path) / "pytorch_model.bin"
    if not zipfile.is_zipfile(weights):  # none, or in torch's first format, which is older than DeepSpeed-Chat
        return False
    return "v_head.weight" in torch.load(weights, mmap=True, weights_only=True)


def deepspeed_chat_state(path: str, prefix: str) -> dict:
    """The weights under Hugging Face's names; prefix: the one that its model class has for the trunk."""
    state = torch.load(Path(path) / "pytorch_model.bin", mmap=True, weights_only=True)
    names = {name: name.replace("rwtransformer.", f"{prefix}.", 1).replace("v_head.", "score.", 1) for name in state}
    return {names[name]: tensor for name, tensor in state.items()}


def take_pad_token(config, path: str, what: str) -> None:
    """Put the tokenizer's pad token, where it names one, into the configuration.

    DeepSpeed-Chat reads the score before the first pad token, and its pad token may be the tokenizer's EOS.
    """
    tokenizer_config = Path(path) / "tokenizer_config.json"
    if tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("pad_token"):
        config.pad_token_id = read_tokenizer(path, what).pad_token_id
