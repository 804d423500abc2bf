"""A meta model is a model that is built from its configuration on the meta device, where tensors have shapes but no
memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import torch

from engine.distributed import RankGroup
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.attention import USUAL, Attention
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL, model_class, read_config
from engine.models.hydra import HydraPolicy
from engine.models.loading import DTYPES, as_computed
from engine.models.lora import LoraSpec, adapt
from engine.models.policy import Backbone, Policy, Scorer
from engine.models.trunk import make_trunk
from engine.rlhf_engine import scoring_roles
from engine.zero.config import decoder_layers


@dataclass(frozen=True)
class MetaModel:
    """One engine's module on the meta device.

    role: the engine's role.
    path: the folder of the model's configuration.
    trained: whether the engine has an optimizer.
    """

    role: str
    path: str
    module: Backbone
    trained: bool

    @property
    def width(self) -> int:
        """The number of bytes per parameter in the compute dtype."""
        return next(self.module.parameters()).element_size()

    @cached_property
    def numbers(self) -> int:
        """The number of elements of all parameters together; tied parameters count once."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def trains(self) -> int:
        """The number of elements of all trained parameters together."""
        return sum(p.numel() for p in self.module.parameters() if self.trained and p.requires_grad)

    @cached_property
    def largest(self) -> int:
        """The number of elements of the largest parameter."""
        return max(parameter.numel() for parameter in self.module.parameters())

    @cached_property
    def largest_unit(self) -> int:
        """The number of elements of the largest piece that ZeRO-3 gathers at once: a decoder layer, or one weight."""
        layers = decoder_layers(self.module)
        return max([self.largest, *(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers)])


def meta_models(spec: EngineSpec, kernel: bool = False) -> dict[str, MetaModel]:
    """{role: meta model} for each engine that `spec` asks for, in the order in which the engines are loaded. kernel: as
    for `with_packing`.

    Reads only the config.json of each model and the adapter_config.json of each adapter. Raises: UserError, with the
    role's flag and the path in its message, if one of these files is missing or cannot be read.
    """
    spec = replace(spec, attention=with_packing(spec.attention, spec.dtype, kernel))
    of_spec = partial(built, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code, attention=spec.attention)
    build: dict[str, Callable[[], MetaModel]] = {
        "actor": lambda: of_spec(
            "actor",
            spec.actor_path,
            LANGUAGE_MODEL,
            True,
            checkpointing=spec.actor_gradient_checkpointing,
            lora=spec.actor_lora,
            hydra_layers=spec.hydra_layers,
            also_computes=spec.also_computes.get("actor"),
        ),
        "critic": lambda: of_spec(
            "critic",
            spec.critic_path or spec.actor_path,
            CLASSIFIER,
            True,
            checkpointing=spec.critic_gradient_checkpointing,
            lora=spec.critic_lora,
            also_computes=spec.also_computes.get("critic"),
        ),
        "reference": lambda: of_spec("reference", spec.actor_path, LANGUAGE_MODEL, False),
    }
    build |= {role: partial(of_spec, role, path, CLASSIFIER, False) for role, path in spec.rewards.items()}
    if spec.share_trunk:
        build["actor"] = lambda: _trunk(spec)
    return {config.role: build[config.role]() for config in spec.engine_configs}


@lru_cache(maxsize=8)
def _trunk(spec: EngineSpec) -> MetaModel:
    """The meta model of the single engine that serves all roles."""
    assert spec.actor_lora is not None
    actor, critic, reward = (f"--{role}_model_name_or_path" for role in ("actor", "critic", "reward"))
    policy = module_on_meta(
        spec.actor_path, LANGUAGE_MODEL, spec.dtype, actor, spec.trust_remote_code, attention=spec.attention
    )
    assert isinstance(policy, Policy)
    policy.start = read_adapter(spec.actor_path, actor)
    scoring = scoring_roles(spec, actor, critic, reward, with_tokenizer=False)
    with torch.device("meta"):
        trunk = make_trunk(policy, spec.actor_lora, scoring)
        trunk.to(DTYPES[spec.dtype])
        trunk.split(policy.group)
    if spec.actor_gradient_checkpointing or spec.critic_gradient_checkpointing:
        trunk.checkpoint_activations()
    return MetaModel("actor", spec.actor_path, trunk, True)


