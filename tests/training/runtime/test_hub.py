"""Model cards: what a run's record and metrics come to, what is kept private, and snippets that run as they stand."""

import json
import re

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from engine.experience import position_ids
from engine.models.loading import load_scorer
from scripts.harness.models import EOS, make_adapter, make_causal_lm, make_scorer
from training.runtime.hub import RunFacts, is_hub_name, loading, merge_card, model_card

PRIVATE = ("/home", "lovelace", "acme", "node7", "my_rules")
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "four-engine-rlhf": "0.1.0"}
START = {
    "command": "deepspeed training/step3_rlhf.py --data_path /home/lovelace/acme.jsonl",
    "working_directory": "/home/lovelace",
    "versions": VERSIONS,
    "git": {"commit": "0123abcd", "dirty": True},
    "machine": {"host": "node7", "world_size": 8, "accelerator": "A100"},
}
DIALECT = {"name": "trl_ppo", "kl_coef": 0.2, "critic_start": "reward_model", "actor_lr": 3e-6, "critic_lr": 3e-6}
DIALECT |= {"ppo_epochs": 4, "mini_batches": 1, "samples_per_prompt": 1}
PPO_FLAGS = {
    "actor_model_name_or_path": "org/sft-7b",
    "critic_model_name_or_path": "/home/lovelace/acme-reward",
    "reward_model_name_or_path": None,
    "reward_function": ["/home/lovelace/my_rules.py:score"],
    "data_path": ["/home/lovelace/acme.jsonl", "org/prompts"],
    "unsupervised_dataset_name": None,
    "max_answer_seq_len": 48,
    "seed": 1234,
}
ROWS = [
    {"step": 0, "samples": 0, "eval/score": 0.25, "eval/score_se": 0.125, "eval/kl": 0.0},
    {"step": 1, "samples": 64, "objective/kl": 0.5, "objective/kl_coef": 0.2},
    {"step": 2, "samples": 128, "objective/kl": 3.5, "objective/kl_coef": 0.1}
    | {"eval/score": 1.5, "eval/score_se": 0.0625, "eval/score_change": 1.25, "eval/score_change_se": 0.11}
    | {"eval/ema_score": 1.125, "eval/kl": 4.0},
]


def ppo(**changes) -> RunFacts:
    return RunFacts(**{"start": {**START, "flags": PPO_FLAGS, "dialect": DIALECT}, "rows": ROWS} | changes)


def supervised(rows=(), **flags) -> RunFacts:
    given = {"model_name_or_path": "org/base", "data_path": ["org/pairs"], "eval_data_path": [], **flags}
    return RunFacts(start={**START, "flags": given, "dialect": None}, rows=list(rows))


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_actors_card_says_what_the_run_was():
    text = model_card(ppo(), "actor")
    assert front(text) == {
        "library_name": "transformers",
        "tags": ["rlhf", "ppo"],
        "pipeline_tag": "text-generation",
        "base_model": "org/sft-7b",
        "base_model_relation": "finetune",
        "datasets": ["org/prompts"],
    }
    assert "Dialect `trl_ppo`, but (the dialect's in brackets) `kl_coef=0.2` (0.05)." in text
    assert "| score | 0.250 ± 0.125 | 1.500 ± 0.062 | +1.250 ± 0.110 |" in text
    assert "| KL to the reference | 0.000 | 4.000 |" in text
    assert "| responses learned from | 128 |" in text and "| steps | 2 |" in text and "| ranks | 8, A100 |" in text
    assert "| KL coefficient, first and last | 0.2, 0.1 |" in text
    assert "commit 0123abcd with changes of its own; python 3.11.7, torch 2.13.0" in text
    assert "| score | 0.250 ± 0.125 | 1.125 |  |" in model_card(ppo(), "actor_ema")
    assert dict(ModelCard(text).data.to_dict())["base_model"] == "org/sft-7b"
    kept = "- `generate()` follows its generation_config.json, which nothing in its training drew with: "
    assert kept not in text and kept + "top_k 5." in model_card(ppo(), "actor", "top_k 5")


@pytest.mark.parametrize("name", ["actor", "actor_ema", "critic", "actor_adapter", "critic_pretrained"])
def test_nothing_that_may_be_private_is_told(name):
    text = model_card(ppo(), name)
    assert [word for word in PRIVATE if word in text] == []
    assert (
        "local files, not on the Hub" in text and "[org/prompts](https://huggingface.co/datasets/org/prompts)" in text
    )


