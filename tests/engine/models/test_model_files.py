"""What is saved opens in plain Hugging Face and means the same there; what others saved is read as they meant it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    T5Config,
)

from engine.zero.gathering import full_state
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import (
    check_policy,
    check_scorer,
    check_vocabularies,
    load_policy,
    load_scorer,
    new_scorer,
    read_tokenizer,
    save_model,
)
from tests.distributed.harness import run_ranks
from tests.distributed.work_model_files import HEAD_SEED, what_they_say
from tests.tiny_models import (
    BOS,
    EOS,
    PAD,
    VOCABULARY,
    make_causal_lm,
    make_config,
    make_scorer,
    make_tokenizer,
    save_random,
)

ROWS = ([5, 9, 33, 7, EOS], [41, 7, EOS], [60])
KINDS = [
    ("llama", False),
    ("llama", True),
    ("gpt2", True),
    ("opt", True),
    ("bloom", True),
    ("gpt_neox", False),
    ("mistral", False),
    ("qwen2", True),
]


def batch(pad=PAD, left=False):
    """ROWS padded to one width, and their mask."""
    width = max(len(row) for row in ROWS)
    padding = [[pad] * (width - len(row)) for row in ROWS]
    rows = [
        (before + row, [0] * len(before) + [1] * len(row))
        if left
        else (row + before, [1] * len(row) + [0] * len(before))
        for row, before in zip(ROWS, padding)
    ]
    sequences, mask = zip(*rows)
    return torch.tensor(sequences), torch.tensor(mask)


@torch.no_grad()
def scores(scorer, sequences, mask):
    return scorer.sequence_scores(scorer(sequences, mask, position_ids(mask)), sequences, mask)


@torch.no_grad()
def pooled(folder, sequences, mask=None):
    """Hugging Face's own score of each row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return model(sequences, attention_mask=mask).logits[:, 0]


def saved(module, folder, edit=None, tokenizer=None):
    state = full_state(module.model)
    if edit is not None:
        edit(state)
    save_model(module, state, tokenizer or make_tokenizer(), folder)
    return str(folder)


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


def deepspeed_chat_reward(folder, family, pad_is_eos=False):
    """A reward model as DeepSpeed-Chat's step 2 leaves it: (folder, trunk, head)."""
    make_causal_lm(folder, family, pad_is_eos=pad_is_eos)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    state = {f"rwtransformer.{name}": tensor for name, tensor in trunk.state_dict().items()} | {"v_head.weight": head}
    if family == "llama":  # which the transformers of its day kept in the weights
        state["rwtransformer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 1}))  # the tokenizer's is what counts
    return str(folder), trunk, head[0]


def deepspeed_chat_actor(folder, **format):
    """An OPT as DeepSpeed-Chat's step 1 leaves it: (folder, model)."""
    model = AutoModelForCausalLM.from_pretrained(make_causal_lm(folder, "opt", tied=True), dtype=torch.float32).eval()
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin", **format)
    return str(folder), model


@torch.no_grad()
def test_the_models_of_deepspeed_chat_load_in_one_process_and_under_zero_3_on_two_ranks(tmp_path):
    made = {family: deepspeed_chat_reward(tmp_path / family, family) for family in ("opt", "llama")}
    actor, model = deepspeed_chat_actor(tmp_path / "actor")
    sequences, mask = batch()
    arguments = {
        "scorers": {family: path for family, (path, *_) in made.items()},
        "actors": {"actor": actor},
        "sequences": sequences,
        "attention_mask": mask,
    }
    fresh = tmp_path / "fresh"
    ranks = run_ranks(
        "tests.distributed.work_model_files:what_they_say", world=2, stage=3, fresh=(actor, str(fresh)), **arguments
    )
    for number, said in enumerate([*ranks, what_they_say(stage=0, **arguments)]):
        for family, (_, trunk, head) in made.items():
            # The token before the first pad token, which is not EOS here: EOS itself.
            expected = torch.stack([trunk(torch.tensor([row]))[0][0, -1] @ head for row in ROWS])
            found, state = said[family]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            if number != 1:  # weights are gathered on rank 0 alone
                weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
                assert torch.equal(weights.pop("score.weight")[0], head)
                torch.testing.assert_close(weights, dict(trunk.named_parameters()), rtol=0, atol=0)
        for row, tokens, found in zip(ROWS, sequences, said["actor"]):
            logprobs = torch.log_softmax(model(torch.tensor([row])).logits[0, :-1], -1)
            expected = logprobs.gather(1, torch.tensor(row)[1:, None])[:, 0]
            torch.testing.assert_close(found[: len(row) - 1], expected, rtol=0, atol=1e-5)
    head = new_scorer(actor, torch.float32, PAD, HEAD_SEED).model.score.weight
    reopened = AutoModelForSequenceClassification.from_pretrained(fresh, dtype=torch.float32)
    assert torch.equal(reopened.score.weight, head)
    torch.testing.assert_close(reopened.base_model.state_dict(), model.base_model.state_dict(), rtol=0, atol=0)


@torch.no_grad()
def test_a_deepspeed_chat_reward_model_whose_pad_token_is_eos_is_read_before_eos(tmp_path):
    path, trunk, head = deepspeed_chat_reward(tmp_path, "opt", pad_is_eos=True)
    expected = torch.stack([trunk(torch.tensor([row]))[0][0, len(row) - 1 - (row[-1] == EOS)] @ head for row in ROWS])
    scorer = load_scorer(path, torch.float32)
    for left in (False, True):
        torch.testing.assert_close(scores(scorer, *batch(EOS, left)), expected, rtol=0, atol=1e-5)


def test_weights_in_torchs_first_format_load(tmp_path):
    path, model = deepspeed_chat_actor(tmp_path, _use_new_zipfile_serialization=False)
    found = full_state(load_policy(path, torch.float32).model)
    torch.testing.assert_close(found, dict(model.named_parameters()), rtol=0, atol=0)


FLAG = "--critic_model_name_or_path"


def with_labels(folder, count):
    path = Path(make_scorer(folder)) / "config.json"
    labels = {str(index): f"LABEL_{index}" for index in range(count)}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"id2label": labels}))
    return folder


