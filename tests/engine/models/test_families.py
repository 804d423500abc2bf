"""The families of models that are promised to work, each against plain Hugging Face calls on the same folder."""

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    CohereConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    OPTConfig,
)

from engine.algo.sampling import keyed_uniforms
from engine.errors import UserError
from engine.experience import position_ids
from engine.models import classifiers
from engine.models.attention import Attention
from engine.models.checking import check_decoding
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL, model_class
from engine.models.loading import load_policy, load_scorer, new_scorer
from engine.models.lora import LoraSpec, adapt
from engine.models.policy import Policy
from engine.models.saving import save_model
from engine.models.tensor_parallel import TensorParallelPlan
from engine.rollout.cache import SlotCache
from engine.rollout.passes import make_passes, takes_slot_masks
from scripts.harness.models import (
    BOS,
    EOS,
    PAD,
    POSITIONS,
    VOCABULARY,
    family_config,
    make_causal_lm,
    make_family,
    make_scorer,
    save_random,
)
from scripts.harness.ranks import run_ranks
from scripts.harness.weights import full_state
from tests.distributed.conftest import write_stage_files
from tests.distributed.work_families import (
    INDICES,
    LEARNING_RATE,
    OFFSET,
    PAIRS,
    PROMPTS,
    SEED,
    TEXTS,
    one_step,
    three_steps,
)
from tests.made import Made

