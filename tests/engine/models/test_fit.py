"""Weights that are not those of the model are refused by name before anything is loaded, in every family."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTJConfig, GPTNeoConfig

from engine.errors import UserError
from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.loading import load_policy, load_scorer, new_scorer
from scripts.harness import model_damages as damages
from scripts.harness.model_damages import edit_config, edit_weights
from scripts.harness.models import make_causal_lm, make_scorer, save_random
from scripts.harness.ranks import run_ranks
from tests.engine.models.deepspeed_chat_models import deepspeed_chat_actor, deepspeed_chat_reward
from tests.engine.models.test_families import FAMILIES, odd_config

FLAG = "--actor_model_name_or_path"
A_LAYER = 9  # tensors of one layer of a Llama: 4 of attention, 3 of the MLP, 2 norms
WHAT_TO_DO = r"Give the config\.json and the weights that were written together\.$"


def refused(check, path, message):
    with pytest.raises(UserError, match=message) as error:
        check(str(path), FLAG)
    assert str(error.value).startswith(f"{FLAG}: ") and str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_accepted_and_its_missing_tensors_are_named(tmp_path, family):
    for tied in (False, True):
        actor = make_causal_lm(tmp_path / f"actor_{tied}", family, tied=tied)
        check_policy(actor, FLAG), check_trunk(actor, FLAG)
        damages.as_pickle(make_causal_lm(tmp_path / "pickle", family, tied=tied))
        check_policy(str(tmp_path / "pickle"), FLAG), check_trunk(str(tmp_path / "pickle"), FLAG)
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
    check_scorer(make_scorer(tmp_path / "critic", family), FLAG)
    edit_weights(tmp_path / "critic", lambda state: {n: t for n, t in state.items() if n != "score.weight"})
    refused(check_scorer, tmp_path / "critic", r"1 tensor is missing \(score\.weight\)")


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_families_of_another_head_are_accepted(tmp_path, family):
    check_policy(save_random(AutoModelForCausalLM.from_config(odd_config(family)), tmp_path), FLAG)


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
            load_policy(str(tmp_path / family), torch.float32, what=FLAG)
            edit_weights(
                tmp_path / family, lambda state, named=named: {k: v for k, v in state.items() if k not in named}
            )
    edit_weights(tmp_path / "gptj", lambda state: state | {"transformer.h.1.attn.bias": torch.ones(32)})
    refused(check_policy, tmp_path / "gptj", r"1 tensor is left over \(transformer\.h\.1\.attn\.bias\)")


@pytest.mark.parametrize("layers, message", [(3, f"{A_LAYER} tensors are missing"), (1, f"{A_LAYER} tensors are left")])
def test_a_number_of_layers_that_is_not_the_weights_is_refused(tmp_path, layers, message):
    edit_config(make_causal_lm(tmp_path / "actor"), num_hidden_layers=layers)
    refused(check_policy, tmp_path / "actor", message)
    edit_config(make_scorer(tmp_path / "critic"), num_hidden_layers=layers)
    refused(check_scorer, tmp_path / "critic", message)
    path, _, _ = deepspeed_chat_reward(tmp_path / "theirs", "llama")
    check_scorer(path, FLAG)
    edit_config(path, num_hidden_layers=layers)
    refused(check_scorer, path, message)
    path, _ = deepspeed_chat_actor(tmp_path / "theirs_actor")
    check_policy(path, FLAG)
    edit_config(path, num_hidden_layers=layers)
    refused(check_policy, path, "16 tensors are (missing|left over)")  # of an OPT's layer: 8 weights and 8 biases


def test_the_reward_models_weights_in_the_sft_folder_and_the_reverse_are_refused(tmp_path):
    actor, critic = make_causal_lm(tmp_path / "actor"), make_scorer(tmp_path / "critic")
    damages.weights_of(critic)(make_causal_lm(tmp_path / "a"))
    refused(check_policy, tmp_path / "a", r"1 tensor is missing \(lm_head.*1 tensor is left over \(score\.weight\)")
    refused(check_trunk, tmp_path / "a", r"1 tensor is missing \(lm_head.*1 tensor is left over \(score\.weight\)")
    damages.weights_of(actor)(make_scorer(tmp_path / "b"))
    refused(check_scorer, tmp_path / "b", r"1 tensor is missing \(score.*1 tensor is left over \(lm_head\.weight\)")


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
        with pytest.raises(UserError, match=r"NaN or infinite numbers stand in 1 of .* \(model\.norm\.weight\)"):
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
        check_policy(str(tmp_path), FLAG)
        files = json.loads(index.read_text())
        name = "model.layers.1.mlp.up_proj.weight"
        shard = tmp_path / files["weight_map"][name]
        other = next(file for file in files["weight_map"].values() if file != shard.name)
        whole = index.read_text()
        for text, message in (
            (whole[: len(whole) // 2], r"index\.json is broken \(JSONDecodeError"),
            ("", r"index\.json is broken"),
            ("[]", r"index\.json is broken"),
            ('{"weight_map": {}}', r"names no file"),
            ('{"weight_map": {"a": "../a.safetensors"}}', r"names '\.\./a\.safetensors'"),
            (
                json.dumps({"weight_map": files["weight_map"] | {name: other}}),
                rf"says that {name} is in {other}, which holds no such tensor",
            ),
        ):
            index.write_text(text)
            refused(check_policy, tmp_path, message)
        index.write_text(whole)
        shard.rename(tmp_path / "elsewhere")
        refused(check_policy, tmp_path, rf"{shard.name} is not there, of which the index")
        index.unlink()
        refused(check_policy, tmp_path, r"no weights \(model\.safetensors or .*Write it again")

    @pytest.mark.parametrize("share", [0, 0.3, 0.999])
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
        refused(check_policy, tmp_path / "a", "something else than tensors by their names")
        assert not (tmp_path / "it_ran").exists()
