"""The task of Bible verses: what is read of the program's print, and that nothing held out was learned."""

import json

from scripts.comparison import verses
from scripts.comparison.verses import main, read_verses

OLD = "And God called the light Day, and the darkness he called Night."
NEW = "And she shall bring forth a son, and thou shalt call his name JESUS."
PRINT = f"""bible: Debian/BRS Release 4.36
Hit '?' for help.
Ge1:5 {OLD}
Ge1:6 Too short.
1Sa2:3 {OLD[:-1]}; {"long " * 40}
bible(KJV) [Gen1:1]> gen1:1-rev22:21
Mat1:21 {NEW}
1Cor1:2 {NEW[:-1]} again.
"""


def many(count):
    words = [f"w{number}" for number in range(count)]
    return [
        (f"{word} one two three {word} four five six seven eight", number % 3 == 0) for number, word in enumerate(words)
    ]


def test_verses_are_told_from_other_lines_and_testaments_from_each_other():
    assert read_verses(PRINT) == [(OLD, False), (NEW, True), (f"{NEW[:-1]} again.", True)]


def test_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(verses, "PROMPTS", 300)
    text = "".join(
        f"{'Mat' if new else 'Ge'}1:1 {verse}\n" for verse, new in sorted(many(600), key=lambda each: each[1])
    )
    (tmp_path / "text").write_text(text)
    assert main([str(tmp_path / "text"), str(tmp_path / "out")]) == 0
    assert len((tmp_path / "out" / "data" / "eval_prompts.jsonl").read_text().splitlines()) == 256
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "base")
    assert model.config.vocab_size == len(tokenizer)
    assert tokenizer.decode(tokenizer.encode("Verse: w1 one")) == "Verse: w1 one"
    row = json.loads((tmp_path / "out" / "data" / "sft.jsonl").read_text().splitlines()[0])
    assert row["text"].startswith("Verse: w")
    assert main([str(tmp_path / "missing"), str(tmp_path / "out")]) == 2
