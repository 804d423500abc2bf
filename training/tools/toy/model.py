"""The starting point of step 1 in the quickstart: a word tokenizer and a small Llama with random weights.

    python -m training.tools.toy.model --data data/sft.jsonl data/pairs.jsonl --output_dir data/base

A token is a word with the space before it. A response of the built-in corpus has about 15 tokens, decoding restores any
text of known words exactly, and the tokens of prompt + response are the prompt's tokens followed by the response's
tokens. With --characters a token is a character. Real models have their own tokenizer; this program is for runs that
download nothing.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.errors import UserError
from training.data.record_forms import Form
from training.data.row_selection import load_rows
from training.runtime.environment import program
from training.runtime.launch import quiet_libraries
from training.tools.toy.reviews import refuse_non_empty

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # in the order of their ids, 0 to 3
TEXTS = Form(  # data files of any of the three steps
    "any text",
    (("prompt", "chosen", "rejected"), ("prompt", "response"), ("text",), ("prompt",)),
    lambda record, texts: texts,
)
MAX_POSITIONS = 256


def read_texts(paths: Sequence[Path]) -> list[str]:
    """Read all texts of the given files, which may hold SFT texts, preference pairs or prompts."""
    files = [load_rows(str(path), TEXTS, None, phase=1, seed=0)[0] for path in paths]
    return [text for rows in files for row in rows for text in row.values()]


def train_tokenizer(texts: Iterable[str], characters: bool = False):
    """A `PreTrainedTokenizerFast` whose tokens are the words of `texts`, each with the space before it. characters:
    whether the tokens are characters instead.

    The tokenizer itself adds no special tokens: the trainer adds EOS. If the tokenizer put a BOS before each text, the
    tokens of prompt + response would not be the prompt's tokens followed by the response's tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    split = r"[\s\S]" if characters else r" ?\S+|\s"
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(split), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # otherwise decoding puts a second space between words
    trainer = trainers.WordLevelTrainer(special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    pad, bos, eos, unk = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def make_model(tokenizer, *, hidden_size: int, num_layers: int, num_heads: int, seed: int):
    """A `LlamaForCausalLM` with random weights; its vocabulary is the tokenizer's, rounded up to a multiple of 8.

    The scale of the weights depends on the hidden size. Llama's own 0.02 suits hidden sizes of thousands; with a hidden
    size of 64, such weights would start so close to zero that learning would begin late.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if min(hidden_size, num_layers, num_heads) < 1 or hidden_size % (2 * num_heads):
        raise UserError(
            f"--hidden_size {hidden_size} --num_layers {num_layers} --num_heads {num_heads}: all must be 1 "
            "or more, and the hidden size a multiple of twice the number of heads."
        )
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.4 * hidden_size**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def make_base(args: argparse.Namespace) -> None:
    """Train the tokenizer, make the model, and save both into one folder."""
    quiet_libraries()
    refuse_non_empty(args.output_dir, args.overwrite)
    tokenizer = train_tokenizer(read_texts(args.data), args.characters)
    sizes = {"hidden_size": args.hidden_size, "num_layers": args.num_layers, "num_heads": args.num_heads}
    model = make_model(tokenizer, **sizes, seed=args.seed)
    tokenizer.save_pretrained(args.output_dir)
    model.save_pretrained(args.output_dir)
    print(f"{args.output_dir}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


@program
def main(arguments: Sequence[str] | None = None) -> int:
    """Make the model that the command line describes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.tools.toy.model", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines whose words become tokens")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--characters", action="store_true", help="make each character a token, as for sums")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--num_heads", type=int, default=4)
    make_base(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
