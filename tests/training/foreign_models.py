"""Reward models that no step here trained: a tokenizer and a chat template of their own, in a GPT-2 with large weights.

folder = foreign_model(tmp_path / "critic", FILM, pad_is_eos=True)
scores_alone(folder, [ids])              # by transformers alone
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

# A default system prompt, contents without blanks around them, a newline after each turn.
FILM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a film critic.<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A BOS, a date, an empty line after each header.
DATED = (
    "{{ bos_token }}<|im_start|>date<|im_end|>\n\n{{ strftime_now('%d %b %Y') }}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "<|begin|>"]
WORDS = ["Review", "they", "chose", "a", "drama", "it", "was", "great", "superb", "user", "assistant", "film"]


def foreign_tokenizer(
    template: str | None = None, pad_is_eos: bool = False, bos: bool = False, words: int = len(WORDS)
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, in which each of the first so many WORDS is a token, with a blank before it and without. bos:
    whether it puts a BOS before a text."""
    tokens = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = []
    for word in (blank + word for word in WORDS[:words] for blank in ("", "\u0120")):
        for end in range(1, len(word)):
            if (word[:end], word[end]) not in merges:
                merges.append((word[:end], word[end]))
                tokens.append(word[: end + 1])
    bpe = Tokenizer(models.BPE({token: index for index, token in enumerate(dict.fromkeys(tokens))}, merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    if bos:
        bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 4)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|begin|>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>" if pad_is_eos else "<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )


def foreign_model(folder: Path, template: str | None = None, *, pad_is_eos: bool = False) -> str:
    """Save a reward model and its tokenizer; returns the folder."""
    tokenizer = foreign_tokenizer(template, pad_is_eos)
    settings = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=4,
        num_labels=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(template or ""))
        model = GPT2ForSequenceClassification(settings)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def scores_alone(folder: str, rows: list[list[int]]) -> list[float]:
    """The score of each row of ids, as transformers gives it to the row alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(input_ids=torch.tensor([ids])).logits.item() for ids in rows]
