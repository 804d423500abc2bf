"""Step 2 on labels of steps: the rows, the loss and its gradients against transformers' own, and what is saved."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.checking import check_policy, check_scorer, check_trunk, step_end_of
from engine.models.loading import load_scorer, new_scorer
from engine.models.saving import save_model
from engine.reward.steps import StepEnds
from scripts.harness.models import EOS, PAD, make_causal_lm, make_process_scorer, make_scorer, make_tokenizer
from training.data.record_forms import stepwise
from training.process_rewards import StepsExamples, collate_steps, held_out_steps, measured_steps

END = " w09"
RECORDS = [
    {"prompt": "w05 w09", "completions": [" w20", " w21 w22"], "labels": [True, False]},
    {"prompt": "w06", "completions": [" w20 w09 w21", " w22 w09"], "labels": [0.25, None]},
]


def examples(records: list[dict], max_length: int = 32) -> StepsExamples:
    form, tokenizer = stepwise(END), make_tokenizer()
    rows = [form.row("a file, line 1", record, tokenizer) for record in records]
    return StepsExamples(rows, tokenizer, StepEnds(tokenizer, "w09", at_end=True), max_length)


def labels_of(example) -> dict[int, float]:
    return {place: label for place, label in enumerate(example.labels) if label == label}


def test_labels_belong_to_the_tokens_that_end_steps():
    first, second = examples(RECORDS)
    assert first.token_ids == [5, 9, 20, 9, 21, 22, EOS]
    assert labels_of(first) == {3: 1.0, 6: 0.0}
    assert second.token_ids == [6, 20, 9, 21, 9, 22, 9, EOS]
    assert labels_of(second) == {4: 0.25}  # the given step's last end; null is not learned


def test_steps_that_are_cut_are_not_learned():
    (first,) = examples(RECORDS[:1], max_length=5)
    assert first.token_ids[-1] != EOS and len(labels_of(first)) == 1


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"labels": [True]}, "found 2 completions .* and 1 labels .* a label for each"),
        ({"labels": [True, 2]}, "column labels, step 2"),
        ({"completions": ["a", " w09"]}, "no text but the end of a step"),
        ({"labels": None}, "prompt [+] completions [+] labels"),
        ({"labels": None, "chosen": "a", "rejected": "b"}, "Without --step_end pairs are read"),
    ],
)
def test_records_that_are_refused(wrong, told):
    with pytest.raises(UserError, match=told):
        stepwise(END).row("a file, line 1", RECORDS[0] | wrong, make_tokenizer())


@pytest.mark.parametrize("family", ["llama", "gpt2"])  # their heads have different names
def test_loss_and_gradients_are_those_of_transformers(tmp_path, family):
    path = make_process_scorer(tmp_path / "prm", family)
    records = [RECORDS[0], {**RECORDS[1], "labels": [False, True]}]
    batch = collate_steps(list(examples(records)), PAD)
    scorer = load_scorer(path, torch.float32)
    log_odds = scorer(batch.sequences, batch.attention_mask, position_ids(batch.attention_mask))
    found = measured_steps(log_odds, batch)
    loss = found["loss"].sum() / found["steps"].sum()
    loss.backward()

    theirs = AutoModelForTokenClassification.from_pretrained(path)
    total = 0.0
    for example in examples(records):
        logits = theirs(torch.tensor([example.token_ids])).logits[0, list(labels_of(example))]
        labels = torch.tensor(list(labels_of(example).values()))
        total = total + torch.nn.functional.cross_entropy(logits, labels.long(), reduction="sum")
    (total / 4).backward()
    torch.testing.assert_close(loss.item(), total.item() / 4, atol=1e-6, rtol=1e-6)
    head = getattr(theirs, "score", None) or theirs.classifier
    torch.testing.assert_close(scorer.model.score.weight.grad, head.weight.grad[1:], atol=2e-6, rtol=1e-5)
    ours = dict(scorer.model.base_model.named_parameters())
    for name, parameter in theirs.base_model.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, atol=2e-6, rtol=1e-5)


def test_saved_as_transformers_own_and_read_again(tmp_path):
    scorer = new_scorer(make_causal_lm(tmp_path / "sft"), torch.float32, PAD, seed=1)
    scorer.model.config.step_end, scorer.model.config.score_offset = "w09", 0.5
    scorer.offset = 0.5
    save_model(scorer, dict(scorer.model.state_dict()), make_tokenizer(), tmp_path / "prm")
    ids = torch.tensor([[5, 6, 7, 9]])
    with torch.no_grad():
        expected = scorer(ids, torch.ones_like(ids), position_ids(torch.ones_like(ids)))
        theirs = AutoModelForTokenClassification.from_pretrained(tmp_path / "prm")(ids).logits.log_softmax(-1)
        again = load_scorer(str(tmp_path / "prm"), torch.float32)
        torch.testing.assert_close(theirs[..., 1] - theirs[..., 0], expected, atol=2e-6, rtol=1e-6)
        assert torch.equal(again(ids, torch.ones_like(ids), position_ids(torch.ones_like(ids))), expected)
    assert step_end_of(str(tmp_path / "prm"), "a model") == ("w09", True)
    save_model(
        again, dict(again.model.state_dict()), make_tokenizer(), tmp_path / "critic"
    )  # it is no token classifier
    assert check_scorer(str(tmp_path / "critic"), "a model") == "sequence_classification"
    assert step_end_of(str(tmp_path / "critic"), "a model") is None


def test_folders_of_others(tmp_path):
    prm = make_process_scorer(tmp_path / "prm")
    assert step_end_of(prm, "a model") == ("\n", False)
    assert step_end_of(make_scorer(tmp_path / "rm"), "a model") is None
    for check in (check_policy, check_trunk):
        with pytest.raises(UserError, match="Give the SFT model"):
            check(prm, "--a_flag")
    theirs = AutoModelForTokenClassification.from_pretrained(prm, num_labels=3, ignore_mismatched_sizes=True)
    theirs.save_pretrained(tmp_path / "three")
    with pytest.raises(UserError, match="has 3 labels"):
        check_scorer(str(tmp_path / "three"), "--a_flag")


def test_held_out_metrics():
    batch = collate_steps(list(examples([RECORDS[0], {**RECORDS[1], "labels": [0.0, 1.0]}])), PAD)
    log_odds = torch.zeros(batch.sequences.shape)
    log_odds[0, [3, 6]] = torch.tensor([2.0, 1.0])  # labels 1 and 0: right and wrong
    log_odds[1, [4, 6]] = torch.tensor([-1.0, 3.0])  # labels 0 and 1: both right
    units = {name: column.tolist() for name, column in measured_steps(log_odds, batch).items()}
    found = held_out_steps(units, None)
    assert (found["eval/accuracy"], found["eval/bad_found"], found["eval/good"]) == (0.75, 0.5, 0.5)
    by_hand = (0.126928 + 1.313262 + 0.313262 + 0.048587) / 4  # log(1 + e^-2), log(1 + e), log(1 + e^-1), log(1 + e^-3)
    assert found["eval/step_loss"] == pytest.approx(by_hand, abs=1e-5)


def test_chains_label_each_line_by_arithmetic():
    chains = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "chains.py"))
    files, right = chains["make_chains"](seed=0, terms=4, sft=5, steps=200, prompts=5, eval_prompts=5), chains["right"]
    for record in files["steps.jsonl"]:
        terms = [int(term) for term in record["prompt"].strip("=\n").split("+")]
        total, so_far = terms[0], True
        for place, (line, label) in enumerate(zip(record["completions"], record["labels"], strict=True), start=1):
            good = place < len(terms) and line == f"{total}+{terms[place]}={total + terms[place]}"
            so_far = so_far and good
            assert label is so_far, json.dumps(record)
            total += terms[place] if place < len(terms) else 0
    kept = files["sft.jsonl"][0]
    assert right([], [kept["response"], kept["response"] + "\n1+1=2", ""], [kept["response"]] * 3) == [1.0, 0.0, 0.0]
