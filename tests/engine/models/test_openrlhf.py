"""Reward models as OpenRLHF saves them, and heads that are called otherwise, against plain Hugging Face calls."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.checking import check_policy, check_scorer
from engine.models.loading import load_scorer, new_scorer
from engine.models.saving import save_model
from scripts.harness.models import EOS, PAD, make_scorer
from scripts.harness.weights import full_state

SEQUENCES = torch.tensor([[5, 9, 33, 17, 40, EOS], [41, 7, 63, 22, 4, EOS]])
MEAN, STD = 2.5, 4.0


def openrlhf_reward(folder, head="value_head", tensors=None, **settings):
    """A folder as its train_rm leaves it: no label count, a class of its own, EOS as pad token. Returns its path and
    what the head says of the last token of SEQUENCES."""
    path = Path(make_scorer(folder, pad_is_eos=True))
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        raw = model.base_model(SEQUENCES)[0][:, -1] @ model.score.weight[0]
    config = json.loads((path / "config.json").read_text())
    for name in ("id2label", "label2id", "score_offset", "score_position"):
        del config[name]
    config |= {"architectures": ["RewardModel"], "mean": MEAN, "std": STD, **settings}
    (path / "config.json").write_text(json.dumps(config))
    state = load_file(path / "model.safetensors")
    state[f"{head}.weight"] = state.pop("score.weight")
    save_file(state | (tensors or {}), path / "model.safetensors", metadata={"format": "pt"})
    return str(path), raw


@torch.no_grad()
def scores(path):
    scorer, mask = load_scorer(path, torch.float32), torch.ones_like(SEQUENCES)
    return scorer.sequence_scores(scorer(SEQUENCES, mask, position_ids(mask)), SEQUENCES, mask), scorer


@pytest.mark.parametrize("head", ["score", "value_head"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_are_those_of_openrlhf_and_stay_so_in_what_is_saved(tmp_path, head, normalize):
    path, raw = openrlhf_reward(tmp_path / "rm", head, value_head_prefix=head, normalize_reward=normalize)
    expected = (raw - MEAN) / STD if normalize else raw
    found, scorer = scores(path)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    save_model(scorer, full_state(scorer.model), AutoTokenizer.from_pretrained(path), tmp_path / "saved")
    torch.testing.assert_close(scores(str(tmp_path / "saved"))[0], expected, rtol=0, atol=1e-6)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        one = theirs(SEQUENCES[:1]).logits[0, 0] + theirs.config.score_offset
    torch.testing.assert_close(one, expected[0], rtol=0, atol=1e-6)


def test_it_is_a_trunk_for_a_new_head_and_no_language_model(tmp_path):
    path, _ = openrlhf_reward(tmp_path, value_head_prefix="value_head", normalize_reward=True)
    config = new_scorer(path, torch.float32, PAD, seed=0).model.config
    assert config.score_offset == 0 and not hasattr(config, "mean") and not hasattr(config, "value_head_prefix")
    with pytest.raises(UserError, match=r"^--actor: .* is no language model but RewardModel\. Give the SFT model"):
        check_policy(path, "--actor")


@pytest.mark.parametrize(
    "head, tensors, settings, message",
    [
        ("value_head", {}, {}, r'no score\.weight, .* called value_head\..* add "value_head_prefix": "value_head" to'),
        ("v_head.summary", {"v_head.summary.bias": torch.ones(1)}, {}, r"A value head .* gives no scores"),
        ("score", {"score.bias": torch.ones(1)}, {}, r"has a bias \(score\.bias\).*Add its number to score_offset"),
        (
            "score",
            {},
            {"normalize_reward": True, "std": 0.0},
            r"mean 2\.5 and std 0\.0: these are to be a number and a",
        ),
    ],
)
def test_a_head_that_cannot_be_read_is_refused(tmp_path, head, tensors, settings, message):
    path, _ = openrlhf_reward(tmp_path, head, tensors, **settings)
    with pytest.raises(UserError, match=f"^--critic: .*{message}"):
        check_scorer(path, "--critic")
