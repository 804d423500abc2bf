"""Models and a tokenizer small enough for a test, saved as Hugging Face folders.

    actor = make_causal_lm(tmp_path / "actor", "llama", tied=True)
    reward = make_scorer(tmp_path / "reward", "llama", offset=-0.3)

Weights are random but large (and vectors are not left at 0 and 1), so that logits differ widely between tokens and a
wrong position, mask or bias shows. Every id below VOCABULARY is a token: pad, BOS, EOS and unknown are 0 to 3, the rest
are the words w04 ... w63.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

PAD, BOS, EOS, UNK = 0, 1, 2, 3
VOCABULARY = 64
WIDTH = 32
POSITIONS = 64
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """A word a token, without anything put around a text; `pad_is_eos`: the pad token is </s>, as in many models."""
    vocabulary = {token: index for index, token in enumerate(_SPECIAL.values())}
    vocabulary |= {f"w{index:02d}": index for index in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = _SPECIAL | ({"pad_token": "</s>"} if pad_is_eos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_config(family: str, *, tied: bool = False, layers: int = 2, pad_is_eos: bool = False):
    """The configuration of a model of this family, WIDTH wide, with 4 heads."""
    common = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS if pad_is_eos else PAD,
    }
    grouped = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    if family in ("llama", "mistral", "qwen2"):
        config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}[family]
        return config(**common, **grouped, num_key_value_heads=2)
    if family == "gpt_neox":
        return GPTNeoXConfig(**common, **grouped)
    if family == "opt":
        return OPTConfig(
            **common,
            hidden_size=WIDTH,
            ffn_dim=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            word_embed_proj_dim=WIDTH,
        )
    if family == "gpt2":
        return GPT2Config(**common, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=POSITIONS)
    if family == "bloom":
        return BloomConfig(**common, hidden_size=WIDTH, n_layer=layers, n_head=4)
    raise ValueError(f"family {family!r}: known are llama, mistral, qwen2, gpt_neox, opt, gpt2, bloom")


def make_causal_lm(
    folder: Path | str,
    family: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    pad_is_eos: bool = False,
) -> str:
    """Save a language model and its tokenizer; returns the folder."""
    config = make_config(family, tied=tied, layers=layers, pad_is_eos=pad_is_eos)
    model = _randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32), seed)
    return _saved(model, folder, pad_is_eos)


def make_scorer(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 1,
    layers: int = 2,
    offset: float = 0.0,
    score_position: str = "last",
    pad_is_eos: bool = False,
) -> str:
    """Save a reward model with this `score_offset`, and its tokenizer; returns the folder."""
    config = make_config(family, layers=layers, pad_is_eos=pad_is_eos)
    config.num_labels, config.score_offset, config.score_position = 1, offset, score_position
    model = _randomised(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), seed)
    return _saved(model, folder, pad_is_eos)


def save_random(model, folder: Path | str, *, seed: int = 0, pad_is_eos: bool = False) -> str:
    """Give a model of any kind random weights and save it with the tokenizer; returns the folder."""
    return _saved(_randomised(model, seed), folder, pad_is_eos)


@torch.no_grad()
def _randomised(model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # tied ones come once
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(1 + 0.1 * noise)
    return model.eval()


def _saved(model, folder: Path | str, pad_is_eos: bool) -> str:
    model.save_pretrained(folder)
    make_tokenizer(pad_is_eos).save_pretrained(folder)
    return str(folder)
