"""Bible verses as a task: positive are those of the New Testament. Data, a byte-level BPE and a small random GPT-2.

    printf 'gen1:1-rev22:21\\n' | bible -f > kjv.txt        # the program of Debian's package bible-kjv
    python -m scripts.comparison.verses kjv.txt OUTPUT_DIR

Writes base/, and data/ with the files and fields of the reviews (docs/guide.md): sft.jsonl, pairs.jsonl,
prompts.jsonl, eval_prompts.jsonl. Prompts are of verses that no other file has.
"""

import json
import random
import re
import sys
from pathlib import Path

from engine.errors import UserError

LENGTHS = range(30, 221)  # characters
PROMPT = "Verse:"
SFT = 16000
PAIRS = 4000
PROMPTS = 6000
HELD_OUT = 256
VERSE = re.compile(r"^(?P<book>(?:[1-3])?[A-Z][A-Za-z]+)\d+:\d+ (?P<text>.+)$")
FIRST_OF_THE_NEW = "Mat"


def read_verses(text: str) -> list[tuple[str, bool]]:
    """(verse, whether it is of the New Testament) of each line "Ge1:1 In the beginning..." in the Bible's order.

    Lines of another form are passed over, and verses that are much shorter or longer than others. Raises: UserError
    where one of the testaments is missing.
    """
    found, new = [], False
    for line in text.splitlines():
        if match := VERSE.match(line):
            new = new or match["book"].startswith(FIRST_OF_THE_NEW)
            if len(match["text"]) in LENGTHS:
                found.append((match["text"], new))
    if not found or found[0][1] or not found[-1][1]:
        raise UserError("no verses of both testaments as `bible -f` prints them: lines like 'Ge1:1 In the beginning'.")
    return found


def make_records(verses: list[tuple[str, bool]], seed: int = 1) -> dict[str, list[dict[str, str]]]:
    """The records of each file."""
    rng = random.Random(seed)
    texts = list(dict.fromkeys(verses))
    rng.shuffle(texts)
    learned, asked = texts[:-PROMPTS], [text for text, _ in texts[-PROMPTS:]]
    chosen = [text for text, new in learned if new][:PAIRS]
    rejected = [text for text, new in learned if not new][: len(chosen)]
    prompts = list(dict.fromkeys(f"{PROMPT} {' '.join(text.split()[:4])}" for text in asked))
    return {
        "sft.jsonl": [{"text": f"{PROMPT} {text}"} for text, _ in learned[:SFT]],
        "pairs.jsonl": [
            {"prompt": PROMPT, "chosen": f" {good}", "rejected": f" {bad}"} for good, bad in zip(chosen, rejected)
        ],
        "prompts.jsonl": [{"prompt": prompt} for prompt in prompts[:-HELD_OUT]],
        "eval_prompts.jsonl": [{"prompt": prompt} for prompt in prompts[-HELD_OUT:]],
    }


def make_base(texts: list[str], folder: Path, seed: int = 1) -> None:
    """A byte-level BPE of 1,024 tokens, and a GPT-2 of 0.6 million parameters with random weights."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=1024, special_tokens=["<pad>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    width = 96
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=width,
        n_layer=4,
        n_head=4,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=width**-0.5 / 2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    GPT2LMHeadModel(config).save_pretrained(folder)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    source, out = map(Path, arguments)
    try:
        records = make_records(read_verses(source.read_text(encoding="utf-8")))
    except (OSError, UserError) as error:
        print(f"error: {source}: {error}", file=sys.stderr)
        return 2
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in records.items():
        (out / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{out / 'data' / name}: {len(rows)} records")
    make_base([row["text"] for row in records["sft.jsonl"]], out / "base")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
