"""Step 2 normalises scores on the SFT model's responses, after training and before if asked to; its rate falls."""

import json
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from scripts.harness.programs import command_line, metric_lines, run_here, run_words
from tests.training.foreign_models import foreign_model, scores_alone
from training import step2_reward

SAMPLES, RATE = 24, 1e-3


class Recorder:
    """Keeps the responses that the program samples: a list for each time that it builds something to sample with."""

    def __init__(self):
        self.calls, self.build = [], step2_reward.build_rollouts

    def build_rollouts(self, *args, **kwargs):
        backend, found = self.build(*args, **kwargs), []
        self.calls.append(found)

        def generate(prompts, sampling):
            found.append(backend.generate(prompts, sampling))
            return found[-1]

        return SimpleNamespace(generate=generate)


@pytest.fixture(scope="module", params=(False, True), ids=("after", "before_and_after"))
def trained(request, tiny, tmp_path_factory):
    """The saved model, the responses of each normalisation, and the head that training began with."""
    out, recorder, heads = tmp_path_factory.mktemp("normalised") / "out", Recorder(), []
    wrap = step2_reward.wrap_trained

    def wrapped(module, *args, **kwargs):
        heads.append(module.model.score.weight.detach().clone())
        return wrap(module, *args, **kwargs)

    with (
        mock.patch.object(step2_reward, "build_rollouts", recorder.build_rollouts),
        mock.patch.object(step2_reward, "wrap_trained", wrapped),
    ):
        flags = tiny.flags(
            2,
            output_dir=out,
            normalization_samples=SAMPLES,
            learning_rate=RATE,
            num_train_epochs=2,
            normalize_before=request.param or None,
        )
        assert run_words(2, command_line(flags)) == 0
    return SimpleNamespace(before=request.param, out=out, calls=recorder.calls, head=heads[0])


@torch.no_grad()
def scores(path, rollouts, head=None) -> np.ndarray:
    """Of the first SAMPLES responses, by Hugging Face, one text at a time, at its last token."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1).eval()
    if head is not None:
        model.score.weight.copy_(head)
    found = []
    for rollout in rollouts:
        for row, mask in zip(rollout.sequences, rollout.attention_mask):
            states = model.base_model(row[mask.bool()].unsqueeze(0)).last_hidden_state
            found.append(model.score(states)[0, -1, 0].item() + getattr(model.config, "score_offset", 0.0))
    return np.array(found[:SAMPLES])


def test_saved_scores_have_mean_0_and_variance_1(trained):
    """gain = 1 / deviation, bias = -mean x gain; the deviation is that of n, not n - 1."""
    found = scores(trained.out, trained.calls[-1])
    assert found.mean() == pytest.approx(0, abs=1e-4) and found.var() == pytest.approx(1, abs=1e-3)


def test_training_begins_with_variance_1_where_that_is_wanted(trained, tiny):
    assert len(trained.calls) == 1 + trained.before
    found = scores(tiny.folder / "sft", trained.calls[0], trained.head)
    assert (abs(found.var() - 1) < 1e-3) == trained.before
    assert found.std() > 0.05


def test_the_rate_falls_to_0_in_the_last_step(trained):
    rates = [line["train/lr"] for line in metric_lines(trained.out)[1:]]
    assert len(rates) == 16  # 32 pairs, 4 a step, twice
    assert rates == pytest.approx([RATE * (1 - step / 16) for step in range(16)])


def test_scaling_a_head_needs_responses(tiny, tmp_path, capfd):
    flags = tiny.flags(2, output_dir=tmp_path / "out", normalization_samples=0, normalize_before=True)
    result = run_here(2, flags, capfd)
    assert result.code == 2 and "--normalize_before needs --normalization_samples (given: 0)" in result.stderr


def test_a_model_of_another_family_is_normalised_on_what_it_reads_of_the_responses(tiny, tmp_path):
    """By transformers alone: the texts of the SFT model's responses in the reward model's own tokens."""
    out, recorder, sft = tmp_path / "out", Recorder(), tiny.folder / "sft"
    start = foreign_model(tmp_path / "film")
    more = {"sft_model_name_or_path": sft, "normalization_samples": SAMPLES, "max_seq_len": 128}
    with mock.patch.object(step2_reward, "build_rollouts", recorder.build_rollouts):
        assert run_words(2, command_line(tiny.flags(2, output_dir=out, model_name_or_path=start, **more))) == 0
    own, policy, rows = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(sft), []
    for rollout in recorder.calls[-1]:
        for ids, mask, ended in zip(rollout.sequences, rollout.attention_mask, rollout.ended.tolist(), strict=True):
            real = ids[mask.bool()]
            text = policy.decode(real[:-1] if ended else real)
            rows.append(own(text)["input_ids"] + [own.eos_token_id] * ended)
    offset = json.loads((out / "config.json").read_text())["score_offset"]
    found = np.array(scores_alone(str(out), rows[:SAMPLES])) + offset
    assert found.mean() == pytest.approx(0, abs=1e-4) and found.var() == pytest.approx(1, abs=1e-3)


def test_what_the_best_responses_are_like_is_told():
    def responses(count: int) -> list[tuple]:
        # The highest scores do not end, and say again what the prompt said.
        return [(f"p{n}", f"p{n}" if n % 8 == 7 else "w", n % 8 < 4, 5, float(n % 8)) for n in range(count)]

    assert step2_reward.best_lines(responses(15)) == [], "one group of eight has no error"
    told = " ".join(step2_reward.best_lines(responses(20)))
    assert "the best of 8 of these responses: this reward model pays for responses that do not end (ended 0.0 %" in told
    assert "invented words" not in told