FAMILIES = ("llama", "opt", "gpt2", "gpt_neox", "bloom", "mistral", "qwen2")
SEQUENCES = torch.tensor([[5, 9, 33, 2, 17, 40], [41, 7, 63, 22, 4, 11]])
PROMPT, TEMPERATURE = 2, 0.7


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{family: (actor, critic)}"""
    root = tmp_path_factory.mktemp("families")
    return Made(
        lambda family: (
            make_causal_lm(root / family / "actor", family, tied=family in ("opt", "gpt2", "bloom")),
            make_scorer(root / family / "critic", family, offset=OFFSET),
        )
    )


def hf_logprobs(folder, sequences):
    """(B, S - 1): of each token but the first, from the model's own logits at TEMPERATURE; no padding, so no mask."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(sequences).logits
    shifted = logits[:, :-1].double() / TEMPERATURE
    chosen = shifted.gather(-1, sequences[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (chosen - shifted.exp().sum(-1).log()).float()


def hf_token_scores(folder, sequences):
    """(B, S): the head on each of the trunk's last hidden states, and the offset."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model.base_model(sequences)[0]
    return hidden @ model.score.weight[0] + OFFSET


@torch.no_grad()
def logprobs_of(policy, sequences, mask=None, response=SEQUENCES.shape[1] - PROMPT):
    mask = torch.ones_like(sequences) if mask is None else mask
    return policy(sequences, mask, position_ids(mask), response_length=response, temperature=TEMPERATURE)[0]


def probed(folder):
    policy = load_policy(folder, torch.float32)
    with torch.no_grad():
        policy(SEQUENCES[:1], probe=True)
    return policy


def padded(left, right):
    """SEQUENCES between padding slots that hold other tokens, and their mask."""
    junk = torch.Generator().manual_seed(left + right)
    filler = [torch.randint(VOCABULARY, (len(SEQUENCES), count), generator=junk) for count in (left, right)]
    mask = [torch.zeros_like(filler[0]), torch.ones_like(SEQUENCES), torch.zeros_like(filler[1])]
    return torch.cat([filler[0], SEQUENCES, filler[1]], 1), torch.cat(mask, 1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_changes_no_log_prob_and_no_score(folders, family):
    actor, critic = folders[family]
    policy, scorer = probed(actor), load_scorer(critic, torch.float32)
    assert policy.direct_head
    response = SEQUENCES.shape[1] - PROMPT
    logprobs, token_scores = hf_logprobs(actor, SEQUENCES)[:, PROMPT - 1 :], hf_token_scores(critic, SEQUENCES)
    for left, right in ((0, 0), (3, 0), (0, 4), (5, 2)):
        sequences, mask = padded(left, right)
        found = logprobs_of(policy, sequences, mask, response + right)[:, :response]
        torch.testing.assert_close(found, logprobs, rtol=0, atol=1e-5)
        found = scorer(sequences, mask, position_ids(mask))
        torch.testing.assert_close(found[:, left : left + SEQUENCES.shape[1]], token_scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(
            scorer.sequence_scores(found, sequences, mask), token_scores[:, -1], rtol=0, atol=1e-5
        )


def odd_config(family):
    """A configuration whose model changes logits after the head."""
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    return {
        "gemma2": lambda: Gemma2Config(**common, head_dim=8, final_logit_softcapping=2.0),
        "cohere": lambda: CohereConfig(**common, logit_scale=0.25),
    }[family]()


@pytest.mark.parametrize("odd", ["gemma2", "cohere"])
def test_models_that_change_logits_after_the_head_are_asked_for_logits(tmp_path, odd):
    folder = save_random(AutoModelForCausalLM.from_config(odd_config(odd)), tmp_path)
    expected = hf_logprobs(folder, SEQUENCES)[:, PROMPT - 1 :]
    policy = load_policy(folder, torch.float32)
    assert (logprobs_of(policy, SEQUENCES) - expected).abs().max() > 0.1  # what the head alone would say
    policy = probed(folder)
    assert not policy.direct_head
    for left, right in ((0, 0), (3, 2)):
        sequences, mask = padded(left, right)
        found = logprobs_of(policy, sequences, mask, expected.shape[1] + right)[:, : expected.shape[1]]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_what_changes_logits_is_found_where_they_are_still_small():
    model = Gemma2ForCausalLM(odd_config("gemma2")).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-6)
        assert model(SEQUENCES).logits.abs().max() < 1e-3
        policy = Policy(model)
        policy(SEQUENCES[:1], probe=True)
    assert not policy.direct_head


def test_outputs_beside_the_logits_are_not_computed_and_stay_asked_for_in_what_is_saved(tmp_path):
    """Router logits of a mixture of experts, whose balancing loss fails where one token is read after others."""
    folder = save_random(AutoModelForCausalLM.from_config(family_config("mixtral")), tmp_path)
    expected = hf_logprobs(folder, SEQUENCES)[:, PROMPT - 1 :]
    path = tmp_path / "config.json"
    asked = {"output_router_logits": True, "output_hidden_states": True, "return_dict": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | asked | {"output_attentions": True}))
    policy = probed(folder)
    torch.testing.assert_close(logprobs_of(policy, SEQUENCES), expected, rtol=0, atol=1e-5)
    with torch.no_grad():
        whole = policy.model(SEQUENCES, use_cache=True)
        first = policy.model(SEQUENCES[:, :-1], use_cache=True)
        mask = torch.ones_like(SEQUENCES)
        last = policy.model(SEQUENCES[:, -1:], attention_mask=mask, past_key_values=first.past_key_values)
    torch.testing.assert_close(last.logits[:, 0], whole.logits[:, -1], rtol=0, atol=1e-4)
    assert whole.hidden_states is None and whole.router_logits is None
    save_model(policy, full_state(policy.model), AutoTokenizer.from_pretrained(folder), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: saved[name] for name in asked} == asked


def test_an_opt_whose_embedding_is_narrower_than_its_layers(tmp_path):
    def config():
        return OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            word_embed_proj_dim=16,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            do_layer_norm_before=False,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            num_labels=1,
        )

    actor = save_random(AutoModelForCausalLM.from_config(config()), tmp_path / "actor")
    policy = probed(actor)
    assert policy.direct_head and policy.model.get_output_embeddings().in_features == 16
    expected = hf_logprobs(actor, SEQUENCES)[:, PROMPT - 1 :]
    torch.testing.assert_close(logprobs_of(policy, SEQUENCES), expected, rtol=0, atol=1e-5)
    assert new_scorer(actor, torch.float32, PAD, seed=0).model.score.weight.shape == (1, 16)
    critic = save_random(AutoModelForSequenceClassification.from_config(config()), tmp_path / "critic", seed=1)
    check_step(actor, critic, [one_step(actor, critic, stage=0)], offset=0.0)


DROPOUTS = {
    "llama": {"attention_dropout": 0.25},
    "opt": {"dropout": 0.3, "attention_dropout": 0.2, "layerdrop": 0.1},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.2, "attn_pdrop": 0.15, "summary_first_dropout": 0.4},
    "gpt_neox": {"hidden_dropout": 0.3, "attention_dropout": 0.2, "classifier_dropout": 0.35},
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.2},
    "mistral": {"attention_dropout": 0.25},
    "qwen2": {"attention_dropout": 0.25},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_and_comes_back_in_what_is_saved(family, tmp_path):
    actor, critic = make_causal_lm(tmp_path / "actor", family), make_scorer(tmp_path / "critic", family)
    expected = {
        actor: hf_logprobs(actor, SEQUENCES)[:, PROMPT - 1 :],
        critic: hf_token_scores(critic, SEQUENCES) - OFFSET,
    }
    mask = torch.ones_like(SEQUENCES)
    for folder, load in ((actor, load_policy), (critic, load_scorer)):
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | DROPOUTS[family]))
        module = load(folder, torch.float32).train()
        with torch.no_grad():
            found = (
                logprobs_of(module, SEQUENCES) if load is load_policy else module(SEQUENCES, mask, position_ids(mask))
            )
        torch.testing.assert_close(found, expected[folder], rtol=0, atol=1e-5)
        save_model(module, full_state(module.model), AutoTokenizer.from_pretrained(folder), tmp_path / "saved")
        assert json.loads((tmp_path / "saved" / "config.json").read_text()) == json.loads(path.read_text())
        assert all(getattr(module.model.config, name) == 0 for name in DROPOUTS[family])  # of the model that goes on


def check_sampling(model, rows):
    """Each response token is the one at which the model's cumulative probability passes the keyed number."""
    for row, index in zip(rows, INDICES):
        tokens = row["prompt"] + row["response"]
        probabilities = torch.softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()
        for step, token in enumerate(row["response"]):
            number = keyed_uniforms(SEED, torch.tensor([index]), torch.tensor([0]), step).item()
            cumulative = np.concatenate([[0.0], probabilities[len(row["prompt"]) - 1 + step].cumsum()])
            assert cumulative[token] - 1e-5 <= number <= cumulative[token + 1] + 1e-5
        assert (row["response"][-1] == EOS or len(row["response"]) == 6) and EOS not in row["response"][:-1]


def check_update(model, loss, updated):
    """Adam's first step moves each weight by the learning rate, against the gradient's sign."""
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    largest = max(grad.abs().max() for grad in grads.values())
    for name, parameter in model.named_parameters():
        moved, sure = updated[name] - parameter, grads[name].abs() > 1e-3 * largest
        torch.testing.assert_close(moved[sure], -LEARNING_RATE * grads[name].sign()[sure], rtol=1e-2, atol=1e-6)
        # Where gradients cancel, as a bias before the head does in a pair, rounding leaves less than Adam's epsilon.
        assert (moved[grads[name] == 0].abs() < 0.3 * LEARNING_RATE).all(), name
    assert sum((grad.abs() > 1e-3 * largest).sum() for grad in grads.values()) > 1000


def classifier(folder, **how):
    """A saved classifier, loaded as docs/families.md says: some bring the code of their class."""
    return AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True, **how).float().eval()


def token_nats(model, tokens):
    """(S - 1,): of each token but the first."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return F.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")


def token_scores(model, tokens):
    """(S,): the head on each of the trunk's last hidden states."""
    return model.base_model(torch.tensor([tokens]))[0][0] @ model.score.weight[0]


def check_step(actor_path, critic_path, ranks, offset=OFFSET):
    """What `one_step` did on all ranks, computed again in plain Hugging Face and torch, a row at a time."""
    rows, main = [row for rank in ranks for row in rank["rows"]], ranks[0]
    assert [row["prompt"] for row in rows] == list(PROMPTS)
    actor = AutoModelForCausalLM.from_pretrained(actor_path, dtype=torch.float32).eval()
    critic = classifier(critic_path)
    for name, model in (("reference", actor), ("reward", critic)):
        assert dict(model.named_parameters()).keys() <= main[name].keys() <= model.state_dict().keys()
        assert all(torch.equal(main[name][key], tensor) for key, tensor in model.named_parameters())
    with torch.no_grad():
        check_sampling(actor, rows)
    policy_loss = value_loss = 0.0
    for row in rows:
        tokens, start = row["prompt"] + row["response"], len(row["prompt"]) - 1
        logprobs = -token_nats(actor, tokens)[start:]
        scores = token_scores(critic, tokens) + offset
        for name, expected in (
            ("logprobs", logprobs),
            ("ref_logprobs", logprobs),
            ("values", scores[start:-1]),
            ("scores", scores[-1]),
        ):
            torch.testing.assert_close(row[name], expected.detach(), rtol=1e-5, atol=1e-5)
        policy_loss = policy_loss - (logprobs * row["advantages"]).sum()
        value_loss = value_loss + (scores[start:-1] - row["returns"]).square().sum()
    check_update(actor, policy_loss, main["actor"])
    check_update(critic, value_loss, main["critic"])
    assert main["metrics"]["policy/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert all(np.isfinite(value) for value in main["metrics"].values())


PAGE = (Path(__file__).parents[3] / "docs" / "families.md").read_text(encoding="utf-8")
MATRIX = {  # {model type: the further cells of its row}
    model_type: [cell.strip() for cell in cells.split("|")]
    for model_type, cells in re.findall(r"^\|[^|]+\| `(\w+)` \|(.+)\|$", PAGE, re.MULTILINE)
}
PARTS = 3  # of the matrix, for workers that run tests at the same time; each part starts its ranks once
REFUSED = [  # (model type, role)
    (model_type, role)
    for types, role in re.findall(r"^\| (`.+`) \| (\w+).*\|.*\|$", PAGE, re.MULTILINE)
    for model_type in re.findall(r"`(\w+)`", types)
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """{model type: the folder of a language model}"""
    root = tmp_path_factory.mktemp("matrix")

    def base(model_type):
        model = AutoModelForCausalLM.from_config(family_config(model_type), dtype=torch.float32)
        return save_random(model, root / model_type / "base")

    return Made(base)


def check_three_steps(base, output, ranks):
    """What `three_steps` did on all ranks, computed again in plain Hugging Face and torch; what it saved is what it
    had."""
    main = ranks[0]
    policy = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    nats = [token_nats(policy, text.token_ids)[text.first_target - 1 :].sum() for text in TEXTS]
    check_loss(policy, sum(nats), main["sft"])
    scorer, start = classifier(output / "reward"), AutoModelForCausalLM.from_pretrained(output / "sft")
    scorer.base_model.load_state_dict(getattr(start, scorer.base_model_prefix).state_dict())
    scorer.score.load_state_dict(main["reward"]["head"])
    scores = [[token_scores(scorer, row)[-1] for row in pair] for pair in PAIRS]
    check_loss(scorer, -sum(F.logsigmoid(chosen - rejected) for chosen, rejected in scores), main["reward"])
    check_step(output / "sft", output / "reward", [rank["ppo"] for rank in ranks])
    trained = {"sft": main["sft"]["weights"], "reward": main["reward"]["weights"]}
    trained |= {role: main["ppo"][role] for role in ("actor", "critic")}
    for name, weights in trained.items():
        load = AutoModelForCausalLM.from_pretrained if name in ("sft", "actor") else classifier
        saved = dict(load(output / name, dtype=torch.float32).named_parameters())
        assert saved.keys() <= weights.keys()
        assert all(torch.equal(weights[key], weight) for key, weight in saved.items()), name


def check_loss(model, loss, found):
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    check_update(model, loss, found["weights"])


@pytest.mark.parametrize("model_type", MATRIX)
def test_three_steps_in_one_process(bases, tmp_path, model_type):
    base = bases[model_type]
    check_three_steps(base, tmp_path, [three_steps(base, str(tmp_path), stage=0)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_three_steps_under_zero_3_on_two_ranks(bases, tmp_path, part):
    """All matrices are partitioned; two ranks hold the copy together if the family can be divided."""
    write_stage_files(tmp_path)
    names = list(MATRIX)[part::PARTS]
    families = {name: (bases[name], str(tmp_path / name), 2 if divides(bases[name]) else 1) for name in names}
    ranks = run_ranks(
        "tests.distributed.work_families:all_families",
        timeout=900,
        families=families,
        stage=3,
        config=str(tmp_path / "stage3.json"),
    )
    for name, (base, output, _) in families.items():
        check_three_steps(base, Path(output), [rank[name] for rank in ranks])


def divides(base) -> bool:
    """Whether two ranks can hold the model together."""
    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        return TensorParallelPlan.of(AutoModelForCausalLM.from_config(config), 2).obstacle is None


@pytest.mark.parametrize("model_type", MATRIX)
def test_the_page_says_what_a_family_can(bases, model_type):
    base = bases[model_type]
    kind = model_class(AutoConfig.from_pretrained(base), CLASSIFIER, base, "critic")
    policy = probed(base)
    found = [
        "transformers'" if kind.__module__.startswith("transformers.") else "made here",
        "yes" if packs(base, policy) else "no",
        adapted(base),
        decoding(policy),
        "yes" if divides(base) else "no",
    ]
    assert found == MATRIX[model_type]


@torch.no_grad()
def packs(base, policy) -> bool:
    """Whether rows may be packed. If so, they have the log-probs of padded rows."""
    attention = Attention(packing="packed")
    try:
        attention.check(base, LANGUAGE_MODEL, "fp32", "actor")
    except UserError:
        return False
    found = load_policy(base, torch.float32, attention=attention)
    found(SEQUENCES[:1], probe=True)
    assert found.packs
    sequences, mask = padded(3, 0)
    mask[1, :3] = 1  # the second row is longer
    torch.testing.assert_close(
        logprobs_of(found, sequences, mask), logprobs_of(policy, sequences, mask), rtol=0, atol=1e-5
    )
    return True


def adapted(base) -> str:
    """Which layers LoRA adapts, without embeddings, output head and convolutions. Each adapter learns."""
    policy = load_policy(base, torch.float32)
    adapt(policy, LoraSpec(dim=2, only=True), "actor")
    mask = torch.ones_like(SEQUENCES)
    policy(SEQUENCES, mask, position_ids(mask), response_length=4)[0].sum().backward()
    assert all(b.grad.any() for _, b in policy.adapters.factors().values())
    others = set()
    for name, weight in policy.model.named_parameters():
        layer = name.rpartition(".")[0]
        own = policy.model.get_submodule(layer)
        whole = isinstance(own, nn.Embedding | nn.Conv1d) or own is policy.model.get_output_embeddings()
        if weight.dim() > 1 and not whole and "lora_" not in name and not layer.endswith("base_layer"):
            others.add(layer.rpartition(".")[2])
    return f"all but {', '.join(sorted(others))}" if others else "all"


def decoding(policy) -> str:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reason for plain passes
        found = make_passes(policy.model, SlotCache(), takes_slot_masks(policy.model), "recorded").decoding
    return {"recorded": "graphs"}.get(found, found)


@pytest.mark.parametrize("model_type, role", REFUSED)
def test_what_the_page_says_is_refused(tmp_path, model_type, role):
    config = AutoConfig.for_model(model_type)
    if role == "any":
        for kind in (LANGUAGE_MODEL, CLASSIFIER):
            with pytest.raises(UserError, match=f"of type '{model_type}', which is not a decoder-only model"):
                model_class(config, kind, "there", "model")
    elif role == "critic":
        assert model_class(config, LANGUAGE_MODEL, "there", "model")
        with pytest.raises(UserError, match=f"of type '{model_type}'.* for this role"):
            model_class(config, CLASSIFIER, "there", "model")
    else:
        config.save_pretrained(tmp_path)
        with pytest.raises(UserError, match=f"a {model_type} model.*--rollout_backend vllm"):
            check_decoding(str(tmp_path), "actor")


def test_a_saved_classifier_brings_its_class(tmp_path):
    make_family("lfm2", tmp_path)
    folder, config = tmp_path / "reward", json.loads((tmp_path / "reward" / "config.json").read_text())
    assert config["auto_map"] == {CLASSIFIER: "classifiers.Lfm2ForSequenceClassification"}
    assert (folder / "classifiers.py").read_bytes() == Path(classifiers.__file__).read_bytes()
    expected = load_scorer(folder, torch.float32).model(SEQUENCES).logits
    for found in (classifier(folder), classifiers.Lfm2ForSequenceClassification.from_pretrained(folder)):
        assert torch.equal(found(SEQUENCES).logits, expected)
    assert (
        type(classifier(folder)).__module__.endswith(".classifiers") and type(found).__module__ == classifiers.__name__
    )
    with pytest.raises(AttributeError, match="no attribute 'OtherForSequenceClassification'"):
        classifiers.OtherForSequenceClassification  # noqa: B018


def test_a_made_classifier_trains_and_saves_with_code_from_its_folder(tmp_path):
    """As with --trust_remote_code: the class is the folder's then, and is saved again."""
    make_family("lfm2", tmp_path)
    scorer = load_scorer(tmp_path / "reward", torch.float32, trust_remote_code=True)
    assert type(scorer.model).__module__.startswith("transformers_modules.")
    save_model(scorer, full_state(scorer.model), AutoTokenizer.from_pretrained(tmp_path / "reward"), tmp_path / "saved")
    found, expected = classifier(tmp_path / "saved"), classifier(tmp_path / "reward")
    assert all(torch.equal(one, two) for one, two in zip(found.parameters(), expected.parameters(), strict=True))
