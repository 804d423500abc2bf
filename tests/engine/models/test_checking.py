"""What cannot fill its role is refused by name before it is loaded."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, BertConfig, T5Config

from engine.errors import UserError
from engine.models.checking import check_policy, check_scorer, check_vocabularies
from engine.models.loading import load_policy, load_scorer
from engine.models.reading import read_tokenizer
from scripts.harness.models import make_causal_lm, make_config, make_scorer, make_tokenizer, save_random
from tests.engine.models.deepspeed_chat_models import deepspeed_chat_reward

FLAG = "--critic_model_name_or_path"


def with_labels(folder, count):
    config = make_config("llama")
    config.num_labels = count
    return save_random(AutoModelForSequenceClassification.from_config(config), folder)


def config_only(folder, config, **more):
    config.save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


@pytest.mark.parametrize(
    "make, message",
    [
        (
            make_causal_lm,
            r"is no reward model but LlamaForCausalLM\. Give a folder written by training/step2_reward\.py",
        ),
        (lambda folder: with_labels(folder, 2), r"has num_labels = 2\. Give a reward model, which has 1"),
        (
            lambda folder: config_only(folder, T5Config(num_labels=1), architectures=["T5ForSequenceClassification"]),
            r"of type 't5', which is not a decoder-only model.*Give one",
        ),
        (
            lambda folder: config_only(
                folder, BertConfig(num_labels=1), architectures=["BertForSequenceClassification"]
            ),
            r"of type 'bert', which is not a decoder-only model.*Give one",
        ),
        (lambda folder: folder / "missing", r"there is no folder .*missing"),
        (lambda folder: folder, r"holds no config\.json\. Give a folder that save_pretrained wrote"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, make, message):
    path = str(make(tmp_path))
    for refuse in (check_scorer, lambda path, what: load_scorer(path, torch.float32, what=what)):
        with pytest.raises(UserError, match=f"^{FLAG}: .*{message}") as refused:
            refuse(path, FLAG)
        assert path in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [T5Config(), BertConfig()])
def test_what_is_no_decoder_is_refused_as_an_actor(tmp_path, config):
    for refuse in (check_policy, lambda path, what: load_policy(path, torch.float32, what=what)):
        with pytest.raises(UserError, match=r"^--actor_model_name_or_path: .*not a decoder-only model.*Give one"):
            refuse(str(config_only(tmp_path, config)), "--actor_model_name_or_path")


def test_a_reward_model_is_refused_as_an_actor(tmp_path):
    ours, theirs = make_scorer(tmp_path / "ours"), deepspeed_chat_reward(tmp_path / "theirs", "opt")[0]
    for path, found in ((ours, "LlamaForSequenceClassification"), (theirs, "a reward model of DeepSpeed-Chat")):
        with pytest.raises(UserError, match=rf"^--actor: .* is no language model but {found}\. Give the SFT model"):
            check_policy(path, "--actor")


def test_a_reward_model_that_reads_other_tokens_is_refused(tmp_path):
    path = make_scorer(tmp_path / "reward")
    check_vocabularies(make_tokenizer(), path, FLAG)
    check_vocabularies(make_tokenizer(pad_is_eos=True), path, FLAG)  # the same ids
    larger = make_tokenizer()
    larger.add_tokens(["one more"])
    with pytest.raises(UserError, match=rf"^{FLAG}: .*reward knows 64 tokens, the actor's tokenizer has 65\..*trained"):
        check_vocabularies(larger, path, FLAG)
    (tmp_path / "reward" / "tokenizer.json").write_text(
        (tmp_path / "reward" / "tokenizer.json").read_text().replace("w04", "other")
    )
    with pytest.raises(UserError, match=rf"^{FLAG}: the tokenizer in .*reward gives other ids.*trained"):
        check_vocabularies(make_tokenizer(), path, FLAG)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--actor: no tokenizer at .*Save one beside the model"):
        read_tokenizer(str(tmp_path), "--actor")


@pytest.mark.parametrize("changed", [{"model_max_length": [8]}, {"unk_token": ""}], ids=str)
def test_a_tokenizer_that_loads_and_cannot_be_used_is_refused(tmp_path, changed):
    path = Path(make_causal_lm(tmp_path / "model")) / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UserError, match="--flag: no tokenizer at"):
        read_tokenizer(str(path.parent), "--flag")


def lfs_pointer(path):
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")


@pytest.mark.parametrize(
    "name, is_read",
    [
        ("config.json", True),
        ("model.safetensors", True),
        ("pytorch_model.bin", False),  # model.safetensors stands beside it
        ("tokenizer.json", True),
        ("tokenizer_config.json", True),
        ("generation_config.json", True),
        ("chat_template.jinja", True),
        ("tokenizer.model", False),  # tokenizer.json stands beside it
    ],
)
def test_a_git_lfs_pointer_in_a_models_folder_is_called_one(tmp_path, name, is_read):
    folder = Path(make_causal_lm(tmp_path / "model"))
    lfs_pointer(folder / name)
    if not is_read:
        check_policy(str(folder), FLAG)
        assert read_tokenizer(str(folder), FLAG).vocab_size == 64
        return
    with pytest.raises(
        UserError, match=rf"^{FLAG}: {folder}/{name} is a Git LFS pointer: .*`git lfs pull` in {folder}\.$"
    ):
        check_policy(str(folder), FLAG)
        read_tokenizer(str(folder), FLAG)


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_vocabulary_that_is_a_git_lfs_pointer_is_called_one(tmp_path, name):
    make_config("llama").save_pretrained(tmp_path)
    lfs_pointer(tmp_path / name)
    with pytest.raises(UserError, match=rf"^--actor: {tmp_path}/{name} is a Git LFS pointer"):
        read_tokenizer(str(tmp_path), "--actor")


def test_one_of_several_weight_files_that_is_a_git_lfs_pointer_is_called_one(tmp_path):
    model = load_policy(make_causal_lm(tmp_path / "one"), torch.float32).model
    model.save_pretrained(tmp_path / "more", max_shard_size="20KB")
    file = sorted((tmp_path / "more").glob("model-*.safetensors"))[1]
    lfs_pointer(file)
    with pytest.raises(UserError, match=rf"^{FLAG}: {file} is a Git LFS pointer"):
        check_policy(str(tmp_path / "more"), FLAG)
