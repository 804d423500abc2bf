"""Models load without dropout, with a fresh head where one is wanted, and are read where they were trained to be."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer, new_scorer
from scripts.harness.models import BOS, EOS, PAD, VOCABULARY, make_causal_lm, make_config, save_random
from tests.engine.models.scored_rows import ROWS, batch, pooled, saved, scores


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
@torch.no_grad()
def test_dropout_is_off_unless_asked_for_and_counts_in_train_mode_only(tmp_path, family):
    make_causal_lm(tmp_path, family)
    sequences, mask = batch()

    def logprobs(model):
        return model(sequences, mask, position_ids(mask), response_length=4)[0]

    off, on = (load_policy(str(tmp_path), torch.float32, dropout=probability) for probability in (0.0, 0.5))
    assert torch.equal(logprobs(off.train()), logprobs(off.eval()))
    assert torch.equal(logprobs(on.eval()), logprobs(off.eval()))
    assert not torch.allclose(logprobs(on.train()), logprobs(off.eval()), atol=1e-3)
    folder = saved(on, tmp_path / "saved")
    config, kept = (AutoConfig.from_pretrained(path).to_dict() for path in (tmp_path, folder))
    assert {name: kept[name] for name in config if "drop" in name} == {
        name: value for name, value in config.items() if "drop" in name
    }


def test_a_fresh_head_is_small_and_comes_from_the_seed(tmp_path):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=4,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    base = save_random(AutoModelForCausalLM.from_config(config), tmp_path)
    one, again, other = (new_scorer(base, torch.float32, PAD, seed).model.score.weight for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    for head in (one, other):
        assert head.shape == (1, 1024)
        assert head.std().item() == pytest.approx(1025**-0.5, rel=0.1) and abs(head.mean().item()) < 4 / 1024


@pytest.fixture
def foreign(tmp_path):
    """Makes a reward model of someone else's, whose config knows nothing of score_position; returns its folder."""

    def make(pad_token_id):
        config = make_config("gpt2")
        config.num_labels, config.pad_token_id = 1, pad_token_id
        folder = save_random(AutoModelForSequenceClassification.from_config(config), tmp_path, seed=8)
        assert "score_" not in (tmp_path / "config.json").read_text()
        return folder

    return make


@pytest.mark.parametrize("pad", [PAD, EOS, None])
def test_a_foreign_reward_model_is_read_where_hugging_face_reads_it(foreign, pad):
    folder = foreign(pad)
    expected = torch.cat([pooled(folder, torch.tensor([row])) for row in ROWS])
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        by_token = [model.score(model.base_model(torch.tensor([row]))[0])[0, :, 0] for row in ROWS]
    read_at = [len(row) - 1 - (pad == EOS and row[-1] == EOS) for row in ROWS]  # pad == eos: the token before EOS
    torch.testing.assert_close(torch.stack([row[at] for row, at in zip(by_token, read_at)]), expected)
    scorer = load_scorer(folder, torch.float32)
    for left in (False, True):
        found = scores(scorer, *batch(PAD if pad is None else pad, left))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if pad is not None:
        torch.testing.assert_close(pooled(folder, *batch(pad)), expected, rtol=0, atol=1e-5)
