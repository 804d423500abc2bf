"""Models with adapters as they are saved, alone and merged, which peft and transformers open alike; and flags of a new
adapter, refused where training goes on with one that is there.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.lora import LoraSpec, adapt
from scripts.harness.models import PAD, make_causal_lm, make_scorer, make_tokenizer
from tests.engine.meters import LiveBytes
from tests.engine.models.test_adapter_folders import write_adapter
from tests.training.config.command_lines import parse
from training.config.step3 import RLHFFlags
from training.config.supervised import SFTFlags
from training.runtime import model_folders
from training.runtime.models import adapted_model, adapted_roles

SEQUENCES = torch.arange(4, 20).view(2, 8)
MASK = torch.ones_like(SEQUENCES)
INPUTS = {"input_ids": SEQUENCES, "attention_mask": MASK}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def adapted(module, role: str, **settings):
    """The module with an adapter that is not nothing."""
    adapt(module, LoraSpec(dim=4, alpha=6.0, **({"only": True} | settings)), role)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for _, b in module.adapters.factors().values():
            b.copy_(0.3 * torch.randn(b.shape, generator=generator))
    return module.eval()


def save(module, folder: Path, name: str, merged: bool = True, edit=None) -> dict[str, Path]:
    model = SimpleNamespace(module=module)
    return model_folders.save_forms(model, make_tokenizer(), folder, name, merged, edit)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
@torch.no_grad()
def test_the_adapter_and_the_merged_model_open_with_peft_and_transformers_alike(family, tmp_path):
    base = make_causal_lm(tmp_path / "base", family, tied=family == "gpt2")
    policy = adapted(load_policy(base, torch.float32), "actor")
    expected = policy.model(**INPUTS).logits
    saved = save(policy, tmp_path / "out", "actor")
    assert saved == {"actor_adapter": tmp_path / "out/actor_adapter", "actor": tmp_path / "out/actor"}
    files = {path.name for path in saved["actor_adapter"].iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert "model.safetensors" not in files
    theirs = AutoPeftModelForCausalLM.from_pretrained(saved["actor_adapter"])
    torch.testing.assert_close(theirs(**INPUTS).logits, expected, **CLOSE)
    beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), saved["actor_adapter"])
    torch.testing.assert_close(beside(**INPUTS).logits, expected, **CLOSE)
    merged = AutoModelForCausalLM.from_pretrained(saved["actor"])
    assert {name for name, _ in merged.named_parameters()} == {
        name for name, _ in AutoModelForCausalLM.from_pretrained(base).named_parameters()
    }
    torch.testing.assert_close(merged(**INPUTS).logits, expected, **CLOSE)
    for path in saved.values():  # our own
        torch.testing.assert_close(load_policy(str(path), torch.float32).model(**INPUTS).logits, expected, **CLOSE)
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(base)(**INPUTS).logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_an_adapted_head_that_is_the_embedding_too_is_saved_untied(family, tmp_path):
    base = make_causal_lm(tmp_path / "base", family, tied=True)
    policy = adapted(load_policy(base, torch.float32), "actor", targets=("all-linear", "lm_head"))
    for _, b in policy.adapters.factors().values():
        b.div_(3)  # logits of several tens would differ by their rounding
    expected, own = policy.model(**INPUTS).logits, AutoModelForCausalLM.from_pretrained(base)
    embedding, (a, b) = own.get_input_embeddings().weight, policy.adapters.factors()["lm_head"]
    saved = save(policy, tmp_path / "out", "actor")
    theirs = AutoPeftModelForCausalLM.from_pretrained(saved["actor_adapter"])
    torch.testing.assert_close(theirs(**INPUTS).logits, expected, **CLOSE)
    for merged in (
        AutoModelForCausalLM.from_pretrained(saved["actor"]),
        *(load_policy(str(path), torch.float32).model for path in saved.values()),
    ):
        torch.testing.assert_close(merged(**INPUTS).logits, expected, **CLOSE)
        torch.testing.assert_close(merged.lm_head.weight, embedding + 6.0 / 4 * b @ a, **CLOSE)
        assert torch.equal(merged.get_input_embeddings().weight, embedding) and not merged.config.tie_word_embeddings
    assert policy.model.config.tie_word_embeddings
    goes_on = load_policy(str(saved["actor_adapter"]), torch.float32, merge=False)
    adapt(goes_on, LoraSpec(dim=4, only=True), "actor", "reference")
    for role in (None, "reference"):
        goes_on.select_role(role)
        torch.testing.assert_close(goes_on.model(**INPUTS).logits, expected, **CLOSE)


@pytest.mark.parametrize("trained", [False, True], ids=["new head", "critic"])
@torch.no_grad()
def test_a_scorers_adapter_has_its_head_and_offset(trained, tmp_path):
    if trained:
        module = load_scorer(make_scorer(tmp_path / "base", "llama", offset=-0.25), torch.float32)
    else:
        module = new_scorer(make_causal_lm(tmp_path / "base"), torch.float32, PAD, seed=3)
        module.model.config.score_offset = 0.75
    scorer = adapted(module, "model")
    saved = save(scorer, tmp_path / "out", ".", edit=lambda s: s.update({"score.weight": s["score.weight"] * 2.0}))
    assert saved == {"adapter": tmp_path / "out/adapter", ".": tmp_path / "out"}
    scorer.model.score.weight.mul_(2)
    scorer.offset = -0.25 if trained else 0.75
    token_scores = scorer(SEQUENCES, MASK, position_ids(MASK))
    expected = scorer.sequence_scores(token_scores, SEQUENCES, MASK)
    for path in saved.values():
        ours = load_scorer(str(path), torch.float32)
        scores = ours(SEQUENCES, MASK, position_ids(MASK))
        torch.testing.assert_close(scores, token_scores, **CLOSE)
        torch.testing.assert_close(ours.sequence_scores(scores, SEQUENCES, MASK), expected, **CLOSE)
    theirs = AutoPeftModelForSequenceClassification.from_pretrained(saved["adapter"], num_labels=1)
    torch.testing.assert_close(theirs(**INPUTS).logits[:, 0] + scorer.offset, expected, **CLOSE)
    merged = AutoModelForSequenceClassification.from_pretrained(saved["."])
    torch.testing.assert_close(merged(**INPUTS).logits[:, 0] + scorer.offset, expected, **CLOSE)


def test_what_an_adapter_has_no_place_for_is_saved_merged_alone(tmp_path):
    policy = adapted(load_policy(make_causal_lm(tmp_path / "base"), torch.float32), "actor", only=False)
    saved = save(policy, tmp_path / "out", "actor", merged=False)
    assert list(saved) == ["actor"] and not (tmp_path / "out/actor_adapter").exists()
    only = adapted(load_policy(make_causal_lm(tmp_path / "base"), torch.float32), "actor")
    assert list(save(only, tmp_path / "alone", "actor", merged=False)) == ["actor_adapter"]
    assert not (tmp_path / "alone/actor").exists()


def test_merging_holds_no_second_model(tmp_path):
    policy = adapted(load_policy(make_causal_lm(tmp_path / "base", layers=12), torch.float32), "actor")
    largest = 4 * max(parameter.numel() for parameter in policy.parameters())
    with LiveBytes(known=policy.parameters()) as live:
        save(policy, tmp_path / "out", "actor")
    assert live.peak <= 6 * largest, (live.peak, largest)


def test_merged_models_are_saved_where_the_disk_has_room(tmp_path, monkeypatch, capsys):
    policy = adapted(load_policy(make_causal_lm(tmp_path / "base"), torch.float32), "actor")
    models = [SimpleNamespace(module=policy)]
    size = sum(4 * parameter.numel() for parameter in policy.model.parameters())
    for factor, wanted in ((2.0, True), (1.0, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=factor * size: SimpleNamespace(free=free))
        assert model_folders.merged_wanted("auto", models, tmp_path / "not yet" / "there") == wanted
    assert "saved as adapters alone" in capsys.readouterr().out
    assert model_folders.merged_wanted("true", models, tmp_path)
    assert not model_folders.merged_wanted("false", models, tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`base`, and `actor` and `critic`, adapters of it with alphas of 8 and 6."""
    folder = tmp_path_factory.mktemp("models")
    base = make_causal_lm(folder / "base")
    make_tokenizer().save_pretrained(base)
    write_adapter(folder / "actor", base)
    write_adapter(folder / "critic", base, kind="SEQ_CLS", lora_alpha=6, target_modules=["k_proj"])
    return folder


