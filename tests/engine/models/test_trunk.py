"""One trunk: each of its roles computes what a model of its own would."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.actor_copy import ActorCopy
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec
from engine.models.trunk import Trunk, make_trunk, owner
from engine.rlhf_engine import scoring_roles
from scripts.harness.models import make_adapter, make_causal_lm, make_scorer

SEQUENCES = torch.arange(4, 20).view(2, 8)
MASK = torch.ones_like(SEQUENCES)
INPUTS = SEQUENCES, MASK, position_ids(MASK)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
LORA = LoraSpec(dim=4, only=True)


def spec_of(actor: str, reward: str, **fields) -> EngineSpec:
    lora = {"share_trunk": True, "actor_lora": LORA, "critic_lora": LORA}
    return EngineSpec(**{"actor_path": actor, "critic_path": reward} | lora | fields)


def trunk_of(spec: EngineSpec) -> Trunk:
    policy = load_policy(spec.actor_path, torch.float32, merge=False)
    return make_trunk(policy, spec.actor_lora, scoring_roles(spec)).eval()


def answers(trunk: Trunk) -> dict[str, torch.Tensor]:
    """What each role says of SEQUENCES."""
    found = {role: trunk(*INPUTS, response_length=5, role=role)[0] for role in ("actor", "reference")}
    return found | {role: trunk(*INPUTS, role=role) for role in trunk.scorers}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom"])
@torch.no_grad()
def test_roles_compute_what_models_of_their_own_do(family, tmp_path):
    base = make_causal_lm(tmp_path / "base", family, tied=family == "gpt2")
    start = make_adapter(tmp_path / "start", base, seed=2)
    reward = make_adapter(tmp_path / "reward", base, scorer=True)
    trunk = trunk_of(spec_of(start, reward))
    own_policy = load_policy(start, torch.float32)(*INPUTS, response_length=5)[0]
    own_scores = load_scorer(reward, torch.float32)(*INPUTS)
    expected = {"actor": own_policy, "reference": own_policy, "critic": own_scores, "reward": own_scores}
    found = answers(trunk)
    for role, tensor in expected.items():
        torch.testing.assert_close(found[role], tensor, **CLOSE)

    trained = {name: p for name, p in trunk.named_parameters() if p.requires_grad}
    assert {owner(name) for name in trained} == {"actor", "critic"}
    for name, parameter in trained.items():
        parameter.add_(0.05 if owner(name) == "critic" else 0.03)
    moved = answers(trunk)
    for role in found:
        assert torch.equal(moved[role], found[role]) == (role in ("reference", "reward")), role

    copy = ActorCopy(SimpleNamespace(module=trunk, stage=3, version=0)).module()
    torch.testing.assert_close(copy(*INPUTS, response_length=5)[0], moved["actor"], **CLOSE)


@torch.no_grad()
def test_the_actor_may_have_an_adapter_where_the_others_have_none(tmp_path):
    """The output head, and a layer that the reward model's adapter leaves as it is."""
    base = make_causal_lm(tmp_path / "base", "llama")
    reward = make_adapter(tmp_path / "reward", base, scorer=True)
    trunk = trunk_of(spec_of(base, reward, actor_lora=replace(LORA, targets=("lm_head", "v_proj"))))
    before = answers(trunk)
    assert len(trunk.adapters.factors("actor")) == 3 and len(trunk.adapters.factors("reward")) == 14
    head = trunk.adapters.factors("actor")["lm_head"][1]
    head.copy_(torch.linspace(-0.1, 0.1, head.numel()).view(head.shape))
    after = answers(trunk)
    assert {role for role in after if not torch.equal(after[role], before[role])} == {"actor"}
    copy = ActorCopy(SimpleNamespace(module=trunk, stage=3, version=0)).module()
    torch.testing.assert_close(copy(*INPUTS, response_length=5)[0], after["actor"], **CLOSE)


@torch.no_grad()
def test_dropout_that_adapters_were_trained_with_is_nothing_in_any_role(tmp_path):
    """Engines are in train mode while experience is made."""
    base = make_causal_lm(tmp_path / "base", "llama")
    start = make_adapter(tmp_path / "start", base, seed=2, dropout=0.5)
    reward = make_adapter(tmp_path / "reward", base, scorer=True, dropout=0.5)
    trunk = trunk_of(spec_of(start, reward))
    expected, found = answers(trunk.eval()), answers(trunk.train())
    for role in expected:
        assert torch.equal(found[role], expected[role]), role


@torch.no_grad()
def test_without_a_reward_model_the_critic_says_nothing_yet(tmp_path):
    base = make_causal_lm(tmp_path / "base", "llama")
    trunk = trunk_of(spec_of(base, None, reward_paths=()))
    found = answers(trunk)
    assert found.keys() == {"actor", "reference", "critic"} and not found["critic"].any()
    own = load_policy(base, torch.float32)(*INPUTS, response_length=5)[0]
    assert torch.equal(found["actor"], own) and torch.equal(found["reference"], own)


@torch.no_grad()
def test_without_a_critic_the_reward_model_alone_is_there(tmp_path):
    base = make_causal_lm(tmp_path / "base", "llama")
    reward = make_adapter(tmp_path / "reward", base, scorer=True)
    trunk = trunk_of(spec_of(base, None, reward_paths=(reward,), with_critic=False, critic_lora=None))
    torch.testing.assert_close(answers(trunk)["reward"], load_scorer(reward, torch.float32)(*INPUTS), **CLOSE)
    assert {owner(name) for name, p in trunk.named_parameters() if p.requires_grad} == {"actor"}


def test_models_that_share_no_trunk_are_refused(tmp_path):
    base, other = (make_causal_lm(tmp_path / name, "llama", seed=seed) for seed, name in enumerate(("base", "other")))
    whole = make_scorer(tmp_path / "whole", "llama")
    with pytest.raises(UserError, match=f"critic {whole} is a whole model, and actor is {base}\\. One trunk"):
        scoring_roles(spec_of(base, whole))
    beside = Path(make_adapter(tmp_path / "lora", base, scorer=True)).rename(Path(whole) / "adapter")
    with pytest.raises(UserError, match=f"critic {whole} is a whole model \\(its adapter is in {beside}\\), and"):
        scoring_roles(spec_of(base, whole))
    foreign = make_adapter(tmp_path / "foreign", other, scorer=True)
    with pytest.raises(UserError, match=f"critic {foreign} is an adapter on {other}, and actor is {base}\\."):
        scoring_roles(spec_of(base, foreign))
    fitting = make_adapter(tmp_path / "fitting", base, scorer=True, dim=4)
    with pytest.raises(UserError, match="has dimension 4, and LoRA is asked for with 8"):
        trunk_of(spec_of(base, fitting, critic_lora=replace(LORA, dim=8)))
