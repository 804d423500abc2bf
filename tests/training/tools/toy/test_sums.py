"""The sums of the example: right answers, the checker, the accuracy of a model; the starting model opens like any
other, and its tokenizer gives every text of the corpus back.
"""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.tools.toy import model as builtin_model
from training.tools.toy import sums
from training.tools.toy.model import make_model, train_tokenizer
from training.tools.toy.reviews import generate_reviews

TEXTS = [f"{digit}+={digit}" for digit in range(10)]


def records(folder, name):
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_every_sum_stands_in_one_file_with_its_answer(tmp_path, capsys):
    assert sums.main(["make", "--output_dir", str(tmp_path / "data")]) == 0
    files = {name: records(tmp_path / "data", name) for name in ("sft", "prompts", "eval_prompts")}
    assert {name: len(found) for name, found in files.items()} == {"sft": 4000, "prompts": 3600, "eval_prompts": 500}
    everything = [record for found in files.values() for record in found]
    assert len({record["prompt"] for record in everything}) == 90 * 90
    for record in everything:
        first, second = re.fullmatch(r"([1-9]\d)\+([1-9]\d)=", record["prompt"]).groups()
        assert str(record.get("answer", record.get("response"))) == str(int(first) + int(second))
    assert sums.main(["make", "--output_dir", str(tmp_path / "data")]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "response, expected", [("85", 1), (" 85", 1), ("85\n", 1), ("84", 0), ("085", 0), ("85=", 0), ("8 5", 0), ("", 0)]
)
def test_the_checker(response, expected):
    assert sums.right(["37+48="], [response], [85]) == [expected]


def test_a_character_is_a_token():
    tokenizer = train_tokenizer(TEXTS, characters=True)
    ids = tokenizer("37+48=85").input_ids
    assert len(ids) == 8 and tokenizer.decode(ids) == "37+48=85" and len(tokenizer) == 4 + 12
    assert tokenizer("37+48=").input_ids == ids[:6]


def test_greedy_accuracy_is_that_of_the_most_probable_tokens(tmp_path):
    tokenizer = train_tokenizer(TEXTS, characters=True)
    model = make_model(tokenizer, hidden_size=16, num_layers=1, num_heads=2, seed=0)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    rows = []
    for prompt in ("12+34=", "56+78=", "90+11=", "45+45="):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        for _ in range(sums.NEW_TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        response = ids[0, 6:].tolist()
        ended = response.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in response else len(response)
        rows.append({"prompt": prompt, "answer": tokenizer.decode(response[:ended], skip_special_tokens=True)})
    assert sums.accuracy(tmp_path, rows, sampled=False) == 1.0
    rows[2]["answer"] += "0"
    assert sums.accuracy(tmp_path, rows, sampled=False) == 0.75
    assert 0.0 <= sums.accuracy(tmp_path, rows, sampled=True) <= 1.0


def test_a_folder_without_a_model_is_told_before_a_model_is_asked(tmp_path, capsys):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "12+34=", "answer": 46}\n')
    flags = ["accuracy", "--data", str(tmp_path / "held_out.jsonl"), str(tmp_path)]
    assert sums.main(flags) == 2
    assert f"error: {tmp_path}: this is not a folder of a model" in capsys.readouterr().err


REVIEWS = generate_reviews(3000, seed=0)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(text for review in REVIEWS for text in (review.prompt, review.response))


def test_special_tokens(tokenizer):
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert tokenizer.padding_side == "left"


def test_a_word_is_a_token_and_texts_come_back(tokenizer):
    for review in REVIEWS[:300]:
        prompt, response = (tokenizer(text).input_ids for text in (review.prompt, review.response))
        assert len(prompt) == len(review.prompt.split()) and len(response) == len(review.response.split())
        assert tokenizer.unk_token_id not in prompt + response
        assert tokenizer(review.prompt + review.response).input_ids == prompt + response
        assert tokenizer.decode(prompt + response) == review.prompt + review.response
        assert tokenizer.decode(response) == review.response


def test_unknown_words_do_not_stop_it(tokenizer):
    assert tokenizer(" was zzz .").input_ids[1] == tokenizer.unk_token_id
    assert tokenizer.decode(tokenizer(" was .").input_ids + [2, 0], skip_special_tokens=True) == " was ."


def test_vocabulary_is_rounded_up_and_the_seed_decides(tokenizer):
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    first, same, other = (make_model(tokenizer, **sizes, seed=seed) for seed in (0, 0, 1))
    assert first.config.vocab_size % 8 == 0 and 0 <= first.config.vocab_size - len(tokenizer) < 8
    weight = first.model.layers[0].mlp.up_proj.weight
    assert torch.equal(weight, same.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(weight, other.model.layers[0].mlp.up_proj.weight)
    assert weight.std().item() == pytest.approx(0.1, rel=0.15)  # 0.4 / sqrt(16)


def write_data(folder):
    path = folder / "sft.jsonl"
    path.write_text("".join(f'{{"prompt": "{r.prompt}", "response": "{r.response}"}}\n' for r in REVIEWS[:50]))
    return str(path)


def test_the_saved_folder_opens(tmp_path, capsys):
    data, base = write_data(tmp_path), tmp_path / "base"
    flags = ["--data", data, "--output_dir", str(base), "--hidden_size", "16", "--num_layers", "1"]
    assert builtin_model.main(flags) == 0
    assert (base / "model.safetensors").is_file()
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    text = REVIEWS[0].prompt + REVIEWS[0].response
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.padding_side, tokenizer.pad_token_id, tokenizer.eos_token_id) == ("left", 0, 2)
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model(**tokenizer([text], return_tensors="pt")).logits.shape[-1] == model.config.vocab_size

    capsys.readouterr()
    assert builtin_model.main(flags) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "--overwrite" in message
    assert builtin_model.main([*flags, "--overwrite"]) == 0


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--hidden_size", "30"], "--hidden_size 30"),
        (["--num_heads", "0"], "--num_heads 0"),
        (["--data", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_mistakes_are_told_in_one_line(flags, named, tmp_path, capsys):
    data = write_data(tmp_path)
    assert builtin_model.main(["--data", data, "--output_dir", str(tmp_path / "base"), *flags]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and named in message
    assert not (tmp_path / "base").exists()
