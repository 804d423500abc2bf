"""Adapters that peft has written as models' paths: merged while they load, or gone on with, and refused where they
cannot be. Those that this program saved know the weights that they were trained on.
"""

import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, TaskType, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.checking import check_policy, check_scorer, check_trunk, fingerprint
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.lora import LoraSpec, adapt
from engine.models.saving import adapter_files, save_adapter
from engine.models.trunk import make_trunk
from scripts.harness.models import make_adapter, make_causal_lm, make_tokenizer

SEQUENCES = torch.arange(4, 20).view(2, 8)
MASK = torch.ones_like(SEQUENCES)
TARGETS = {"llama": ["q_proj", "up_proj"], "gpt2": ["c_attn", "c_fc"]}


def write_adapter(folder, base: str, *, kind=TaskType.CAUSAL_LM, seed: int = 3, **settings):
    """Write an adapter of random factors by peft; returns its model there."""
    whole = AutoModelForCausalLM if kind == TaskType.CAUSAL_LM else AutoModelForSequenceClassification
    labels = {} if kind == TaskType.CAUSAL_LM else {"num_labels": 1}
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS["llama"]} | settings
    torch.manual_seed(seed)
    model = get_peft_model(whole.from_pretrained(base, **labels), LoraConfig(task_type=kind, **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(folder), save_embedding_layers=False)  # beside an adapted head, its matrix
    return model


def logprobs(module, **role) -> torch.Tensor:
    return module(SEQUENCES, MASK, position_ids(MASK), response_length=5, **role)[0]


def peft_logprobs(model) -> torch.Tensor:
    logits = model(input_ids=SEQUENCES, attention_mask=MASK).logits[:, -6:-1]
    return logits.log_softmax(-1).gather(-1, SEQUENCES[:, -5:, None]).squeeze(-1)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gpt2", {"fan_in_fan_out": True}),
        ("llama", {"use_rslora": True, "alpha_pattern": {"up_proj": 3}, "rank_pattern": {"up_proj": 2}}),
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"layers_to_transform": [1]}),
    ],
)
@torch.no_grad()
def test_an_adapter_is_merged_while_it_loads(family, settings, tmp_path):
    base = make_causal_lm(tmp_path / "base", family)
    theirs = write_adapter(tmp_path / "adapter", base, **{"target_modules": TARGETS[family], **settings})
    expected = peft_logprobs(theirs)
    loaded = load_policy(str(tmp_path / "adapter"), torch.float32)
    assert loaded.adapters is None and all(parameter.requires_grad for parameter in loaded.parameters())
    torch.testing.assert_close(logprobs(loaded), expected, atol=1e-5, rtol=1e-5)
    assert (logprobs(load_policy(base, torch.float32)) - expected).abs().max() > 0.1


