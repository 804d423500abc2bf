"""The sums of the example: each in one file, right answers, the checker, and the accuracy of a model."""

import json
import re

import pytest
import torch

from training.tools.toy import sums
from training.tools.toy.model import make_model, train_tokenizer

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
    assert f"error: {tmp_path}: there is no model's folder here" in capsys.readouterr().err
