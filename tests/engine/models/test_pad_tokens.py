"""The pad token that each system runs with, under tokenizers with and without one of their own."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.algorithms import get_dialect
from engine.errors import UserError
from engine.models.checking import check_vocabularies
from engine.models.reading import pad_token_line, read_tokenizer
from engine.rlhf_engine import RLHFEngine
from scripts.harness.models import (
    EOS,
    PAD,
    VOCABULARY,
    make_causal_lm,
    make_config,
    make_scorer,
    make_tokenizer,
    save_random,
)
from training.config.step3 import RLHFFlags
from training.runtime.plan import sampling_config

ADDED = VOCABULARY  # the id of a token that is added


def folder(parent, name="model", *, own=None, room=False, more=None):
    """A language model whose tokenizer has this pad token of its own (a text), and perhaps a row for another one."""
    config = make_config("llama")
    config.vocab_size += 8 * room
    path = save_random(AutoModelForCausalLM.from_config(config), parent / name)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(more or [])
    tokenizer.save_pretrained(path)
    settings = json.loads((parent / name / "tokenizer_config.json").read_text())
    settings["pad_token"] = own
    (parent / name / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    "system, name, own, room, expected",
    [
        # DeepSpeed-Chat's get_tokenizer: EOS whatever the tokenizer has, but for names with "llama" in them
        ("deepspeed_chat", "opt", "<pad>", True, EOS),
        ("deepspeed_chat", "opt", None, True, EOS),
        ("deepspeed_chat_2023", "opt", "<pad>", True, EOS),
        ("deepspeed_chat", "llama-7b", "<pad>", True, PAD),
        ("deepspeed_chat", "llama-7b", "</s>", True, EOS),
        ("deepspeed_chat", "llama-7b", None, True, ADDED),
        ("deepspeed_chat", "llama-7b", None, False, EOS),
        ("deepspeed_chat", "Llama-7b", "<pad>", True, EOS),  # it looks for small letters
        # summarize and TRL's script add "[PAD]"
        ("summarize", "pythia", "<pad>", True, PAD),
        ("summarize", "pythia", None, True, ADDED),
        ("trl_ppo", "pythia", "</s>", True, ADDED),
        ("trl_rloo", "pythia", "</s>", False, EOS),
        # trlX: "<|padding|>", which is the unknown token here
        ("trlx", "other", "</s>", True, EOS),
        ("trlx", "other", None, True, 3),
        # the others' masks do not depend on it
        ("default", "llama-7b", "<pad>", True, PAD),
        ("default", "llama-7b", None, True, EOS),
        ("openai", "other", None, True, EOS),
    ],
)
def test_each_system(tmp_path, system, name, own, room, expected):
    path = folder(tmp_path, name, own=own, room=room)
    dialect = get_dialect(system)
    tokenizer = read_tokenizer(path, "--actor", dialect.pad_token)
    assert tokenizer.pad_token_id == expected
    assert tokenizer.convert_tokens_to_ids(tokenizer.pad_token) == expected
    said = pad_token_line(tokenizer, dialect, path)
    assert (said == "") == (system in ("default", "openai"))
    assert ("is EOS" in said) == (expected == EOS and said != "")
    assert ("no row for '[PAD]'" in said) == (expected == EOS and name in ("llama-7b", "pythia") and said != "")


def test_the_token_for_padding_that_a_vocabulary_has_is_trlxs(tmp_path):
    path = folder(tmp_path, more=["<|padding|>"], room=True)
    assert read_tokenizer(path, "--actor", "padding").pad_token_id == ADDED


def test_what_it_is_goes_into_sampling_and_the_engines_tokenizer(tmp_path):
    path = make_causal_lm(tmp_path / "opt", "opt")  # pad 0, EOS 2
    dialect = get_dialect("deepspeed_chat")
    args = RLHFFlags(
        output_dir=str(tmp_path / "out"),
        data_path=["d"],
        actor_model_name_or_path=path,
        critic_model_name_or_path=make_scorer(tmp_path / "reward", "opt"),
        dtype="fp32",
        dialect="deepspeed_chat",
    )
    tokenizer = read_tokenizer(path, "--actor", dialect.pad_token)
    assert sampling_config(args, dialect, tokenizer).pad_token_id == EOS
    spec = args.spec
    assert spec.pad_token == dialect.pad_token
    assert RLHFEngine.from_pretrained(spec).tokenizer.pad_token_id == EOS


@torch.no_grad()
def test_a_token_that_was_added_can_be_looked_up_in_the_model_and_is_no_other_vocabulary(tmp_path):
    path = folder(tmp_path, room=True)
    tokenizer = read_tokenizer(path, "--actor", "never_eos")
    assert tokenizer.pad_token == "[PAD]" and AutoConfig.from_pretrained(path).vocab_size > tokenizer.pad_token_id
    check_vocabularies(tokenizer, folder(tmp_path, "reward", room=True), "--reward")
    with pytest.raises(UserError, match=r"--reward: .*short knows 64 tokens, the actor's tokenizer has 65"):
        check_vocabularies(tokenizer, folder(tmp_path, "short"), "--reward")
