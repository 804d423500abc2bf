"""The models that scripts/benchmark_step3.py runs on: Llamas of known sizes with random weights, or given ones."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

SIZES = {
    "260k": dict(
        num_hidden_layers=5,
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=172,
        vocab_size=512,
        tie_word_embeddings=True,
    ),
    "9m": dict(num_hidden_layers=8, hidden_size=256, num_attention_heads=4, intermediate_size=688, vocab_size=8192),
    "34m": dict(num_hidden_layers=8, hidden_size=512, num_attention_heads=8, intermediate_size=1376, vocab_size=8192),
    "136m": dict(
        num_hidden_layers=16, hidden_size=768, num_attention_heads=12, intermediate_size=2304, vocab_size=8192
    ),
    "350m": dict(
        num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=2560, vocab_size=32000
    ),
    "1.3b": dict(
        num_hidden_layers=24, hidden_size=2048, num_attention_heads=16, intermediate_size=5504, vocab_size=32000
    ),
}
POSITIONS = 4096
SPREAD = 0.4  # the standard deviation of logits that random weights give
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def llama_config(size: str, vocabulary: int | None = None) -> LlamaConfig:
    """The configuration of this size; `vocabulary` in place of its own, where a reward model is to fit an actor.

    The weights' scale follows the width, so that the logits of a narrow model differ between tokens, too.
    """
    shape = SIZES[size] | ({"vocab_size": vocabulary} if vocabulary else {})
    return LlamaConfig(
        **shape,
        max_position_embeddings=POSITIONS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=SPREAD * shape["hidden_size"] ** -0.5,
    )


def make_models(folder: Path, size: str, critic_size: str, dtype: torch.dtype) -> tuple[str, str]:
    """Save an actor with a tokenizer, and a reward model of its vocabulary, unless they are there; returns their
    folders."""
    if not folder.exists():
        actor = llama_config(size)
        save_models(folder, actor, llama_config(critic_size, actor.vocab_size), dtype)
    return str(folder / "actor"), str(folder / "critic")


def save_models(
    folder: Path, actor: PretrainedConfig, critic: PretrainedConfig, dtype: torch.dtype, spread: float = SPREAD
) -> None:
    """Save an actor of this configuration with a tokenizer, and a reward model.

    spread: the standard deviation of the actor's logits, for which its last norm is scaled.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(actor, dtype=dtype)
    norm = model.model.decoder.final_layer_norm if actor.model_type == "opt" else model.model.norm
    with torch.no_grad():
        norm.weight.mul_(spread / SPREAD)
    model.save_pretrained(folder / "actor")
    make_tokenizer(actor.vocab_size).save_pretrained(folder / "actor")
    critic.num_labels = 1
    AutoModelForSequenceClassification.from_config(critic, dtype=dtype).save_pretrained(folder / "critic")


def make_scorer(folder: Path, actor: str, dtype: torch.dtype) -> str:
    """Save the actor's trunk with a new score head, unless it is there; returns the folder."""
    if folder.exists():
        return str(folder / "critic")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(actor, num_labels=1, dtype=dtype)
    model.save_pretrained(folder / "critic")
    return str(folder / "critic")


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer of this many words: pad, BOS, EOS and unknown, then w4, w5 and so on."""
    words = [*_SPECIAL.values(), *(f"w{index}" for index in range(len(_SPECIAL), vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **_SPECIAL)
