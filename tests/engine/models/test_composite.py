"""Composite models, which have a vision tower beside their language model, are read as transformers reads texts with
them: against transformers' own class of the whole model.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from engine.errors import UserError
from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.config_and_tokenizer import read_config, read_tokenizer
from engine.models.loading import load_policy, load_scorer, new_critic
from engine.models.saving import save_model
from scripts.harness.models import BOS, EOS, PAD, POSITIONS, VOCABULARY, WIDTH, make_adapter, save_random
from scripts.harness.weights import full_state
from tests.made import Made

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
}
_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": WIDTH,
    "patch_size": 4,
}
_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


def _rotation(**sections) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **sections}}


# {type: its settings beside those of all: of the language model, of the tower, of both together}
FAMILIES = {
    "qwen3_5": (_STATES, _QWEN_TOWER, {}),
    "qwen3_5_moe": (
        _STATES
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},
        _QWEN_TOWER,
        {},
    ),
    "gemma3": (_WINDOWS, _TOWER, {"mm_tokens_per_image": 4}),
    "gemma4": (
        {
            **_WINDOWS | {"global_head_dim": 8, "pad_token_id": PAD},
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
        _TOWER | {"num_key_value_heads": 2, "head_dim": 16},
        {},
    ),
    "qwen2_5_vl": (_rotation(mrope_section=[1, 1, 2]), _QWEN_TOWER, {}),
    "qwen3_vl": (
        _rotation(mrope_section=[2, 1, 1], mrope_interleaved=True),
        _QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {"tie_word_embeddings": True},
    ),
    "mistral3": (
        {"model_type": "mistral"},
        _TOWER | {"head_dim": 16, "model_type": "pixtral"},
        {"tie_word_embeddings": False},
    ),
}
ROWS = torch.arange(24).view(2, 12) * 7919 % (VOCABULARY - 4) + 4


def whole_config(family: str):
    """The configuration of a composite model; the ids of special tokens are at its top only."""
    text, tower, whole = FAMILIES[family]
    text = {**_TEXT, **dict.fromkeys(_IDS), **text}
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, **whole, **_IDS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: the folder of a composite model}"""
    root = tmp_path_factory.mktemp("composite")

    def made(family: str) -> Path:
        model = AutoModelForImageTextToText.from_config(whole_config(family), dtype=torch.float32)
        return Path(save_random(model, root / family))

    return Made(made)


@torch.no_grad()
def logits_of(model) -> torch.Tensor:
    return model.eval()(input_ids=ROWS, attention_mask=torch.ones_like(ROWS)).logits


def texts_of_the_whole(folder) -> torch.Tensor:
    """The logits of the whole model, by its own class in transformers."""
    return logits_of(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32))


def save(module, folder: Path) -> Path:
    save_model(module, full_state(module.model), AutoTokenizer.from_pretrained(module.base), folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_language_model_gives_the_logits_of_the_whole_and_is_saved_alone(folders, family, tmp_path):
    expected = texts_of_the_whole(folders[family])
    policy = load_policy(str(folders[family]), torch.float32)
    torch.testing.assert_close(logits_of(policy.model), expected, rtol=0, atol=2e-6)
    saved = save(policy, tmp_path / "saved")
    model, info = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=2e-6)
    found = json.loads((saved / "config.json").read_text())
    assert (found["text_part_of"], found["architectures"]) == (family, [type(model).__name__])
    whole = AutoConfig.from_pretrained(folders[family])  # transformers 5.17 keeps no ids at the top of Qwen2.5-VL
    assert {name: found[name] for name in _IDS} == {name: getattr(whole, name, None) for name in _IDS}
    assert "vision_config" not in found and not any("vis" in name for name in load_file(saved / "model.safetensors"))
    check_policy(str(saved), "model")


