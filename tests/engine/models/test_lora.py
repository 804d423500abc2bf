"""LoRA in a Policy: what trains, where it starts, that it computes W + alpha / dim * B A, and what is known of it from
the configuration alone. Against DeepSpeed-Chat's layer, whose formulas are written out here, in Llamas and OPTs.

Source of the formulas: microsoft/DeepSpeedExamples 83757d9c, dschat/utils/module/lora.py, LinearLayer_LoRA and
convert_linear_layer_to_lora. Its factors lie transposed: right (in, dim) is A^T, left (dim, out) is B^T.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.algo import logprobs as logprob_module
from engine.algo.logprobs import head_logprobs
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import AdaptedModel, LoraSpec, adapt, target_names
from engine.models.policy import Policy
from scripts.harness.models import VOCABULARY, make_causal_lm, make_config, make_scorer

SEQUENCES = torch.arange(3, 19).view(2, 8)
MASK = torch.ones_like(SEQUENCES)


def policy(family: str, folder, **spec) -> Policy:
    found = load_policy(make_causal_lm(folder / family, family), torch.float32)
    if spec:
        adapt(found, LoraSpec(**spec), "actor")
    return found


def logprobs(module: Policy, **role) -> torch.Tensor:
    return module(SEQUENCES, MASK, position_ids(MASK), response_length=5, **role)[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_an_adapter_starts_as_nothing_and_computes_the_formula(family, tmp_path):
    plain, adapted = policy(family, tmp_path), policy(family, tmp_path, dim=4, alpha=2.0, only=True)
    assert torch.equal(logprobs(adapted), logprobs(plain))
    generator = torch.Generator().manual_seed(1)
    for name, (a, b) in adapted.adapters.factors().items():
        assert a.shape[0] == b.shape[1] == 4 and not b.any()
        assert a.abs().max() <= 1 / math.sqrt(4) and a.abs().max() > 0.8 / math.sqrt(4)
        with torch.no_grad():
            b.copy_(torch.randn(b.shape, generator=generator))
            change = 2.0 / 4 * b @ a
            weight = plain.model.get_submodule(name).weight
            weight += change.T if family == "gpt2" else change  # GPT-2's Conv1D holds its matrices transposed
    assert torch.allclose(logprobs(adapted), logprobs(plain), atol=1e-5)
    before = policy(family, tmp_path)
    assert torch.equal(logprobs(adapted, role="reference"), logprobs(before))
    assert not torch.equal(logprobs(adapted), logprobs(before))  # the role is the own one again


def test_only_factors_train_or_all_but_the_adapted_matrices(tmp_path):
    only, more = (policy("opt", tmp_path, dim=2, only=only, targets="decoder.layers.") for only in (True, False))
    trained = {name for name, parameter in only.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_A.actor." in name or ".lora_B.actor." in name for name in trained)
    frozen = {name for name, parameter in more.named_parameters() if not parameter.requires_grad}
    assert frozen and all(name.endswith(".base_layer.weight") for name in frozen)


def test_texts_and_names_choose_layers_and_a_text_that_is_nowhere_is_refused(tmp_path):
    model = policy("llama", tmp_path).model
    matrices = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    matrices += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    everything = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in matrices]
    assert target_names(model, "all-linear") == everything
    assert target_names(model, "layers.1.mlp") == everything[-3:]
    assert target_names(model, ("v_proj",)) == ["model.layers.0.self_attn.v_proj", "model.layers.1.self_attn.v_proj"]
    assert target_names(model, "lm_head") == ["lm_head"]
    with pytest.raises(UserError, match="'self_atn'.*Did you mean 'self_attn'"):
        target_names(model, "self_atn")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("only", [True, False])
def test_a_heads_adapter_is_the_heads_alone_and_logits_are_computed_in_chunks(tied, only, tmp_path, monkeypatch):
    """Against the formula's logits, all at once; the reference has none of it, and gradients reach all factors."""
    base = make_causal_lm(tmp_path / "base", tied=tied)
    plain, adapted = (load_policy(base, torch.float32) for _ in range(2))
    adapt(adapted, LoraSpec(dim=4, alpha=6.0, only=only, targets=("all-linear", "lm_head")), "actor")
    generator = torch.Generator().manual_seed(1)
    factors = adapted.adapters.factors()
    with torch.no_grad():
        for _, b in factors.values():
            b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    embedding = adapted.model.get_input_embeddings().weight
    assert embedding.requires_grad == (not only and not tied)  # a tied one is an adapted matrix
    weights = {name: plain.model.get_submodule(name).weight for name in factors}
    changed = {name: (weights[name] + 1.5 * b @ a).detach().requires_grad_() for name, (a, b) in factors.items()}
    trunk = {f"{name}.weight": weight for name, weight in changed.items() if name != "lm_head"}
    hidden = torch.func.functional_call(plain.model, trunk, (SEQUENCES, MASK), {"output_hidden_states": True})
    logits = hidden.hidden_states[-1] @ changed["lm_head"].T
    expected = logits[:, 2:7].log_softmax(-1).gather(-1, SEQUENCES[:, 3:, None]).squeeze(-1)
    rows: list[int] = []
    count = logprob_module.token_logprobs
    monkeypatch.setattr(logprob_module, "token_logprobs", lambda x, *rest: (rows.append(x.numel()), count(x, *rest))[1])
    monkeypatch.setattr("engine.models.heads.head_logprobs", partial(head_logprobs, at_once=3 * 64))
    found = logprobs(adapted)
    assert adapted.direct_head and max(rows) == 3 * 64 and sum(rows) == 10 * 64
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weighting = torch.randn(found.shape, generator=generator)
    (found * weighting).sum().backward()
    gradients = torch.autograd.grad((expected * weighting).sum(), list(changed.values()))
    for (a, b), gradient in zip(factors.values(), gradients, strict=True):
        for factor, own in ((a, 1.5 * b.detach().T @ gradient), (b, 1.5 * gradient @ a.detach().T)):
            assert (factor.grad - own).norm() < 1e-5 * own.norm()
    assert torch.equal(logprobs(adapted, role="reference"), logprobs(load_policy(base, torch.float32)))


# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48.
MATRICES = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)
FACTORS = 2 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (32 + 48))  # for each rank
REST = 2 * 64 * 32 + 5 * 32  # embedding, head, norms


@pytest.fixture
def path(tmp_path) -> str:
    """A folder with a configuration and no weights."""
    make_config("llama").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_parameters_are_counted(path):
    only = AdaptedModel.of(path, LoraSpec(dim=4, only=True), "--actor_model_name_or_path")
    assert (only.trained, only.total) == (4 * FACTORS, MATRICES + REST + 4 * FACTORS)
    more = AdaptedModel.of(path, LoraSpec(dim=4), "--actor_model_name_or_path")
    assert (more.trained, more.total) == (4 * FACTORS + REST, MATRICES + REST + 4 * FACTORS)
    scorer = AdaptedModel.of(path, LoraSpec(dim=4, only=True), "--critic_model_name_or_path", scorer=True)
    assert (scorer.trained, scorer.total) == (4 * FACTORS + 32, MATRICES + REST - 64 * 32 + 32 + 4 * FACTORS)
    some = AdaptedModel.of(path, LoraSpec(dim=2, alpha=3, only=True, lr=1e-3, targets=("q_proj",)), "--x")
    assert some.trained == 2 * 2 * (32 + 32) and some.layers == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert some.summary().startswith(
        "rank 2, alpha 3, learning rate 0.001, in 2 layers (q_proj); 256 of 19,872 parameters train (1.3 %), all else"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
def test_it_is_what_loading_makes(family, tmp_path):
    for scorer, make, load in ((False, make_causal_lm, load_policy), (True, make_scorer, load_scorer)):
        folder = make(tmp_path / f"{family}_{scorer}", family)
        for only in (True, False):
            spec = LoraSpec(dim=2, only=only)
            module = load(folder, torch.float32)
            adapt(module, spec, "model")
            found = AdaptedModel.of(folder, spec, "--x", scorer)
            assert found.layers == module.adapters.targets()
            assert found.total == sum(p.numel() for p in module.model.parameters())
            assert found.trained == sum(p.numel() for p in module.model.parameters() if p.requires_grad)


def test_a_name_that_is_nowhere_is_refused_beside_one_that_is_found(path):
    with pytest.raises(UserError) as caught:
        AdaptedModel.of(path, LoraSpec(dim=2, targets=("q_proj", "v_prjo")), "--lora_target_modules q_proj v_prjo: --m")
    assert str(caught.value) == (
        f"--lora_target_modules q_proj v_prjo: --m {path}: no linear layer of LlamaForCausalLM has a name with "
        "'v_prjo'. Did you mean 'v_proj'? There are, for example, model.layers.0.self_attn.q_proj, "
        "model.layers.0.self_attn.k_proj, model.layers.0.self_attn.v_proj; 'all-linear' takes all but the output head."
    )
    with pytest.raises(UserError, match="no linear layer of LlamaForSequenceClassification has a name with 'score'"):
        AdaptedModel.of(path, LoraSpec(dim=2, targets="score"), "--x", scorer=True)


DIM, CLOSE = 4, 5e-6  # rounding, of processors that sum in another order, too
MODULE_NAMES = {"llama": "layers.", "opt": "decoder.layers."}
PARITY_SEQUENCES = torch.arange(3, 3 + 2 * 9).view(2, 9) % VOCABULARY
PARITY_MASK = torch.ones_like(PARITY_SEQUENCES)


class DeepSpeedChatLinear(nn.Module):
    """The linear layer with factors, as DeepSpeed-Chat computes it."""

    def __init__(self, linear: nn.Linear, dim: int, scaling: float = 1.0):
        super().__init__()
        self.weight, self.bias = linear.weight.requires_grad_(False), linear.bias
        rows, columns = linear.weight.shape
        self.right, self.left = nn.Parameter(torch.zeros(columns, dim)), nn.Parameter(torch.zeros(dim, rows))
        self.scaling = scaling / dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + (x @ self.right @ self.left) * self.scaling


def deepspeed_chat_model(folder: str, family: str) -> tuple[nn.Module, dict[str, DeepSpeedChatLinear]]:
    """The model with every nn.Linear replaced whose name contains the module name, and these layers by name."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    linears = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    replaced = {}
    for name, linear in linears:
        if MODULE_NAMES[family] in name:
            replaced[name] = DeepSpeedChatLinear(linear, DIM)
            model.set_submodule(name, replaced[name])
    return model, replaced


def their_logprobs(model: nn.Module) -> torch.Tensor:
    """(2, 8) float32, of every token but the first."""
    logits = model(input_ids=PARITY_SEQUENCES, attention_mask=PARITY_MASK).logits
    return logits[:, :-1].log_softmax(-1).gather(-1, PARITY_SEQUENCES[:, 1:, None]).squeeze(-1)


@pytest.fixture(params=MODULE_NAMES)
def both(request, tmp_path):
    """Our Policy and DeepSpeed-Chat's model with the same factors, none of them 0, and its layers by name."""
    folder = make_causal_lm(tmp_path / request.param, request.param)
    policy = load_policy(folder, torch.float32).train()
    adapt(policy, LoraSpec(dim=DIM, targets=MODULE_NAMES[request.param]), "actor")
    theirs, layers = deepspeed_chat_model(folder, request.param)
    generator = torch.Generator().manual_seed(5)
    ours = policy.adapters.factors()
    assert ours.keys() == layers.keys() and len(layers) == {"llama": 14, "opt": 12}[request.param]
    with torch.no_grad():
        for name, (a, b) in ours.items():
            b.copy_(torch.randn(b.shape, generator=generator))
            layers[name].right.copy_(a.T)
            layers[name].left.copy_(b.T)
    return policy, theirs, layers


def own_logprobs(policy) -> torch.Tensor:
    return policy(
        PARITY_SEQUENCES, PARITY_MASK, position_ids(PARITY_MASK), response_length=PARITY_SEQUENCES.shape[1] - 1
    )[0]


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got - wanted).norm() / wanted.norm()).item()


def test_outputs_and_gradients_are_the_same(both):
    """Without only_optimize_lora: of factors, biases, norms and embeddings."""
    policy, theirs, layers = both
    got, wanted = own_logprobs(policy), their_logprobs(theirs)
    assert relative(got, wanted) < CLOSE
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(6))
    (got * weight).sum().backward()
    (wanted * weight).sum().backward()
    ours = policy.adapters.factors()
    for name, layer in layers.items():
        assert relative(ours[name][0].grad.T, layer.right.grad) < CLOSE, name
        assert relative(ours[name][1].grad.T, layer.left.grad) < CLOSE, name
    rest = {name: p for name, p in theirs.named_parameters() if p.requires_grad and ".right" not in name}
    own = {name.replace(".base_layer", ""): p for name, p in policy.model.named_parameters() if p.requires_grad}
    trained = {name for name in rest if not name.endswith(".left")}
    assert trained == {name for name in own if ".lora_" not in name}
    for (
        name
    ) in trained:  # that of a key's bias is 0, as it moves all scores of a query alike: nothing is relative to it
        error = (own[name].grad - rest[name].grad).norm().item()
        assert error < CLOSE * max(rest[name].grad.norm().item(), 1.0), name
