"""Code in a model's folder runs where that is allowed, and is saved with it; else it does not run, nor is one asked."""

import builtins
import json
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils
import transformers.utils.hub
from transformers import modeling_utils
from transformers.integrations import hub_kernels

from engine.errors import UserError
from engine.models import reading
from engine.models.checking import check_policy
from engine.models.loading import empty_like, load_policy
from engine.models.reading import read_config, read_tokenizer
from engine.models.saving import save_model
from engine.rollout.passes import check_attention
from scripts.harness import model_damages as damages
from scripts.harness.models import make_causal_lm, make_tokenizer
from scripts.harness.weights import full_state

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
def folder(tmp_path, monkeypatch):
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


def test_without_permission_nothing_runs_and_one_message_says_so(folder, tmp_path):
    for read in (read_config, check_policy, check_attention, lambda p, w: load_policy(p, torch.float32, what=w)):
        with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs brings code of its own .*--trust_remote_code if you"):
            read(str(folder), FLAG)
    words = {"tokenizer_class": "Their", "auto_map": {"AutoTokenizer": ["own.Their", None]}}
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs brings code of its own"):
        read_tokenizer(str(folder), FLAG)
    assert not (tmp_path / "mark").exists()


def test_a_known_family_with_code_beside_it_is_read_without_running_it(folder, tmp_path):
    damages.edit_config(folder, model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(load_policy(str(folder), torch.float32).model).__name__ == "LlamaForCausalLM"
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
    monkeypatch.setattr(reading, "is_kernels_available", lambda: True)
    for module, function in ((hub_kernels, "get_kernel"), (modeling_utils, "lazy_import_flash_attention")):
        monkeypatch.setattr(module, function, lambda *names, **options: pytest.fail(f"{names} was fetched"))
    path = make_causal_lm(tmp_path / "theirs")
    damages.edit_config(Path(path), **{name: value})
    for read in (read_config, check_policy, check_attention, lambda p, w: load_policy(p, torch.float32, what=w)):
        with pytest.raises(UserError, match=rf"^{FLAG}: .*theirs/config.json has '.+' as its {name.strip('_')}, code "):
            read(path, FLAG)
    assert read_config(path, FLAG, trust_remote_code=True).model_type == "llama"


def test_with_permission_it_computes_is_copied_checked_and_saved_with_its_code(folder, tmp_path):
    plain = load_policy(make_causal_lm(tmp_path / "plain"), torch.float32)
    policy = load_policy(str(folder), torch.float32, what=FLAG, trust_remote_code=True)
    check_attention(str(folder), FLAG, trust_remote_code=True)
    assert type(policy.model).__name__ == "TheirForCausalLM" and (tmp_path / "mark").exists()
    tokens = torch.arange(4, 14).view(1, 10)
    with torch.no_grad():
        torch.testing.assert_close(policy.model(tokens).logits, plain.model(tokens).logits)
    copy = empty_like(policy, torch.device("cpu"))
    assert type(copy.model) is type(policy.model)
    save_model(policy, full_state(policy.model), make_tokenizer(), tmp_path / "saved")
    again = load_policy(str(tmp_path / "saved"), torch.float32, trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(again.model(tokens).logits, plain.model(tokens).logits)
    damages.edit_weights(folder, damages.drop_layer)
    with pytest.raises(UserError, match="9 tensors are missing"):
        load_policy(str(folder), torch.float32, what=FLAG, trust_remote_code=True)