@torch.no_grad()
def test_training_goes_on_with_an_adapter_and_keeps_a_frozen_copy(tmp_path):
    base = make_causal_lm(tmp_path / "base")
    expected = peft_logprobs(write_adapter(tmp_path / "adapter", base, use_rslora=True))
    module = load_policy(str(tmp_path / "adapter"), torch.float32, merge=False)
    with pytest.raises(UserError, match="has dimension 4, and LoRA is asked for with 8"):
        adapt(module, LoraSpec(dim=8, only=True), "actor", "reference")
    adapt(module, LoraSpec(dim=4, only=True), "actor", "reference")
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert len(trained) == 8 and all(".lora_A.actor." in name or ".lora_B.actor." in name for name in trained)
    torch.testing.assert_close(logprobs(module), expected, atol=1e-5, rtol=1e-5)
    for _, b in module.adapters.factors().values():
        b += 0.1
    assert (logprobs(module) - expected).abs().max() > 0.1
    torch.testing.assert_close(logprobs(module, role="reference"), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_reward_models_adapter_brings_its_head(tmp_path):
    base, folder = make_causal_lm(tmp_path / "base"), tmp_path / "adapter"
    theirs = write_adapter(folder, base, kind=TaskType.SEQ_CLS)
    (folder / "score.json").write_text(
        json.dumps({"score_offset": -0.5, "score_position": "last", "pad_token_id": None})
    )
    assert check_scorer(str(folder), "--critic") == "language_model"
    loaded = load_scorer(str(folder), torch.float32)
    theirs.config.pad_token_id = theirs.base_model.model.config.pad_token_id = 0
    scores = loaded(SEQUENCES, MASK, position_ids(MASK))
    expected = theirs(input_ids=SEQUENCES, attention_mask=MASK).logits.squeeze(-1) - 0.5
    torch.testing.assert_close(loaded.sequence_scores(scores, SEQUENCES, MASK), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match="is a reward model's"):
        check_policy(str(folder), "--actor")
    new_scorer(str(folder), torch.float32, None, 0)  # a new head on the merged trunk
    write_adapter(tmp_path / "other", base)
    check_trunk(str(tmp_path / "other"), "--model")
    with pytest.raises(UserError, match="is a language model's: neither it nor its base"):
        check_scorer(str(tmp_path / "other"), "--critic")
    for broken in ('{"score_off', '{"score_offset": "low"}'):
        (folder / "score.json").write_text(broken)
        with pytest.raises(UserError, match="--critic: .*score.json is broken"):
            check_scorer(str(folder), "--critic")


def test_a_base_is_found_from_the_adapters_folder_and_both_count_in_the_fingerprint(tmp_path, monkeypatch):
    base, folder = make_causal_lm(tmp_path / "base"), tmp_path / "adapter"
    write_adapter(folder, base)
    edit(folder, base_model_name_or_path="../base")
    monkeypatch.chdir("/")
    check_policy(str(folder), "--actor")
    assert read_tokenizer(str(folder), "--actor").get_vocab() == read_tokenizer(base, "--actor").get_vocab()
    first = fingerprint(str(folder), "--actor")
    change(folder, lambda state: {name: value + 1 for name, value in state.items()})
    second = fingerprint(str(folder), "--actor")
    make_causal_lm(tmp_path / "base", seed=5)
    third = fingerprint(str(folder), "--actor")
    assert len({first, second, third, fingerprint(base, "--actor")}) == 4
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(folder)
    assert "<one more>" in read_tokenizer(str(folder), "--actor").get_vocab()


def edit(folder: Path, **settings) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change(folder: Path, changed) -> None:
    file = folder / "adapter_model.safetensors"
    save_file(changed(load_file(file)), file)


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def renamed(state: dict) -> dict:
    return {name.replace("layers.1", "layers.7"): value for name, value in state.items()}


DAMAGES = {
    "the weights' file is gone": (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
    "the weights' file is cut": (cut, "broken safetensors file"),
    "no base": (lambda f: edit(f, base_model_name_or_path=None), "does not say of which model"),
    "a base that is gone": (lambda f: edit(f, base_model_name_or_path="/none/such"), "is not there: /none/such"),
    "another kind": (lambda f: edit(f, peft_type="PREFIX_TUNING"), "of kind 'PREFIX_TUNING' and no LoRA"),
    "DoRA": (lambda f: edit(f, use_dora=True), "has DoRA"),
    "whole modules": (lambda f: edit(f, modules_to_save=["embed_tokens"]), "modules_to_save: embed_tokens"),
    "other layers": (lambda f: change(f, renamed), "does not fit its base.* missing .*; .* left over"),
    "another rank": (lambda f: edit(f, r=2), "does not fit its base.* another shape"),
    "a matrix of the base": (
        lambda f: change(f, lambda state: state | {"base_model.model.lm_head.base_layer.weight": torch.ones(2)}),
        r"holds a matrix of its base too \(lm_head.base_layer.weight\).*save_embedding_layers=False",
    ),
    "foreign names": (
        lambda f: change(f, lambda state: {name[5:]: value for name, value in state.items()}),
        "does not fit its base.* missing .*; .* left over",
    ),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_adapter(folder / "adapter", make_causal_lm(folder / "base"))
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_whole_adapter_of_its_base_is_refused(damage, whole, tmp_path):
    folder, (harm, message) = tmp_path / "adapter", DAMAGES[damage]
    shutil.copytree(whole / "adapter", folder)
    harm(folder)
    with pytest.raises(UserError, match=f"(?s)--actor.*{message}"):
        check_policy(str(folder), "--actor")


def test_adapters_of_other_bases_and_kinds_and_of_no_numbers_are_refused(whole, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(whole / "adapter", folder)
    edit(folder, base_model_name_or_path=make_causal_lm(tmp_path / "deeper", layers=3))
    with pytest.raises(UserError, match="does not fit its base .*deeper: 4 tensors are missing .*layers.2"):
        check_policy(str(folder), "--actor")
    other = tmp_path / "ia3"
    config = IA3Config(task_type=TaskType.CAUSAL_LM, target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(AutoModelForCausalLM.from_pretrained(whole / "base"), config).save_pretrained(str(other))
    with pytest.raises(UserError, match="of kind 'IA3' and no LoRA"):
        check_policy(str(other), "--actor")
    bad = tmp_path / "nan"
    shutil.copytree(whole / "adapter", bad)
    change(bad, lambda state: {name: value * float("nan") for name, value in state.items()})
    with pytest.raises(UserError, match="NaN or infinite numbers are in 8 of the adapter's weights"):
        load_policy(str(bad), torch.float32)


SPEC = LoraSpec(dim=2, only=True)


def saved(module, folder) -> str:
    """The folder of the module's adapter, which changes nothing."""
    adapt(module, SPEC, "model")
    state = {
        f"{name}.lora_{ab}.weight": f for name, two in module.adapters.factors().items() for ab, f in zip("AB", two)
    }
    if hasattr(module.model, "score"):
        state["score.weight"] = module.model.score.weight.detach()
    save_adapter(module, state, make_tokenizer(), folder)
    return str(folder)


def pointed_at(folder: str, base) -> None:
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(base)}))


def test_other_weights_of_the_same_shapes_are_refused_as_the_base(tmp_path):
    base = make_causal_lm(tmp_path / "base")
    policy = saved(load_policy(base, torch.float32), tmp_path / "policy")
    scorer = saved(new_scorer(base, torch.float32, None, 0), tmp_path / "scorer")
    looks = [(check_policy, policy), (check_trunk, policy), (check_scorer, scorer)]
    looks += [
        (functools.partial(load, dtype=torch.float32), path)
        for load, path in ((load_policy, policy), (load_scorer, scorer))
    ]
    shutil.copytree(base, tmp_path / "moved")
    for folder in (policy, scorer):
        pointed_at(folder, tmp_path / "moved")
    for look, folder in looks:  # of equal content
        look(folder, what="--flag")
    for new_base in (tmp_path / "other", tmp_path / "moved"):  # another model; one that was trained on where it stood
        make_causal_lm(new_base, seed=5)
        for look, folder in looks:
            pointed_at(folder, new_base)
            with pytest.raises(
                UserError,
                match=re.escape(
                    f"--flag: the adapter in {folder} does not belong to the weights in its base {new_base}: it was "
                    f"trained on {base}, and since then the weights or config.json have changed. Put that model there"
                ),
            ):
                look(folder, what="--flag")
    (tmp_path / "policy" / "base.json").write_text("{")
    with pytest.raises(UserError, match="--flag: .*base.json is broken"):
        check_policy(policy, "--flag")
    (tmp_path / "policy" / "base.json").unlink()
    check_policy(policy, "--flag")  # as one of peft's, which has no such file


def test_it_is_of_the_weights_that_were_loaded_and_not_of_those_at_saving(tmp_path):
    base = make_causal_lm(tmp_path / "base")
    policy, trunk = load_policy(base, torch.float32), make_trunk(load_policy(base, torch.float32), SPEC, {})
    adapt(policy, SPEC, "actor")
    make_causal_lm(tmp_path / "base", seed=5)
    folder = saved(load_policy(base, torch.float32), tmp_path / "later")
    now = (tmp_path / "later" / "base.json").read_text()
    assert adapter_files(policy)["base.json"] == adapter_files(trunk)["base.json"] != now
    check_policy(folder, "--flag")


def test_a_new_score_head_takes_no_adapter_of_the_output_head(tmp_path):
    """Tied to the embedding or not; the policy with that adapter is whole."""
    for tied in (False, True):
        base = make_causal_lm(tmp_path / f"base_{tied}", tied=tied)
        adapter = make_adapter(tmp_path / f"policy_{tied}", base, targets=("all-linear", "lm_head"))
        check_policy(adapter, "--flag")
        with pytest.raises(
            UserError, match=r"--flag: the adapter in .* changes the output head too \(lm_head\), of wh"
        ):
            check_trunk(adapter, "--flag")
        check_trunk(make_adapter(tmp_path / f"layers_{tied}", base), "--flag")
