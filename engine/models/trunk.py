"""One model in four roles: a frozen language model, with an adapter and a head for each role.

    trunk = make_trunk(policy, scorer_config, actor=LoraSpec(dim=16, only=True), critic=LoraSpec(dim=16, only=True))
    logprobs, _ = trunk(sequences, attention_mask, position_ids, response_length=8)
    values = trunk(sequences, attention_mask, position_ids, role="critic")

The actor has its adapter and the language model's head. The reference has the same head and no adapter, or a frozen one
that the actor started from. The reward model has a frozen adapter and head; the critic starts as a copy of these, or
from nothing where there is no reward model. What is frozen for all of them is there once.
"""

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.models.adapters import Adapters, inject
from engine.models.backbone import Backbone
from engine.models.classes import CLASSIFIER, model_class
from engine.models.lora import LoraSpec, draw, lora_config
from engine.models.policy import Policy
from engine.models.scorer import Scorer
from engine.models.stack import ask_for_gradient, decoder_stack

SCORING = ("critic", "reward")


class Trunk(Policy):
    """A Policy that also computes as a Scorer, with the same layers.

    scorer: the Scorer; its model has this one's layers for its own. Its heads are registered here, and its layers here
    alone: modules that are met twice would get ZeRO's hooks twice.
    """

    def __init__(self, model: PreTrainedModel, dropouts: dict[str, float], scorer: Scorer):
        super().__init__(model, dropouts)
        self.score_head, self.kept_heads = scorer.model.score, scorer.kept_heads
        self._scorer = (scorer,)

    @property
    def scorer(self) -> Scorer:
        """What it is as critic and reward model."""
        return self._scorer[0]

    def as_role(self, role: str) -> Backbone:
        """The Policy or Scorer that this is in a role."""
        return self.scorer if role in SCORING else self

    def with_model(self, model: PreTrainedModel) -> "Trunk":
        """A Trunk with these settings, adapters and heads, for another model of the architecture."""
        own = self.scorer
        scorer = Scorer(_classifier(model, own.model.config, type(own.model)), own.dropouts)
        for role in own.kept_heads:
            scorer.keep_head(role)
        other = Trunk(model, self.dropouts, scorer)
        other.direct_head = self.direct_head
        if self.adapters is not None:
            other.give_adapters(self.adapters.configs)
        return other

    def give_adapters(self, configs: Mapping[str, LoraConfig]) -> None:
        """Put adapters, by the roles that they are of, into the model."""
        inject(self.model, configs)
        frozen = {role: [role] for role in ("reference", "reward") if role in configs}
        self.adapters = Adapters(self.model, "actor", configs, frozen)
        own = "critic" if "critic" in configs else "reward"
        self.scorer.adapters = Adapters(self.scorer.model, own, configs, frozen)

    def forward(self, *args, role: str | None = None, **kwargs):
        """As Policy's for actor and reference; as Scorer's for critic and reward model."""
        if role in SCORING:
            return self.scorer(*args, role=role, **kwargs)
        return super().forward(*args, role=role, **kwargs)


def make_trunk(
    policy: Policy,
    config: PretrainedConfig,
    *,
    actor: LoraSpec,
    critic: LoraSpec | None,
    head: Tensor | None = None,
    frozen: Mapping[str, tuple[LoraConfig, Mapping[str, tuple[Tensor, Tensor]]]] | None = None,
) -> Trunk:
    """A Trunk of a language model that has no adapters yet; on all ranks alike.

    Args:
        config: of the critic and reward model: the language model's, with one label and the settings of the scores.
        actor, critic: which adapters train; no critic if None.
        head: (1, d) the reward model's, from which the critic's starts; None for a critic's of zeros.
        frozen: the adapters of "reward" and "reference", from which the critic's and the actor's start: peft's
            description of each, and its (A, B) by the names of their layers.
    """
    model, frozen = policy.model, frozen or {}
    kind = model_class(config, CLASSIFIER, config.name_or_path, "model")
    scorer = Scorer(_classifier(model, config, kind), policy.dropouts)
    if head is not None:
        with torch.no_grad():
            scorer.model.score.weight.copy_(head)
    if critic is not None and head is not None:
        scorer.keep_head("reward")
    trunk = Trunk(model, policy.dropouts, scorer)
    trunk.direct_head = policy.direct_head
    specs = {"actor": actor} | ({"critic": critic} if critic is not None else {})
    starts = {role: _START[role] for role in specs if _START[role] in frozen}
    configs = {role: frozen[starts[role]][0] if role in starts else lora_config(model, specs[role]) for role in specs}
    trunk.give_adapters(configs | {role: described for role, (described, _) in frozen.items()})
    _fill(trunk, specs, starts, frozen)
    _choose_trained(trunk, specs)
    return trunk


_START = {"actor": "reference", "critic": "reward"}  # whose adapter one starts from


def _fill(
    trunk: Trunk,
    specs: Mapping[str, LoraSpec],
    starts: Mapping[str, str],
    frozen: Mapping[str, tuple[LoraConfig, Mapping[str, tuple[Tensor, Tensor]]]],
) -> None:
    """Give all factors the numbers that they start with."""
    assert trunk.adapters is not None
    for role in (*specs, *frozen):
        found: Any = frozen[starts.get(role, role)][1] if role in starts or role in frozen else None
        for name, (a, b) in trunk.adapters.factors(role).items():
            if found is None:
                draw(a, b, specs[role], name)
                continue
            with torch.no_grad():
                a.copy_(found[name][0])
                b.copy_(found[name][1])


def _choose_trained(trunk: Trunk, specs: Mapping[str, LoraSpec]) -> None:
    """Mark what trains: factors, and the critic's head."""
    assert trunk.adapters is not None
    trunk.requires_grad_(False)
    for role in specs:
        for pair in trunk.adapters.factors(role).values():
            for factor in pair:
                factor.requires_grad_(True)
    trunk.score_head.requires_grad_("critic" in specs)
    stack = decoder_stack(trunk.model)
    if stack is not None:
        trunk.model.get_submodule(f"{stack}.0").register_forward_pre_hook(ask_for_gradient)


def owner(name: str) -> str:
    """Which role a parameter that trains is of, by its name within a Trunk."""
    return "critic" if name.startswith("score_head.") or ".critic." in name else "actor"


def _classifier(model: PreTrainedModel, config: PretrainedConfig, kind: Any) -> PreTrainedModel:
    """A classifier whose layers are those of a language model; with a head of zeros."""
    dtype = next(model.parameters()).dtype
    with torch.device("meta"):
        shell = kind._from_config(config, dtype=dtype)
    device, head = next(model.parameters()).device, shell.score
    setattr(shell, shell.base_model_prefix, model.base_model)
    shell.score = nn.Linear(head.in_features, 1, bias=head.bias is not None, dtype=dtype, device=device)
    shell.score.requires_grad_(False)
    for parameter in shell.score.parameters():
        nn.init.zeros_(parameter)
    return shell
