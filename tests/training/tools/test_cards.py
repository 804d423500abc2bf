"""Model cards: what a run's record and metrics come to, and what is kept private; the page's code that reads scores."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification

from engine.experience import position_ids
from engine.models.loading import load_scorer
from scripts.harness.models import EOS, make_adapter, make_causal_lm, make_scorer
from training.tools.cards import CARD, hub_origin, is_edited, is_hub_name, merge_card, model_card, signed

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
    "reward_model_name_or_path": ["org/helpful", "/home/lovelace/safe"],
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


def ppo(name: str, rows=ROWS, **flags) -> str:
    return model_card({**START, "flags": PPO_FLAGS | flags, "dialect": DIALECT}, rows, name)


def supervised(name: str) -> str:
    given = {"model_name_or_path": "org/base", "data_path": ["org/pairs"], "eval_data_path": []}
    return model_card({**START, "flags": given, "dialect": None}, [], name)


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_actors_card_says_what_the_run_was():
    text = ppo("actor")
    assert front(text) == {
        "library_name": "transformers",
        "tags": ["rlhf", "ppo"],
        "pipeline_tag": "text-generation",
        "base_model": "org/sft-7b",
        "base_model_relation": "finetune",
        "datasets": ["org/prompts"],
    }
    for line in ("dialect | `trl_ppo`", "steps | 2", "responses | 128", "ranks | 8, A100", "`kl_coef` | 0.2"):
        assert f"| {line} |" in text
    assert "| score | 0.250 ± 0.125 | 1.500 ± 0.062 | +1.250 ± 0.110 |" in text
    assert "| KL to the reference | 0.000 | 4.000 |" in text
    assert "- reward model: org/helpful\n- reward model: local, not on the Hub\n" in text
    assert "python 3.11.7, torch 2.13.0, four-engine-rlhf 0.1.0; commit 0123abcd with changes of its own" in text
    several = ppo("actor", reward_model_name_or_path=["/home/safe", "org/helpful", "/home/brief"])
    assert "- reward model: local, not on the Hub (2 of them)\n- reward model: org/helpful\n" in several
    assert "| score | 0.250 ± 0.125 | 1.125 |  |" in ppo("actor_ema")
    assert dict(ModelCard(text).data.to_dict())["base_model"] == "org/sft-7b"
    assert {"base_model", "pipeline_tag"} & set(front(ppo("critic"))) == set()


@pytest.mark.parametrize("name", ["actor", "actor_ema", "critic", "actor_adapter", "critic_pretrained"])
def test_nothing_that_may_be_private_is_told(name):
    text = ppo(name)
    assert [word for word in PRIVATE if word in text] == []
    assert "- data: local, not on the Hub" in text and "- data: org/prompts" in text


def test_a_score_of_another_reward_has_no_before():
    rows = [ROWS[0], {"step": 2, "samples": 128, "eval/score": 9.0, "eval/kl": 4.0, "eval/kl_change": 4.0}]
    assert "| score |  | 9.000 |  |" in ppo("actor", rows)


def test_before_the_last_evaluation_the_card_has_no_result():
    text = supervised("adapter")
    assert "Not measured." in text and front(text)["library_name"] == "peft"
    assert front(text)["base_model_relation"] == "adapter" and "lora" in front(text)["tags"]
    assert "| score | 0.250 ± 0.125 |  |  |" in ppo("actor", ROWS[:2])


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
    assert "score 2.000 ± 0.500" in text and "KL to the SFT model 7.000 ± 0.250 nats" in text
    assert [word for word in PRIVATE if word in text] == []


def test_an_edited_file_is_known(tmp_path):
    text = "# A card\n"
    for content, edited in ((signed(text), False), (signed(text) + "\n", True), ("# mine\n", True)):
        (tmp_path / CARD).write_text(content)
        assert is_edited(tmp_path / CARD) is edited
    (tmp_path / CARD).write_text(signed(text).replace("A card", "My card"))
    assert is_edited(tmp_path / CARD)
    assert not is_edited(tmp_path / "none.md")


def test_a_local_model_has_the_base_that_its_own_card_names(tmp_path):
    folder = make_causal_lm(tmp_path / "lm")
    assert hub_origin(folder) is None and hub_origin("org/name") == "org/name"
    text = "---\nbase_model: org/base\n---\n# x\n"
    (tmp_path / "lm" / CARD).write_text(text)  # somebody else's, where the word means what they like
    assert hub_origin(folder) is None
    (tmp_path / "lm" / CARD).write_text(signed(text))
    assert hub_origin(folder) == "org/base"
    card = ppo("actor", actor_model_name_or_path=folder)
    assert front(card)["base_model"] == "org/base" and "local, not on the Hub, began as org/base" in card


TEXTS = ([10, 11, 12, 13, EOS], [10, 11, 12, 14, 15, 16, 17, EOS])  # as tokens


def scores_by_the_page(folder: str, capsys, adapter: bool = False) -> list[float]:
    """What the code of docs/sharing.md prints for TEXTS."""
    page = (Path(__file__).parents[3] / "docs" / "sharing.md").read_text()
    code, others = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    if adapter:
        code = re.sub(r"model = .*\noffset = .*\n", lambda _: others, code)
    texts = ", ".join(repr(" ".join(f"w{token}" for token in tokens[:-1]) + " </s>") for tokens in TEXTS)
    code = code.replace('"PROMPT" + "RESPONSE" + tokenizer.eos_token', texts)
    exec(code.replace('FOLDER = "."', f"FOLDER = {folder!r}"), {})
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("pad_is_eos", [True, False])
def test_the_pages_code_scores_two_texts_as_one_at_a_time(tmp_path, capsys, pad_is_eos):
    folder = make_scorer(tmp_path, offset=0.3, pad_is_eos=pad_is_eos)
    if pad_is_eos:  # as step 2 writes it
        config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": None}
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits.item() + 0.3 for ids in TEXTS]
    assert scores_by_the_page(folder, capsys) == pytest.approx(expected, abs=1e-5)


def test_the_pages_code_scores_with_an_adapter(tmp_path, capsys):
    folder = make_adapter(tmp_path / "reward", make_causal_lm(tmp_path / "base", pad_is_eos=True), scorer=True)
    scorer, expected = load_scorer(folder, torch.float32).eval(), []
    for ids in map(torch.tensor, TEXTS):
        mask = torch.ones_like(ids)[None]
        with torch.no_grad():
            expected.append(scorer(ids[None], mask, position_ids(mask))[0, -1].item())
    assert scores_by_the_page(folder, capsys, adapter=True) == pytest.approx(expected, abs=1e-5)