def roles(folder, *words: str, actor: str = "actor", critic: str = "critic"):
    paths = ["--actor_model_name_or_path", str(folder / actor), "--critic_model_name_or_path", str(folder / critic)]
    args = parse(*paths, "--actor_lora_dim", "4", *words, flags_class=RLHFFlags)
    return adapted_roles(args, args.resolved.dialect)


BOTH = ("--critic_lora_dim", "4")


@pytest.mark.parametrize(
    "words, flag, path, own",
    [
        (("--actor_lora_module_name", "q_proj"), "actor", "actor", r"factors in q_proj, up_proj\."),
        ((*BOTH, "--critic_lora_module_name", "k_proj"), "critic", "critic", r"factors in k_proj\."),
        ((*BOTH, "--lora_target_modules", "v_proj"), "actor", "actor", r"factors in q_proj, up_proj\."),
        (("--lora_alpha", "7"), "actor", "actor", r"alpha 8\."),
        ((*BOTH, "--lora_alpha", "7"), "actor", "actor", r"alpha 8; --critic.*/critic, which has alpha 6\."),
    ],
)
def test_step_3_refuses_what_says_nothing_of_its_adapters(words, flag, path, own, folder):
    given = " ".join(words[-2:])
    with pytest.raises(UserError) as caught:
        roles(folder, *words)
    found = rf"{given}: .*--{flag}_model_name_or_path: training goes on with the adapter in {folder / path}, which has "
    assert re.match(found + own, str(caught.value)), str(caught.value)


