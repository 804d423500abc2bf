"""The shared trunk: one frozen language model that serves all four roles, with an adapter and a head for each role.

    policy = load_policy("sft", torch.float32, merge=False)
    trunk = make_trunk(policy, actor=LoraSpec(dim=16, only=True), scorers={"critic": config}, critic=...)
    logprobs, _ = trunk(sequences, attention_mask, position_ids, response_length=8)
    values = trunk(sequences, attention_mask, position_ids, role="critic")

The actor has an adapter and the language model's head. The reference also has the language model's head; it has no
adapter, or the frozen adapter from which the actor started. The reward model has a frozen adapter and head. The critic
has an adapter and head of its own, which start as copies of a reward model's adapter and head, or as a new adapter and
a head of zeros. The frozen weights, which all roles share, exist once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from engine.distributed import RankGroup
from engine.models.adapter_folders import HEAD, AdapterFolder
from engine.models.adapters import Adapters, inject
from engine.models.checking import contents
from engine.models.config_and_tokenizer import CLASSIFIER, model_class
from engine.models.lora import LoraSpec, adapter_config, ask_for_gradient, decoder_stack, fill_factors
from engine.models.policy import Backbone, Policy, Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRole:
    """The description of the role "critic" or "reward".

    config: the configuration of the role as a classifier of its own, with one label and the settings of the scores.
    start: the adapter and head that the role has or starts from; None for a new adapter and a head of zeros.
    lora: how the role's adapter trains; None if it is frozen.
    """

    config: PretrainedConfig
    start: AdapterFolder | None = None
    lora: LoraSpec | None = None


class Trunk(Policy):
    """A Policy that can also compute as one or two Scorers with the same layers.

    scorers: {role: Scorer}. The Scorers' models use this model's layers. Of the Scorers only the heads are registered
    as submodules, because a module that is registered twice would get ZeRO's hooks twice.
    """

    def __init__(self, model: PreTrainedModel, replaced: dict[str, Any], scorers: Mapping[str, Scorer]):
        super().__init__(model, replaced)
        self.heads = nn.ModuleDict({role: scorer.model.score for role, scorer in scorers.items()})
        self._scorers = tuple(scorers.items())

    @property
    def scorers(self) -> dict[str, Scorer]:
        """{role: Scorer} for those of the roles "critic" and "reward" that the Trunk has."""
        return dict(self._scorers)

    def as_role(self, role: str) -> Backbone:
        """The module that computes as this role: a Scorer for critic and reward model; the Trunk itself for actor and
        reference."""
        return self.scorers.get(role, self)

    def pack(self, packs: bool) -> None:
        """As Backbone.pack, for all roles."""
        super().pack(packs)
        for scorer in self.scorers.values():
            scorer.pack(packs)

    def split(self, group: RankGroup) -> None:
        """As Backbone.split, for all roles."""
        super().split(group)
        for scorer in self.scorers.values():
            scorer.split(group)

    def give_adapters(self, configs: Mapping[str, LoraConfig]) -> None:
        """Inject adapters into the model. configs: {role: configuration of its adapter}."""
        inject(self.model, configs)
        self.adapters = Adapters(self.model, "actor", configs, ["reference"] if "reference" in configs else [])
        for role, scorer in self.scorers.items():
            scorer.adapters = Adapters(scorer.model, role, configs)

    def forward(self, *args, role: str | None = None, **kwargs):
        """Compute as Policy.forward for actor and reference, and as Scorer.forward for critic and reward model."""
        scorer = self.scorers.get(role or "")
        if scorer is not None:
            return scorer(*args, **kwargs)
        return super().forward(*args, **kwargs, role=role)  # type: ignore[misc]


def make_trunk(policy: Policy, actor: LoraSpec, scoring: Mapping[str, ScoringRole]) -> Trunk:
    """Make a Trunk from a language model that was loaded without adapters. All ranks get the same Trunk.

    policy: the language model. If its attribute `start` is an adapter, the actor trains this adapter further, and the
    reference keeps it as it is.
    scoring: {role: ScoringRole} for those of "critic" and "reward" that the run has.

    Raises: UserError if an adapter's targets match no layer, or if the dimension of an adapter that is trained further
    is not the one that is asked for.
    """
    model, kept = policy.model, policy.start
    scorers = {}
    for role, wanted in scoring.items():
        kind = model_class(wanted.config, CLASSIFIER, wanted.config.name_or_path, f"{role} model")
        scorers[role] = Scorer(_classifier(model, wanted.config, kind), policy.replaced)
        head = scorers[role].model.score.weight
        if wanted.start is not None and not head.is_meta:
            with torch.no_grad():
                head.copy_(wanted.start.tensors()[f"{HEAD}.weight"])
    trunk = Trunk(model, policy.replaced, scorers)
    known = contents(policy.base, "model") if policy.base is not None else None
    for module in (trunk, *scorers.values()):
        module.base, module.base_contents = policy.base, known
    starts: dict[str, AdapterFolder | None] = {"actor": kept}
    specs: dict[str, LoraSpec | None] = {"actor": actor}
    starts |= {role: wanted.start for role, wanted in scoring.items()}
    specs |= {role: wanted.lora for role, wanted in scoring.items()}
    if kept is not None:
        starts["reference"], specs["reference"] = kept, None
    alone = {role: scorer.model for role, scorer in scorers.items()}  # models without the language model's head
    trunk.give_adapters({role: adapter_config(alone.get(role, model), starts[role], specs[role]) for role in starts})
    assert trunk.adapters is not None
    for role, start in starts.items():
        fill_factors(trunk.adapters, role, start, specs[role])
    trunk.direct_head, trunk.start = policy.direct_head, kept
    trunk.pack(policy.packs)
    _choose_trained(trunk, [role for role, spec in specs.items() if spec is not None])
    return trunk


def owner(name: str) -> str:
    """The role that trains a parameter. name: the parameter's name within a Trunk."""
    return "critic" if name.startswith("heads.critic.") or ".critic." in name else "actor"


def _choose_trained(trunk: Trunk, roles: list[str]) -> None:
    """Mark the parameters that train: the LoRA factors of these roles, and the critic's head."""
    assert trunk.adapters is not None
    trunk.requires_grad_(False)
    for role in roles:
        for pair in trunk.adapters.factors(role).values():
            for factor in pair:
                factor.requires_grad_(True)
    if "critic" in roles:
        trunk.heads["critic"].requires_grad_(True)
    stack = decoder_stack(trunk.model)
    if stack is not None:
        trunk.model.get_submodule(f"{stack}.0").register_forward_pre_hook(ask_for_gradient)


def _classifier(model: PreTrainedModel, config: PretrainedConfig, kind: Any) -> PreTrainedModel:
    """A classifier that uses the layers of a language model, with a head of zeros."""
    like = next(model.parameters())
    with torch.device("meta"):
        shell = kind._from_config(config, dtype=like.dtype)
    setattr(shell, shell.base_model_prefix, model.base_model)
    head = nn.Linear(shell.score.in_features, 1, shell.score.bias is not None, like.device, like.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    shell.score = head.requires_grad_(False)
    return shell
