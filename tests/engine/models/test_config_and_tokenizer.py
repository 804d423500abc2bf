"""What is read before weights: ties of output head and embedding, in config.json and in the files; the pad token that
each system runs with; code in a model's folder, which runs where that is allowed, and else does not.
"""

import builtins
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers.dynamic_module_utils
import transformers.utils.hub
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, modeling_utils
from transformers.integrations import hub_kernels

from engine.actor_copy import ActorCopy
from engine.algorithms import get_dialect
from engine.errors import UserError
from engine.models import config_and_tokenizer
from engine.models.checking import check_decoding, check_policy, check_vocabularies
from engine.models.config_and_tokenizer import LANGUAGE_MODEL, pad_token_line, read_config, read_tokenizer
from engine.models.loading import load_policy
from engine.models.saving import save_model, save_tokenizer
from engine.rlhf_engine import RLHFEngine
from scripts.harness import model_damages as damages
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
from scripts.harness.ranks import run_ranks
from scripts.harness.weights import full_state
from tests.distributed.conftest import write_stage_files
from training.config.step3 import RLHFFlags
from training.runtime.plan import sampling_config
from training.tools.memory.meta_model import module_on_meta


def make_folder(parent: Path, family: str = "llama", **settings) -> Path:
    """A model with two matrices, and this in its config.json; None for an entry that is to go."""
    folder = Path(make_causal_lm(parent / family, family))
    edit(folder, **settings)
    return folder


def edit(folder: Path, **settings) -> None:
    file = folder / "config.json"
    entries = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in entries.items() if value is not None}))


def pickle(folder: Path, state: dict) -> None:
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("form", ["safetensors", "without the trunk's prefix", "pickled", "in shards", "half of it"])
def test_two_matrices_in_the_files_are_two_whatever_config_json_says(tmp_path, family, form):
    folder = make_folder(tmp_path, family, tie_word_embeddings=True)
    state, trunk = load_file(folder / "model.safetensors"), {"llama": "model.", "gpt2": "transformer."}[family]
    if form == "without the trunk's prefix":
        bare = {name.removeprefix(trunk): tensor for name, tensor in state.items()}
        save_file(bare, folder / "model.safetensors", {"format": "pt"})
    elif form == "pickled":
        pickle(folder, state)
    elif form == "in shards":
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="8KB", state_dict=state)
        (folder / "model.safetensors").unlink()
        edit(folder, tie_word_embeddings=True)
    elif form == "half of it":  # the last number alone is another one
        embedding = next(name for name in state if "embed" in name or "wte" in name)
        state["lm_head.weight"] = state[embedding].clone()
        state["lm_head.weight"][-1, -1] += 0.5
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_one_matrix_stays_one(tmp_path):
    folder = Path(make_causal_lm(tmp_path / "tied", tied=True))
    assert read_config(str(folder), "model").tie_word_embeddings is True
    pickle(folder, AutoModelForCausalLM.from_pretrained(folder).state_dict())  # under both names
    assert read_config(str(folder), "model").tie_word_embeddings is True
    (folder / "pytorch_model.bin").unlink()  # of which memory can be planned
    assert read_config(str(folder), "model").tie_word_embeddings is True


def test_a_head_that_the_file_has_under_its_older_name_counts(tmp_path):
    folder = make_folder(tmp_path, "gpt_neox", tie_word_embeddings=True)
    assert "embed_out.weight" in load_file(folder / "model.safetensors")
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_the_default_of_a_family_counts_where_config_json_is_silent(tmp_path):
    folder = make_folder(tmp_path, "gpt2", tie_word_embeddings=None)
    assert read_config(str(folder), "model").tie_word_embeddings is False


def test_whatever_is_built_has_the_head_and_it_is_saved(tmp_path):
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    policy = load_policy(str(folder), torch.float32)
    copy = ActorCopy(SimpleNamespace(module=policy, stage=3, version=0)).module()
    for module in (copy, module_on_meta(str(folder), LANGUAGE_MODEL, "fp32", "")):
        assert "lm_head.weight" in dict(module.model.named_parameters())
    save_model(policy, full_state(policy.model), read_tokenizer(str(folder), "model"), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    given, saved = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "saved"))
    assert given.keys() == saved.keys() and all(torch.equal(given[name], saved[name]) for name in given)


def test_weights_that_are_not_contiguous_in_their_file_are_compared(tmp_path):
    folder = make_folder(tmp_path)
    state = load_file(folder / "model.safetensors")
    pickle(
        folder, {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in state.items()}
    )
    assert load_policy(str(folder), torch.float32).model.lm_head.weight.equal(state["lm_head.weight"])


@pytest.mark.slow
def test_engines_refuse_another_model_than_the_folder_has(tmp_path):
    folder = make_folder(tmp_path, tie_word_embeddings=True)
    write_stage_files(tmp_path)
    target, config = "tests.distributed.work_loaded_check:verdicts", str(tmp_path / "stage3.json")
    for found in run_ranks(target, path=str(folder), stage=3, config=config):
        assert found["as it is"] == "it was loaded" and found["random numbers"] is True
        assert "1 of the weights" in found["by weights"] and "(lm_head.weight)" in found["by weights"]


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


