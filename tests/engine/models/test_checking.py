"""What cannot fill its role, and weights that are not those of the model, are refused by name before anything is
loaded, in every family. A fingerprint changes with weights and configuration, and with nothing else.
"""

import itertools
import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPTJConfig,
    GPTNeoConfig,
    T5Config,
)

from engine.errors import UserError
from engine.models.checking import (
    BLOCK,
    BLOCKS,
    block_starts,
    check_policy,
    check_scorer,
    check_trunk,
    check_vocabularies,
    fingerprint,
)
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy, load_scorer, new_scorer
from scripts.harness import model_damages as damages
from scripts.harness.model_damages import edit_config, edit_weights
from scripts.harness.models import make_causal_lm, make_config, make_scorer, make_tokenizer, save_random
from scripts.harness.ranks import run_ranks
from tests.engine.models.deepspeed_chat_models import deepspeed_chat_reward
from tests.engine.models.test_families import FAMILIES

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
            r"is not a reward model but LlamaForCausalLM\. Give a folder written by training/step2_reward\.py",
        ),
        (lambda folder: with_labels(folder, 2), r"has num_labels = 2\. Give a reward model, which has 1"),
        (
            lambda folder: config_only(folder, T5Config(num_labels=1), architectures=["T5ForSequenceClassification"]),
            r"of type 't5', which is not a decoder-only model.*Give one",
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


def test_a_reward_model_is_refused_as_an_actor(tmp_path):
    ours, theirs = make_scorer(tmp_path / "ours"), deepspeed_chat_reward(tmp_path / "theirs", "opt")[0]
    for path, found in ((ours, "LlamaForSequenceClassification"), (theirs, "a reward model of DeepSpeed-Chat")):
        with pytest.raises(UserError, match=rf"^--actor: .* is not a language model but {found}\. Give the SFT model"):
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
    with pytest.raises(UserError, match=rf"^{FLAG}: the tokenizer in .*reward gives other ids.*gets texts"):
        check_vocabularies(make_tokenizer(), path, FLAG)


def test_a_reward_model_without_a_tokenizer_and_with_many_more_rows_is_told(tmp_path):
    path, tokens = make_scorer(tmp_path / "reward"), make_tokenizer()
    config = tmp_path / "reward" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 256}))
    assert check_vocabularies(tokens, path, FLAG) == []  # its tokenizer says that the rows are padding
    for file in (tmp_path / "reward").glob("tokenizer*"):
        file.unlink()
    (told,) = check_vocabularies(tokens, path, FLAG)
    assert told.startswith(f"{FLAG} {path}: reads the actor's token ids, since") and "256 rows" in told
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 128}))
    assert check_vocabularies(tokens, path, FLAG) == []


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--actor: no tokenizer at .*Save one beside the model"):
        read_tokenizer(str(tmp_path), "--actor")


@pytest.mark.parametrize("changed", [{"model_max_length": [8]}], ids=str)
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


ACTOR_FLAG = "--actor_model_name_or_path"
A_LAYER = 9  # tensors of one layer of a Llama: 4 of attention, 3 of the MLP, 2 norms
WHAT_TO_DO = r"Give a config\.json and weights that were written together\.$"


def refused(check, path, message):
    with pytest.raises(UserError, match=message) as error:
        check(str(path), ACTOR_FLAG)
    assert str(error.value).startswith(f"{ACTOR_FLAG}: ") and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_and_its_missing_tensors_are_named(tmp_path, family):
    for tied in (False, True):
        actor = make_causal_lm(tmp_path / f"actor_{tied}", family, tied=tied)
        check_policy(actor, ACTOR_FLAG), check_trunk(actor, ACTOR_FLAG)
        damages.as_pickle(make_causal_lm(tmp_path / "pickle", family, tied=tied))
        check_policy(str(tmp_path / "pickle"), ACTOR_FLAG), check_trunk(str(tmp_path / "pickle"), ACTOR_FLAG)
        (tmp_path / "pickle" / "pytorch_model.bin").unlink()
        taken: list[str] = []

        def without_one(state, taken=taken):
            taken.append(next(name for name in state if "layers.1." in name or "h.1." in name))
            return {name: tensor for name, tensor in state.items() if name not in taken}

        edit_weights(actor, without_one)
        refused(
            check_policy, actor, rf"1 tensor is missing \([a-z_]*\.?{taken[0].partition('.')[2]}\)\. .*{WHAT_TO_DO}"
        )
        refused(check_trunk, actor, "1 tensor is missing")
    check_scorer(make_scorer(tmp_path / "critic", family), ACTOR_FLAG)
    edit_weights(tmp_path / "critic", lambda state: {n: t for n, t in state.items() if n != "score.weight"})
    refused(check_scorer, tmp_path / "critic", r"1 tensor is missing \(score\.weight\)")


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            damages.rename,
            rf"{A_LAYER} tensors are missing \(model\.layers\.1\.input_layernorm\.weight, .* and 6 more\); "
            rf"{A_LAYER} tensors are left over \(model\.blocks\.1\.input_layernorm\.weight, ",
        ),
        (damages.drop_layer, rf"{A_LAYER} tensors are missing \([^)]* and 6 more\)\. "),
        (damages.integers, r"1 tensor is of type I32 in .* \(model\.layers\.0\.mlp\.up_proj\.weight\).*fp32, fp16 or"),
        (damages.pack, r"14 tensors are of type U8 in .*quantized.*Give the model in fp32, fp16 or bf16"),
        (lambda state: state | {"score.weight": torch.ones(1, 32)}, r"1 tensor is left over \(score\.weight\)\. "),
        (
            lambda state: state | {"lm_head.weight": torch.ones(65, 32)},
            r"1 tensor has another shape \(lm_head\.weight: \(65, 32\), not \(64, 32\) by config",
        ),
    ],
)
def test_other_weights_are_refused(tmp_path, edit, message):
    edit_weights(make_causal_lm(tmp_path), edit)
    refused(check_policy, tmp_path, message)
    refused(lambda path, what: load_policy(path, torch.float32, what=what), tmp_path, message)
    refused(lambda path, what: new_scorer(path, torch.float32, 0, 0, what=what), tmp_path, message)


