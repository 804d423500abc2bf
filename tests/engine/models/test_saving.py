"""What is saved opens in plain Hugging Face and means the same there."""

from functools import partialmethod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
)

from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.saving import save_model
from engine.zero.gathering import gathered_state
from scripts.harness.models import EOS, PAD, make_causal_lm, make_tokenizer, save_random
from tests.engine.meters import LiveBytes
from tests.engine.models.scored_rows import ROWS, batch, pooled, saved, scores

KINDS = [
    ("llama", False),
    ("llama", True),
    ("gpt2", True),
    ("opt", True),
    ("bloom", True),
    ("gpt_neox", False),
]


@pytest.mark.parametrize("family, tied", KINDS)
def test_a_saved_policy_opens_in_hugging_face(tmp_path, family, tied):
    source = make_causal_lm(tmp_path / "source", family, tied=tied)
    policy = load_policy(source, torch.float32)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.5)
    folder = saved(policy, tmp_path / "saved")
    assert [path.name for path in Path(folder).glob("*.safetensors")] == ["model.safetensors"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).named_parameters()
    torch.testing.assert_close(
        dict(model.named_parameters()), {name: weight * 1.5 for name, weight in expected}, rtol=0, atol=0
    )
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == embedding.data_ptr()) == tied
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == make_tokenizer().get_vocab()


def test_several_named_templates_are_saved_without_a_folder_of_their_own(tmp_path):
    """The output folder's model and a checkpoint's files are files alone."""
    policy, tokenizer = load_policy(make_causal_lm(tmp_path / "base"), torch.float32), make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    save_model(policy, {}, tokenizer, tmp_path / "saved")
    assert all(path.is_file() for path in (tmp_path / "saved").iterdir())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == tokenizer.chat_template


@pytest.mark.parametrize("family, tied", KINDS)
def test_a_saved_scorer_scores_the_same_in_hugging_face(tmp_path, family, tied):
    base = make_causal_lm(tmp_path / "base", family, tied=tied)
    scorer = new_scorer(base, torch.float32, PAD, seed=3)
    head, gain, offset = scorer.model.score.weight.detach().clone(), 2.5, -0.4
    scorer.model.config.score_offset = offset
    folder = saved(scorer, tmp_path / "saved", lambda state: state.update({"score.weight": head * gain}))
    trunk = AutoModel.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.stack([trunk(torch.tensor([row]))[0][0, -1] @ head[0] * gain + offset for row in ROWS])
    config = AutoConfig.from_pretrained(folder)
    assert config.architectures[0].endswith("ForSequenceClassification") and config.num_labels == 1
    assert (config.pad_token_id, config.score_offset, config.score_position) == (PAD, offset, "last")
    torch.testing.assert_close(pooled(folder, *batch()) + config.score_offset, expected, rtol=0, atol=1e-5)
    ours = load_scorer(folder, torch.float32)
    for left in (False, True):
        torch.testing.assert_close(scores(ours, *batch(left=left)), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family, tied", KINDS)
def test_a_saved_scorer_whose_pad_token_is_eos_scores_the_same_one_text_at_a_time(tmp_path, family, tied):
    base = make_causal_lm(tmp_path / "base", family, tied=tied, pad_is_eos=True)
    scorer = new_scorer(base, torch.float32, None, seed=3)
    scorer.model.config.score_offset = 0.6
    folder = saved(scorer, tmp_path / "saved", tokenizer=make_tokenizer(pad_is_eos=True))
    assert AutoConfig.from_pretrained(folder).pad_token_id is None
    expected = torch.cat([pooled(folder, torch.tensor([row])) for row in ROWS]) + 0.6
    ours = load_scorer(folder, torch.float32)
    for left in (False, True):
        torch.testing.assert_close(scores(ours, *batch(EOS, left)), expected, rtol=0, atol=1e-5)
    assert read_tokenizer(folder, "x").pad_token_id == EOS


def test_a_saved_model_keeps_its_dtype(tmp_path):
    folder = saved(load_policy(make_causal_lm(tmp_path / "source"), torch.bfloat16), tmp_path / "saved")
    assert {tensor.dtype for tensor in load_file(Path(folder) / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


@pytest.mark.parametrize("family, tied", [*KINDS, ("mixtral", False)])
@pytest.mark.parametrize("shard_size", ["50GB", "20KB"])
def test_files_written_a_tensor_at_a_time_are_those_of_save_pretrained(tmp_path, monkeypatch, family, tied, shard_size):
    """Every file, byte by byte; the state has what Hugging Face's `state_dict()` has, fetched when it is written."""
    source = (
        make_mixtral(tmp_path / "source")
        if family == "mixtral"
        else make_causal_lm(tmp_path / "source", family, tied=tied)
    )
    policy = load_policy(source, torch.float32)
    save = type(policy.model).save_pretrained
    monkeypatch.setattr(type(policy.model), "save_pretrained", partialmethod(save, max_shard_size=shard_size))
    vars(policy.model.config).update(policy.replaced)  # as in the source, and in what save_model writes
    policy.model.save_pretrained(tmp_path / "whole")
    with gathered_state(policy.model) as state:
        save_model(policy, state, make_tokenizer(), tmp_path / "written")
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert ("model.safetensors.index.json" in files) == (shard_size == "20KB")
    for name in files:
        assert (tmp_path / "written" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    save_model(policy, {}, make_tokenizer(), tmp_path / "without")  # as checkpoints have it: the rest alone
    assert (tmp_path / "without" / "config.json").read_bytes() == (tmp_path / "whole" / "config.json").read_bytes()


def make_mixtral(folder) -> str:
    """A model whose files hold each expert by itself, and the model all of a layer in one."""
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    return save_random(MixtralForCausalLM(config), folder)


def test_a_weight_is_fetched_when_its_turn_comes(tmp_path):
    policy = load_policy(make_causal_lm(tmp_path / "source"), torch.float32)
    with gathered_state(policy.model) as state, LiveBytes(known=policy.model.parameters()) as meter:
        save_model(policy, state, make_tokenizer(), tmp_path / "saved")
    largest = max(weight.nbytes for weight in policy.model.parameters())
    assert largest <= meter.peak < 1.5 * largest


def test_a_look_at_all_weights_needs_no_copies_of_them(tmp_path):
    path = make_causal_lm(tmp_path / "source")
    with LiveBytes() as meter:
        policy = load_policy(path, torch.bfloat16)
    largest = max(weight.nbytes for weight in policy.model.parameters())
    assert meter.peak < sum(weight.nbytes for weight in policy.model.parameters()) + largest