FLAG = "--actor_model_name_or_path"
CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).write_text("it ran")


class TheirConfig(LlamaConfig):
    model_type = "their_own"


class TheirForCausalLM(LlamaForCausalLM):
    config_class = TheirConfig
"""


@pytest.fixture
def code_folder(tmp_path, monkeypatch):
    """A Llama under another name, with its code."""
    cache = str(tmp_path / "modules")
    for module in (transformers.dynamic_module_utils, transformers.utils.hub):
        monkeypatch.setattr(module, "HF_MODULES_CACHE", cache)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("a question was asked on stdin"))
    path = Path(make_causal_lm(tmp_path / "theirs"))
    (path / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    auto_map = {"AutoConfig": "own.TheirConfig", "AutoModelForCausalLM": "own.TheirForCausalLM"}
    damages.edit_config(path, model_type="their_own", architectures=["TheirForCausalLM"], auto_map=auto_map)
    return path


def test_decoding_changes_no_text_and_the_saved_tokenizer_keeps_its_setting(tmp_path):
    words = ["</s>", "do", "n't", ",", "."]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="</s>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=True)
    path, ids = make_causal_lm(tmp_path / "model"), [1, 2, 3, 1, 4]
    made.save_pretrained(path)
    assert made.decode(ids) == "don't, do."
    read = read_tokenizer(path, FLAG)
    assert read.decode(ids) == "do n't , do ." and read.batch_decode([ids]) == ["do n't , do ."]
    save_tokenizer(read, tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").decode(ids) == "don't, do."
    assert read.decode(ids) == "do n't , do ."  # the tokenizer itself is as it was


def test_without_permission_nothing_runs_and_one_message_says_so(code_folder, tmp_path):
    for read in (read_config, check_policy, check_decoding, lambda p, w: load_policy(p, torch.float32, what=w)):
        with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs brings code of its own .*--trust_remote_code if you"):
            read(str(code_folder), FLAG)
    words = {"tokenizer_class": "Their", "auto_map": {"AutoTokenizer": ["own.Their", None]}}
    path = code_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs brings code of its own"):
        read_tokenizer(str(code_folder), FLAG)
    assert not (tmp_path / "mark").exists()


def test_a_known_family_with_code_beside_it_is_read_without_running_it(code_folder, tmp_path):
    damages.edit_config(code_folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(load_policy(str(code_folder), torch.float32).model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("attn_implementation", "theirs/attention"),
        ("_attn_implementation", "paged|kernels-community/flash-attn2@v1:forward"),
        ("attn_implementation", {"": "theirs/attention"}),
        ("attn_implementation", "flash_attention_2"),
        ("experts_implementation", "sonicmoe"),
    ],
)
def test_code_that_a_configuration_names_on_the_hub_is_not_fetched(tmp_path, monkeypatch, name, value):
    monkeypatch.setattr(config_and_tokenizer, "is_kernels_available", lambda: True)
    for module, function in ((hub_kernels, "get_kernel"), (modeling_utils, "lazy_import_flash_attention")):
        monkeypatch.setattr(module, function, lambda *names, **options: pytest.fail(f"{names} was fetched"))
    path = make_causal_lm(tmp_path / "theirs")
    damages.edit_config(Path(path), **{name: value})
    for read in (read_config, check_policy, check_decoding, lambda p, w: load_policy(p, torch.float32, what=w)):
        with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs/config.json has '.+' as its {name.strip('_')}: code "):
            read(path, FLAG)
    assert read_config(path, FLAG, trust_remote_code=True).model_type == "llama"


def test_with_permission_it_computes_is_copied_checked_and_saved_with_its_code(code_folder, tmp_path):
    plain = load_policy(make_causal_lm(tmp_path / "plain"), torch.float32)
    policy = load_policy(str(code_folder), torch.float32, what=FLAG, trust_remote_code=True)
    check_decoding(str(code_folder), FLAG, trust_remote_code=True)
    assert type(policy.model).__name__ == "TheirForCausalLM" and (tmp_path / "mark").exists()
    tokens = torch.arange(4, 14).view(1, 10)
    with torch.no_grad():
        torch.testing.assert_close(policy.model(tokens).logits, plain.model(tokens).logits)
    copy = ActorCopy(SimpleNamespace(module=policy, stage=3, version=0)).module()
    assert type(copy.model) is type(policy.model)
    save_model(policy, full_state(policy.model), make_tokenizer(), tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved"), torch.float32, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(again.model(tokens).logits, plain.model(tokens).logits)
    damages.edit_weights(code_folder, damages.drop_layer)
    with pytest.raises(UserError, match="9 tensors are missing"):
        load_policy(str(code_folder), torch.float32, what=FLAG, trust_remote_code=True)