def test_a_model_from_a_local_folder_has_the_base_that_the_folder_began_as():
    local = {**PPO_FLAGS, "actor_model_name_or_path": "/home/lovelace/acme-sft"}
    run = {"start": {**START, "flags": local, "dialect": DIALECT}}
    assert "base_model" not in front(model_card(ppo(**run), "actor"))
    known = {"/home/lovelace/acme-sft": "org/base"}
    assert front(model_card(ppo(**run, known=known), "actor"))["base_model"] == "org/base"
    assert {"base_model", "pipeline_tag"} & set(front(model_card(ppo(), "critic"))) == set()


def test_before_the_last_evaluation_the_card_says_that_it_is_not_there():
    text = model_card(supervised(), "adapter")
    assert "Not measured." in text and front(text)["library_name"] == "peft"
    assert front(text)["base_model_relation"] == "adapter" and "lora" in front(text)["tags"]
    assert "nothing was measured yet" in model_card(ppo(rows=ROWS[:2]), "actor")


def test_names_on_the_hub():
    assert [
        name
        for name in ("gpt2", "org/name", "/home/x", "a/b/c", "x.jsonl", "x.csv.gz", "local/jsonfile", "./x")
        if is_hub_name(name)
    ] == ["gpt2", "org/name"]


def test_a_merged_models_card():
    source = {"sft": "org/sft", "trained": ["/home/lovelace/acme-actor"], "method": "linear", "scale": 1.25}
    source |= {
        "prompts": ["/home/lovelace/acme.jsonl"],
        "measured": {"score": 2.0, "score_se": 0.5, "kl": 7.0, "kl_se": 0.25},
    }
    text = merge_card(source, VERSIONS, None)
    assert front(text)["base_model"] == ["org/sft"] and front(text)["base_model_relation"] == "merge"
    assert "| score | 2.000 ± 0.500 |" in text and "nats a response | 7.000 ± 0.250 |" in text
    assert [word for word in PRIVATE if word in text] == []


TEXTS = ([10, 11, 12, 13, EOS], [10, 11, 12, 14, 15, 16, 17, EOS])  # as tokens


def code(text: str, folder: str) -> str:
    found = re.search(r"```python\n(.*)\n```", text, re.DOTALL)
    assert found is not None
    filled = found[1].replace('FOLDER = "."', f"FOLDER = {folder!r}").replace("max_new_tokens=64", "max_new_tokens=4")
    both = ", ".join(repr(" ".join(f"w{token}" for token in tokens[:-1])) + " + ' </s>'" for tokens in TEXTS)
    return filled.replace('"PROMPT" + "RESPONSE" + tokenizer.eos_token', both).replace("PROMPT", "w10 w11 ")


def test_the_snippet_of_a_language_model_loads_it(tmp_path, capsys):
    exec(code(loading("text-generation", False), make_causal_lm(tmp_path / "lm")), {})
    assert capsys.readouterr().out.startswith("w10 w11 ")
    base = make_causal_lm(tmp_path / "base")
    exec(code(loading("text-generation", True), make_adapter(tmp_path / "actor", base)), {})
    assert "w10 w11" in capsys.readouterr().out


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_the_snippet_of_a_reward_model_scores_two_texts_as_one_at_a_time(tmp_path, capsys, pad_is_eos):
    folder = make_scorer(tmp_path, offset=0.3, pad_is_eos=pad_is_eos)
    if pad_is_eos:  # as step 2 writes it
        config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
    exec(code(loading("text-classification", False), folder), {})
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits.item() + 0.3 for ids in TEXTS]
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, abs=1e-5)


def test_the_snippet_of_an_adapter_scores_two_texts_as_one_at_a_time(tmp_path, capsys):
    folder = make_adapter(tmp_path / "reward", make_causal_lm(tmp_path / "base", pad_is_eos=True), scorer=True)
    exec(code(loading("text-classification", True), folder), {})
    scorer, expected = load_scorer(folder, torch.float32).eval(), []
    for ids in map(torch.tensor, TEXTS):
        mask = torch.ones_like(ids)[None]
        with torch.no_grad():
            expected.append(scorer(ids[None], mask, position_ids(mask))[0, -1].item())
    assert json.loads(capsys.readouterr().out) == pytest.approx(expected, abs=1e-5)
