"""Reward models in other systems' formats (DeepSpeed-Chat's and OpenRLHF's), and process reward models.

A reward model in DeepSpeed-Chat's format is a file pytorch_model.bin with `rwtransformer.*` and `v_head.weight`. A
reward model in OpenRLHF's format is a Hugging Face folder whose config.json gives the name of the head, and the mean
and standard deviation by which scores are normalised.

Source: OpenRLHF/OpenRLHF 3c3be623, models/model.py (`_get_reward_model`), cli/train_rm.py, trainer/rm_trainer.py.

A process reward model is a token classifier with two labels, as TRL's PRMTrainer saves it. The probability of label 1
at the token that ends a step says how likely the step is good. It is the sigmoid of the difference of the two logits,
so that the model is read as a scorer: one row, the difference of the head's two rows, and one offset, the difference
of its two biases.

Source: huggingface/trl f2cd5771, experimental/prm/prm_trainer.py (label 1 is a good step); the model card of
Qwen2.5-Math-PRM-7B (the reward of a step is the probability of the positive label).
"""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from engine.errors import UserError
from engine.models.config_and_tokenizer import TOKEN_CLASSIFIER, model_class, read_tokenizer
from engine.models.weight_files import headers, tensors_of, weight_files

FILE = "pytorch_model.bin"


def is_deepspeed_chat_scorer(path: str, what: str) -> bool:
    """Whether the folder `path` has a reward model in DeepSpeed-Chat's format.

    Raises: UserError, with the flag `what` in its message, if the folder has no weights or broken ones.
    """
    folder = Path(path)
    if not folder.is_dir() or weight_files(folder, what) != [folder / FILE]:
        return False
    return "v_head.weight" in headers(folder, what)


def deepspeed_chat_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """{DeepSpeed-Chat's name of a weight: Hugging Face's name}. prefix: the prefix that the Hugging Face model class
    uses for the layers."""
    return {name: name.replace("rwtransformer.", f"{prefix}.", 1).replace("v_head.", "score.", 1) for name in names}


def deepspeed_chat_state(path: str, prefix: str) -> dict:
    """{Hugging Face's name: weight} of the reward model in DeepSpeed-Chat's format at `path`."""
    file = Path(path) / FILE
    state = torch.load(file, mmap=True, weights_only=True) | tensors_of(file)
    names = deepspeed_chat_names(state, prefix)
    return {names[name]: tensor for name, tensor in state.items()}


def take_pad_token(config, path: str, what: str, trust_remote_code: bool = False) -> None:
    """Set the configuration's pad token to the pad token with which the DeepSpeed-Chat reward model was trained, or to
    None.

    DeepSpeed-Chat reads the score at the token before the first pad token. The config.json that it writes always names
    EOS as the pad token. This is wrong if the reward model was made from a model with "llama" in its name: in that case
    the pad token was the tokenizer's own or an added one, and the score is read at EOS. DeepSpeed-Chat writes no
    tokenizer_config.json; if the user has put one into the folder, the pad token is taken from there.

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


ARCHITECTURE = "RewardModel"  # OpenRLHF's class, as config.json names it
_SETTINGS = ("value_head_prefix", "normalize_reward", "mean", "std")


def head_name(config) -> str:
    """The name of the score head in a reward model's files. It is "score", as in transformers, unless config.json gives
    another name."""
    return getattr(config, "value_head_prefix", "score")


def names_for_transformers(config) -> dict[str, str]:
    """{name in the files: transformers' name}, for weights whose two names differ."""
    head = head_name(config)
    return {} if head == "score" else {f"{head}.weight": "score.weight"}


def renamed_state(path: str, config, what: str) -> dict | None:
    """{transformers' name: weight} of a folder; None if the files already use transformers' names.

    Raises: UserError, with the flag `what` in its message, if `path` is a name on the Hub.
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


def gain_and_offset(config) -> tuple[float, float]:
    """(the factor by which the head's output is multiplied, the offset that is added to the product). If config.json
    has normalize_reward, factor and offset turn a score into (score - mean) / std; otherwise they are 1 and 0."""
    if not getattr(config, "normalize_reward", False):
        return 1.0, 0.0
    mean, std = getattr(config, "mean", 0.0), getattr(config, "std", 1.0)
    return 1 / std, -mean / std


def take_settings(config) -> float:
    """If a configuration has OpenRLHF's settings, replace them by this program's settings: the score is read at the
    last token (which may be EOS), and an offset is added.

    Returns: the factor by which the caller has to multiply the head's weight.
    """
    if not any(hasattr(config, name) for name in _SETTINGS[:2]):
        return 1.0
    gain, config.score_offset = gain_and_offset(config)
    config.score_position = "last"
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if config.pad_token_id in ends:
        config.pad_token_id = None  # with None, transformers' own class also reads a saved model's score at EOS
    for name in _SETTINGS:
        vars(config).pop(name, None)
    return gain


STEP_END = "step_end"  # the setting in which step 2 keeps the text that ends a step
LINE = "\n"  # TRL's default `step_separator`
TOKEN_HEADS = ("score", "classifier")  # the heads of transformers' token classifiers


def is_process_scorer(config) -> bool:
    """Whether config.json names a token classifier."""
    return any(name.endswith("ForTokenClassification") for name in config.architectures or [])


def process_state(path: str, what: str) -> tuple[dict, float]:
    """({name in a classifier with one label: weight} of the token classifier in the folder `path`, the offset of its
    scores). A score is the difference of the logits of the labels 1 and 0."""
    state = {name: tensor for file in weight_files(Path(path), what) for name, tensor in tensors_of(file).items()}
    head = next(name for name in TOKEN_HEADS if f"{name}.weight" in state)
    bad, good = state.pop(f"{head}.weight").float()
    state["score.weight"] = (good - bad).unsqueeze(0)
    bias = state.pop(f"{head}.bias", torch.zeros(2)).double()
    return state, float(bias[1] - bias[0])


def as_token_classifier(model, state: dict) -> tuple[Any, dict]:
    """(a token classifier without weights, its {name: weight}) for a scorer that was trained on steps. Each label gets
    a half of row and offset, with opposite signs: then halving and subtracting change no digit."""
    config = copy.deepcopy(model.config)
    kind = model_class(config, TOKEN_CLASSIFIER, config.name_or_path, "the process reward model")
    half = getattr(config, "score_offset", 0.0) / 2
    config.num_labels = 2
    for name in ("score_offset", "score_position"):
        vars(config).pop(name, None)
    with torch.device("meta"):
        shell = kind._from_config(config, dtype=model.dtype)
    head = next(name for name in TOKEN_HEADS if hasattr(shell, name))
    state = dict(state)
    if "score.weight" in state:  # without weights the files beside them are written
        row = state.pop("score.weight") / 2
        state[f"{head}.weight"] = torch.cat([-row, row])
        if getattr(shell, head).bias is not None:
            state[f"{head}.bias"] = torch.tensor([-half, half], dtype=row.dtype)
    return shell, state