def test_what_is_true_of_an_adapter_or_meant_for_a_new_one_is_taken(folder):
    assert roles(folder, *BOTH).keys() == {"actor", "critic"}
    for alpha in ("8", "6"):  # the actor's and the critic's own
        roles(folder, *BOTH, "--lora_alpha", alpha)
    new = roles(folder, *BOTH, "--lora_alpha", "7", "--lora_target_modules", "v_proj", actor="base")
    assert (new["actor"].spec.alpha, len(new["actor"].layers)) == (7, 2)
    assert new["critic"].spec.alpha == 6 and all(name.endswith("k_proj") for name in new["critic"].layers)


def test_a_new_critic_on_a_shared_trunk_has_nothing_of_the_actors_adapter(folder):
    """Its rank may be another, its alpha is the flag's default, and its layers are all linear ones of two layers."""
    words = ("--share_trunk", "--only_optimize_lora", "--actor_lora_dim", "4", "--critic_lora_dim", "8")
    args = parse(*words, "--reward_function", "scores.py:score", flags_class=RLHFFlags)
    args.actor_model_name_or_path, args.critic_model_name_or_path = str(folder / "actor"), None
    found = adapted_roles(args, args.resolved.dialect)
    assert (found["actor"].spec.alpha, len(found["actor"].layers)) == (8, 4)
    assert (found["critic"].spec.dim, found["critic"].spec.alpha, len(found["critic"].layers)) == (8, 1, 14)


def test_steps_1_and_2_refuse_it_too(folder):
    def asked(*words: str):
        words = ("--model_name_or_path", str(folder / "actor"), "--lora_dim", "4", *words)
        return adapted_model(parse(*words, flags_class=SFTFlags), scorer=False)

    assert asked("--lora_alpha", "8")["model"].spec.alpha == 8
    with pytest.raises(UserError, match=r"--lora_alpha 1: --model.*which has alpha 8\. Leave the flag out"):
        asked("--lora_alpha", "1")
    for words in (("--lora_module_name", "q_proj"), ("--lora_target_modules", "q_proj")):
        with pytest.raises(UserError, match=rf"{' '.join(words)}: --model.*which has factors in q_proj, up_proj\."):
            asked(*words)