def test_what_older_versions_saved_beside_the_weights_is_no_weight(tmp_path):
    mask = torch.ones(1, 1, 64, 64)
    beside = {
        "gpt2": {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4)},
        "gpt_neo": {"h.1.attn.attention.bias": mask.bool(), "h.1.attn.attention.masked_bias": torch.tensor(-1e9)},
        "gptj": {"h.1.attn.bias": mask.bool(), "h.1.attn.masked_bias": torch.tensor(-1e9)},
        "llama": {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)},
    }
    sizes = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    configs = {
        "gpt_neo": GPTNeoConfig(
            **sizes,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global"], 2]],
            max_position_embeddings=64,
        ),
        "gptj": GPTJConfig(**sizes, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    }
    for family, tensors in beside.items():
        if family in configs:
            save_random(AutoModelForCausalLM.from_config(configs[family]), tmp_path / family)
        else:
            make_causal_lm(tmp_path / family, family)
        for prefix in ("", "transformer."):
            named = {prefix + name if name.startswith("h.") else name: tensor for name, tensor in tensors.items()}
            edit_weights(tmp_path / family, lambda state, named=named: state | named)
            load_policy(str(tmp_path / family), torch.float32, what=ACTOR_FLAG)
            edit_weights(
                tmp_path / family, lambda state, named=named: {k: v for k, v in state.items() if k not in named}
            )
    edit_weights(tmp_path / "gptj", lambda state: state | {"transformer.h.1.attn.bias": torch.ones(32)})
    refused(check_policy, tmp_path / "gptj", r"1 tensor is left over \(transformer\.h\.1\.attn\.bias\)")


def test_quantized_models_and_adapters_are_refused(tmp_path):
    edit_config(make_causal_lm(tmp_path / "packed"), quantization_config={"quant_method": "bitsandbytes"})
    refused(check_policy, tmp_path / "packed", r"is quantized \(bitsandbytes\)\. .*dequantize it")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    refused(check_policy, tmp_path / "adapter", r"does not say of which model it is an adapter")


@pytest.mark.slow
def test_what_the_real_load_finds_is_refused_on_all_ranks_at_stages_0_and_3(tmp_path):
    """Where the headers were not looked at, as for a name on the Hub that is still to be fetched."""
    folders = {edit.__name__: make_causal_lm(tmp_path / edit.__name__) for edit in (damages.drop_layer, damages.rename)}
    folders["nan"], folders["whole"] = make_causal_lm(tmp_path / "nan"), make_causal_lm(tmp_path / "whole", tied=True)
    edit_weights(folders["drop_layer"], damages.drop_layer)
    edit_weights(folders["rename"], damages.rename)
    edit_weights(folders["nan"], lambda state: state | {"lm_head.weight": state["lm_head.weight"] * float("nan")})
    work = "tests.distributed.work_model_files:second_verdicts"
    for rank in run_ranks(work, world=2, stages=(0, 3), folders=folders):
        for said in rank.values():
            for name in ("drop_layer", "rename"):
                assert f"{A_LAYER} tensors are missing (model.layers.1." in said[name], said
            assert "1 of the weights" in said["nan"] and "(lm_head.weight)" in said["nan"]
            assert said["whole"] == "it was loaded"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(tmp_path, value):
    def spoil(state):
        state["model.norm.weight"][3] = value
        return state

    edit_weights(make_causal_lm(tmp_path / "actor"), spoil)
    edit_weights(make_scorer(tmp_path / "critic"), spoil)
    for load, name in ((load_policy, "actor"), (load_scorer, "critic")):
        with pytest.raises(UserError, match=r"NaN or infinite numbers are in 1 of .* \(model\.norm\.weight\)"):
            load(str(tmp_path / name), torch.float32)


def test_numbers_too_large_for_fp16_are_refused(tmp_path):
    edit_weights(make_causal_lm(tmp_path), lambda state: state | {"lm_head.weight": 1e5 * torch.ones(64, 32)})
    load_policy(str(tmp_path), torch.float32)
    with pytest.raises(UserError, match=r"lm_head\.weight\).*65504.*--dtype bf16"):
        load_policy(str(tmp_path), torch.float16)


class TestFiles:
    """Broken files: one message each, and nothing in them runs."""

    def test_shards(self, tmp_path):
        index = damages.in_shards(make_causal_lm(tmp_path))
        check_policy(str(tmp_path), ACTOR_FLAG)
        files = json.loads(index.read_text())
        name = "model.layers.1.mlp.up_proj.weight"
        shard = tmp_path / files["weight_map"][name]
        whole = index.read_text()
        for text, message in (
            (whole[: len(whole) // 2], r"index\.json is broken \(JSONDecodeError"),
            ("", r"index\.json is broken"),
            ("[]", r"index\.json is broken"),
            ('{"weight_map": {}}', r"names no file"),
            ('{"weight_map": {"a": "../a.safetensors"}}', r"names '\.\./a\.safetensors'"),
        ):
            index.write_text(text)
            refused(check_policy, tmp_path, message)
        index.write_text(whole)
        shard.rename(tmp_path / "elsewhere")
        refused(check_policy, tmp_path, rf"{shard.name} does not exist, but the index")
        index.unlink()
        refused(check_policy, tmp_path, r"no weights \(model\.safetensors or .*Save the model again")

    @pytest.mark.parametrize("share", [0, 0.999])
    def test_cut_off(self, tmp_path, share):
        damages.cut(Path(make_causal_lm(tmp_path / "a")) / "model.safetensors", share)
        refused(check_policy, tmp_path / "a", r"model\.safetensors \(\d+ bytes\) is a broken safetensors file")
        damages.cut(damages.as_pickle(make_causal_lm(tmp_path / "b")), share)
        refused(check_policy, tmp_path / "b", r"pytorch_model\.bin.* is broken")

    def test_a_pickle_does_not_run(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "it_ran"),)

        path = damages.as_pickle(make_causal_lm(tmp_path / "a"))
        state = torch.load(path, weights_only=True)
        torch.save(state | {"bomb": Bomb()}, path)
        refused(check_policy, tmp_path / "a", r"would run code when it is read\. It was not read\..*safetensors")
        torch.save({"state_dict": state}, path)
        refused(check_policy, tmp_path / "a", "is not a dictionary of tensors")
        assert not (tmp_path / "it_ran").exists()


def flip(path: Path, place: int) -> None:
    """Change one byte."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))


def test_it_is_of_the_contents(tmp_path):
    folder = make_causal_lm(tmp_path / "a")
    known = fingerprint(folder, ACTOR_FLAG)
    shutil.copytree(folder, tmp_path / "moved")
    assert fingerprint(str(tmp_path / "moved"), ACTOR_FLAG) == known
    damages.edit_config(folder, transformers_version="4.0", _name_or_path="elsewhere")
    (Path(folder) / "notes.txt").write_text("not looked at")
    assert fingerprint(folder, ACTOR_FLAG) == known
    damages.edit_config(folder, rms_norm_eps=1e-3)
    assert fingerprint(folder, ACTOR_FLAG) != known
    assert fingerprint(make_causal_lm(tmp_path / "b", seed=1), ACTOR_FLAG) != known
    pickled = damages.as_pickle(tmp_path / "moved")
    before = fingerprint(str(tmp_path / "moved"), ACTOR_FLAG)
    flip(pickled, pickled.stat().st_size // 2)
    assert fingerprint(str(tmp_path / "moved"), ACTOR_FLAG) not in (before, known)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.999])
def test_every_shard_counts(tmp_path, share):
    index = damages.in_shards(make_causal_lm(tmp_path))
    known = fingerprint(str(tmp_path), ACTOR_FLAG)
    shard = max(index.parent.glob("*.safetensors"))
    flip(shard, int(shard.stat().st_size * share))
    assert fingerprint(str(tmp_path), ACTOR_FLAG) != known


def test_blocks_are_all_of_a_small_file_and_evenly_spaced_in_a_large_one():
    assert block_starts(0) == [] and block_starts(BLOCK + 1) == [0, BLOCK]
    all_of_it = block_starts(BLOCK * BLOCKS)
    assert all_of_it == [BLOCK * number for number in range(BLOCKS)]
    size = 5_000_000_000
    starts = block_starts(size)
    assert len(starts) == BLOCKS and starts[0] == 0 and starts[-1] + BLOCK == size
    steps = {after - before for before, after in itertools.pairwise(starts)}
    assert max(steps) - min(steps) <= 1 and 79e6 < min(steps) < 80e6  # 63 steps in 5 GB


def test_of_a_name_on_the_hub_it_is_the_commit(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc123"
    make_causal_lm(snapshot)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda path, name: str(snapshot / name))
    assert fingerprint("owner/name", ACTOR_FLAG) == "commit abc123"
    (snapshot / "model.safetensors").unlink()
    assert fingerprint("owner/name", ACTOR_FLAG) is None
