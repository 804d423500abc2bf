"""Tokenizers small enough to know every id by heart."""

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = 0, 1, 2, 3
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> \n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def word_tokenizer(before: str = "", after: str = "", words: str = "", **special) -> PreTrainedTokenizerFast:
    """A word a token: "a" is 10, "b" 11, ... "z" 35, then `words`. `before` and `after` it adds to a text by itself."""
    vocabulary = {"<pad>": PAD, "<s>": BOS, "</s>": EOS, "<unk>": UNK}
    vocabulary |= {f"<{number}>": number for number in range(4, 10)}  # no gap: added tokens count from the size
    known = [*"abcdefghijklmnopqrstuvwxyz", *words.split()]
    vocabulary |= {word: 10 + number for number, word in enumerate(known)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    added = [(token, vocabulary[token]) for token in (before, after) if token]
    tokenizer.post_processor = processors.TemplateProcessing(f"{before} $A {after}".strip(), special_tokens=added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(SPECIAL | special))


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """A character a token, but "ab" is one: newline 10, a 11, b 12, c 13, ab 14, newline + b 15."""
    vocabulary = {
        "<pad>": PAD,
        "<s>": BOS,
        "</s>": EOS,
        "<unk>": UNK,
        "\n": 10,
        "a": 11,
        "b": 12,
        "c": 13,
        "ab": 14,
        "\nb": 15,
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("\n", "b")], unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def chat_tokenizer(template: str, **options) -> PreTrainedTokenizerFast:
    """word_tokenizer with <|im_start|> and <|im_end|> and a chat template."""
    tokenizer = word_tokenizer(**options)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.chat_template = template
    return tokenizer