def config_only(folder, config, **more):
    config.save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    return folder


@pytest.mark.parametrize(
    "make, message",
    [
        (
            make_causal_lm,
            r"is no reward model but LlamaForCausalLM\. Give a folder written by training/step2_reward\.py",
        ),
        (lambda folder: with_labels(folder, 2), r"has num_labels = 2\. Give a reward model, which has 1"),
        (
            lambda folder: config_only(folder, T5Config(num_labels=1), architectures=["T5ForSequenceClassification"]),
            r"of type 't5', which is not a decoder-only model.*Give one",
        ),
        (
            lambda folder: config_only(
                folder, BertConfig(num_labels=1), architectures=["BertForSequenceClassification"]
            ),
            r"of type 'bert', which is not a decoder-only model.*Give one",
        ),
        (lambda folder: folder / "missing", r"there is no folder .*missing"),
        (lambda folder: folder, r"holds no config\.json\. Give a folder that save_pretrained wrote"),
    ],
)
def test_what_is_no_reward_model_is_refused(tmp_path, make, message):
    path = str(make(tmp_path))
    for refuse in (check_scorer, lambda path, what: load_scorer(path, torch.float32, what=what)):
        with pytest.raises(UserError, match=f"^{FLAG}: .*{message}") as refused:
            refuse(path, FLAG)
        assert path in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("config", [T5Config(), BertConfig()])
def test_what_is_no_decoder_is_refused_as_an_actor(tmp_path, config):
    for refuse in (check_policy, lambda path, what: load_policy(path, torch.float32, what=what)):
        with pytest.raises(UserError, match=r"^--actor_model_name_or_path: .*not a decoder-only model.*Give one"):
            refuse(str(config_only(tmp_path, config)), "--actor_model_name_or_path")


def test_a_reward_model_is_refused_as_an_actor(tmp_path):
    ours, theirs = make_scorer(tmp_path / "ours"), deepspeed_chat_reward(tmp_path / "theirs", "opt")[0]
    for path, found in ((ours, "LlamaForSequenceClassification"), (theirs, "a reward model of DeepSpeed-Chat")):
        with pytest.raises(UserError, match=rf"^--actor: .* is no language model but {found}\. Give the SFT model"):
            check_policy(path, "--actor")


def test_a_reward_model_that_reads_other_tokens_is_refused(tmp_path):
    path = make_scorer(tmp_path / "reward")
    check_vocabularies(make_tokenizer(), path, FLAG)
    check_vocabularies(make_tokenizer(pad_is_eos=True), path, FLAG)  # the same ids
    larger = make_tokenizer()
    larger.add_tokens(["one more"])
    with pytest.raises(UserError, match=rf"^{FLAG}: .*reward knows 64 tokens, the actor's tokenizer has 65\..*trained"):
        check_vocabularies(larger, path, FLAG)
    (tmp_path / "reward" / "tokenizer.json").write_text(
        (tmp_path / "reward" / "tokenizer.json").read_text().replace("w04", "other")
    )
    with pytest.raises(UserError, match=rf"^{FLAG}: the tokenizer in .*reward gives other ids.*trained"):
        check_vocabularies(make_tokenizer(), path, FLAG)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    make_config("llama").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"^--actor: no tokenizer at .*Save one beside the model"):
        read_tokenizer(str(tmp_path), "--actor")