@lru_cache(maxsize=32)
def built(
    role: str,
    path: str,
    kind: str,
    trained: bool,
    *,
    dtype: str,
    trust_remote_code: bool,
    checkpointing: bool = False,
    lora: LoraSpec | None = None,
    hydra_layers: int = 0,
    also_computes: str | None = None,
    attention: Attention = USUAL,
) -> MetaModel:
    """The meta model of one engine, for the model at `path`. kind: LANGUAGE_MODEL for a language model, CLASSIFIER for
    a scorer.

    lora, hydra_layers: as in EngineSpec. also_computes: the role of the frozen model that this engine also computes, or
    None. If `lora` is given, an adapter at `path` is trained further; otherwise the adapter is merged.
    Raises: UserError, as `meta_models` does.
    """
    flag = "--actor_model_name_or_path" if kind == LANGUAGE_MODEL else f"--{role.partition('_')[0]}_model_name_or_path"
    start = read_adapter(path, flag)
    module = module_on_meta(path, kind, dtype, flag, trust_remote_code, start if lora is None else None, attention)
    with torch.device("meta"):
        if hydra_layers:
            plain, module = module, HydraPolicy(module.model, layers=hydra_layers)
            module.pack(plain.packs)
            module.split(plain.group)
        if also_computes is not None and isinstance(module, Scorer):
            module.keep_head(also_computes)
        if lora is not None:
            module.start = start
            adapt(module, lora, role, also_computes)
            module.model.to(DTYPES[dtype])
    if checkpointing:
        module.checkpoint_activations()
    return MetaModel(role, path, module, trained)


def module_on_meta(
    path: str,
    kind: str,
    dtype: str,
    what: str,
    trust_remote_code: bool = False,
    merged: AdapterFolder | None = None,
    attention: Attention = USUAL,
) -> Policy | Scorer:
    """A Policy (kind LANGUAGE_MODEL) or Scorer (kind CLASSIFIER) with the configuration at `path`, on the meta device.

    what: the flag that gave the path, for messages. merged: an adapter that is merged into the model, or None. Raises:
    UserError if config.json is missing, or describes another kind of model.
    """
    config, _ = as_computed(_config(path, what, trust_remote_code))
    if kind == CLASSIFIER:
        config.num_labels = 1
    made = model_class(config, kind, path, what, trust_remote_code)
    if merged is not None and kind == LANGUAGE_MODEL and merged.changes_tied_head(config, made):
        config.tie_word_embeddings = False  # the loader does this too
    with torch.device("meta"):
        model = made._from_config(config, dtype=DTYPES[dtype], **attention.arguments_on_meta(made, config))
        module = Policy(model) if kind == LANGUAGE_MODEL else Scorer(model)
    module.pack(attention.packs_rows_of(model))
    module.split(MetaGroup(attention.ranks))
    return module


class MetaGroup(RankGroup):
    """Ranks that compute rows together, on the meta device. This rank is the first, and brings all rows."""

    def __init__(self, size: int):
        self.size, self.place = size, 0

    def all_objects(self, value: list) -> list:
        """As in RankGroup, where the other ranks have an empty list."""
        return [value] + [[]] * (self.size - 1)

    def all_to_all_single(self, tensor: torch.Tensor, given: list[int], taken: list[int]) -> torch.Tensor:
        """Allocates what RankGroup's allocates."""
        return tensor.contiguous().new_empty(sum(taken), *tensor.shape[1:])


def with_packing(attention: Attention, dtype: str, kernel: bool) -> Attention:
    """This attention with `packing` "packed" or "padded". For "auto" it is what a run chooses if its models take rows
    without padding. kernel: whether the machines have a kernel of torch for rows of various lengths (`Cluster`)."""
    if attention.packing != "auto":
        return attention
    own = attention.implementation in ("auto", "sdpa", "cudnn") and kernel and dtype != "fp32"
    packs = own or attention.implementation.startswith("flash")
    return replace(attention, packing="packed" if packs else "padded")


def _config(path: str, what: str, trust_remote_code: bool):
    try:
        return read_config(path, what, trust_remote_code)
    except UserError as error:
        raise UserError(
            f"{error} To plan memory, config.json is all that is needed of a model: put it into a folder, and give "
            "that."
        ) from None
