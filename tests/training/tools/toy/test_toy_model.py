"""The starting model opens like any other, and its tokenizer gives every text of the corpus back."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training.tools.toy import model as builtin_model
from training.tools.toy.model import make_model, train_tokenizer
from training.tools.toy.reviews import generate_reviews

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
