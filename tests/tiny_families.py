"""Configurations of many families of models, small enough for a trial of all: 2 layers, WIDTH wide, 4 heads.

tests/tiny_models.py has those of the tests, with every choice set by hand; these are of transformers' own choices but
for their sizes, and for windows that are shorter than rows, where a family has some.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from tests.tiny_models import BOS, EOS, PAD, POSITIONS, VOCABULARY, WIDTH, save_random

_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_NEOX = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_LLAMA = _NEOX | {"num_key_value_heads": 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_GEMMA = _LLAMA | {"head_dim": 8}

# By transformers' name for the family (`model_type`).
FAMILIES: dict[str, dict] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 8},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _LLAMA,
    "qwen3": _GEMMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA | _WINDOWS | {"query_pre_attn_scalar": 8},
    "gemma3_text": _GEMMA | _WINDOWS | {"query_pre_attn_scalar": 8},
    "phi": _NEOX,
    "phi3": _LLAMA | {"original_max_position_embeddings": POSITIONS},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": POSITIONS,
    },
    "gpt_neox": _NEOX,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "opt": {
        "hidden_size": WIDTH,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": WIDTH,
    },
    "bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
}


def family_config(family: str) -> PreTrainedConfig:
    """The configuration of a tiny model of one of FAMILIES."""
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return AutoConfig.for_model(family, **tokens, **FAMILIES[family])


def make_family(family: str, folder: Path, offset: float = -0.3) -> None:
    """Save `actor` and `reward`, a reward model with this `score_offset`, of a family, with their tokenizers."""
    config = family_config(family)
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder / "actor", seed=0)
    config = family_config(family)
    config.num_labels, config.score_offset, config.score_position = 1, offset, "last"
    save_random(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), folder / "reward", seed=1)