# {name in the files of a layout: name in transformers' composite class}: those of versions of transformers
LAYOUTS = {
    "before version 4.52": {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."},
    "as in the class": {"model.language_model.": "model.language_model.", "lm_head.": "lm_head."},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_found_by_the_names_of_each_version(folders, layout, tmp_path):
    whole = AutoModelForImageTextToText.from_pretrained(folders["mistral3"], dtype=torch.float32)
    names = {theirs: files for files, theirs in LAYOUTS[layout].items()}
    state = {}
    for name, tensor in whole.state_dict().items():
        theirs = next((theirs for theirs in names if name.startswith(theirs)), None)
        state[name if theirs is None else name.replace(theirs, names[theirs], 1)] = tensor.contiguous()
    shutil.copytree(folders["mistral3"], tmp_path, dirs_exist_ok=True)
    save_file(state, tmp_path / "model.safetensors")
    found = load_policy(str(tmp_path), torch.float32)
    torch.testing.assert_close(logits_of(found.model), texts_of_the_whole(tmp_path), rtol=0, atol=0)


def test_a_template_in_the_processors_file_is_the_tokenizers(folders, tmp_path):
    folder = shutil.copytree(folders["mistral3"], tmp_path / "templated")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = read_tokenizer(str(folder), "model")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w05"}], tokenize=False) == "<user>w05"


def edit_weights(folder: Path, target: Path, change) -> str:
    """A copy of a folder; `change` edits its {name: tensor}."""
    shutil.copytree(folder, target)
    state = load_file(target / "model.safetensors")
    change(state)
    save_file(state, target / "model.safetensors")
    return str(target)


def test_the_language_model_has_to_be_whole(folders, tmp_path):
    layer = "language_model.model.layers.1.mlp.up_proj.weight"
    lacking = edit_weights(folders["gemma3"], tmp_path / "lacking", lambda state: state.pop(layer))
    with pytest.raises(UserError, match=r"1 tensor is missing \(model.layers.1.mlp.up_proj.weight\)"):
        check_policy(lacking, "model")
    spare = edit_weights(
        folders["gemma3"], tmp_path / "spare", lambda state: state.update({layer.replace("1", "2"): state[layer] + 1})
    )
    with pytest.raises(UserError, match=r"1 tensor is left over \(model.layers.2.mlp.up_proj.weight\)"):
        check_policy(spare, "model")


def test_a_head_of_its_own_is_kept_though_the_configuration_ties_it(folders, tmp_path):
    head, embedding = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"
    folder = edit_weights(folders["gemma3"], tmp_path / "own", lambda state: state.update({head: state[embedding] + 1}))
    assert read_config(str(folders["gemma3"]), "model").tie_word_embeddings
    model = load_policy(folder, torch.float32).model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_a_whole_classifier_gives_the_scores_of_the_whole(family, tmp_path):
    config = whole_config(family)
    config.num_labels = 1
    folder = save_random(AutoModelForSequenceClassification.from_config(config, dtype=torch.float32), tmp_path)
    assert check_scorer(folder, "model") == "sequence_classification"
    scorer = load_scorer(folder, torch.float32)
    mask = torch.ones_like(ROWS)
    with torch.no_grad():
        found = scorer.sequence_scores(scorer(ROWS, mask, mask.cumsum(-1) - 1), ROWS, mask)
    whole = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    whole.config.text_config.pad_token_id = PAD  # which transformers 5 no longer takes from the top
    torch.testing.assert_close(found, logits_of(whole).squeeze(-1), rtol=0, atol=2e-6)
    with pytest.raises(UserError, match="is not a language model but .*ForSequenceClassification"):
        check_policy(folder, "model")


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_a_critic_begins_from_the_language_model(folders, family):
    check_trunk(str(folders[family]), "model")
    trunk = load_policy(str(folders[family]), torch.float32).model.base_model.state_dict()
    critic = new_critic(str(folders[family]), torch.float32).model.base_model.state_dict()
    assert trunk.keys() == critic.keys() and all(torch.equal(trunk[name], critic[name]) for name in trunk)


def test_an_adapter_of_the_whole_is_told_from_one_of_the_language_model(folders, tmp_path):
    whole = AutoModelForImageTextToText.from_pretrained(folders["gemma3"], dtype=torch.float32)
    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    get_peft_model(whole, lora).save_pretrained(tmp_path / "whole")
    with pytest.raises(UserError, match=r"If it was trained on the whole gemma3 model, .* merge it into its model"):
        check_policy(str(tmp_path / "whole"), "model")
    adapter = make_adapter(tmp_path / "adapter", str(folders["gemma3"]))
    merged = load_policy(adapter, torch.float32).model
    alone = AutoModelForCausalLM.from_pretrained(
        save(load_policy(str(folders["gemma3"]), torch.float32), tmp_path / "alone"), dtype=torch.float32
    )
    expected = logits_of(PeftModel.from_pretrained(alone, adapter))  # not merged: rounded otherwise
    torch.testing.assert_close(logits_of(merged), expected, rtol=0, atol=2e-5)
