"""The engines of PPO: actor, critic, reference, and one for each reward model.

    models = RLHFEngine.from_pretrained(EngineSpec(actor_path="sft", critic_path="reward_model"))
    logprobs, _ = models.actor(sequences, attention_mask, position_ids, response_length=8)
    values = models.critic(sequences, attention_mask, position_ids)

With `EngineSpec.share_trunk` all models are in one engine (`shared_trunk`).
"""

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from engine import distributed
from engine.distributed import ALONE, RankGroup
from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.errors import UserError
from engine.host_memory import releasing_freed_memory
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.checking import (
    check_policy,
    check_rows,
    check_scorer,
    check_trunk,
    check_vocabularies,
    is_pretrained_critic,
)
from engine.models.config_and_tokenizer import classifier_pad_token_id, read_config, read_tokenizer
from engine.models.hydra import check_hydra, load_hydra
from engine.models.loading import DTYPES, check_padding, load_policy, load_scorer, new_critic
from engine.models.lora import LoraSpec, adapt
from engine.models.model_paths import base_of, is_adapter, same_model
from engine.models.policy import Policy, Scorer
from engine.models.trunk import ScoringRole, make_trunk, owner
from engine.optim import build_optimizer, optimizer_groups, optimizer_of
from engine.reference import EMA, MovingReference, Reference
from engine.reward.base import RewardModel
from engine.zero.communication import init
from engine.zero.config import EngineConfig, build_ds_config, refuse_offload_of_roles
from engine.zero.engines import FrozenModel, FrozenRole, TrainedModel
from engine.zero.shared_engine import SharedEngine, TrainedRole

FIELDS = {"actor": "actor_path", "critic": "critic_path", "reward": "reward_paths"}  # of an EngineSpec


def check_roles(
    spec: EngineSpec, names: Mapping[str, str] = FIELDS, looks_at: Callable[[str], bool] = lambda path: True
):
    """Check that the models are of the kinds that their roles need, and fit each other. No weights are loaded. Returns
    the actor's tokenizer, or None if the actor is not looked at.

    names: {role: what messages call its path}. looks_at: a function that says whether a path is looked at.

    Raises: UserError if a model is not of its role's kind (`check_policy`, `check_scorer`, `check_trunk`), the reward
    model is a pretrained critic, or vocabularies differ.
    """
    path = spec.actor_path
    what = names["actor"]
    trusted = spec.trust_remote_code
    tokenizer = None
    if looks_at(path):
        tokenizer = read_tokenizer(path, what, spec.pad_token, trusted, spec.chat_template)
        check_rows(tokenizer, check_policy(path, what, trusted), path, what)
        if spec.hydra_layers:
            check_hydra(path, spec.hydra_layers, what, trusted)
        if spec.with_critic and spec.critic_path is None:
            check_trunk(path, what, trusted)
    rewards = spec.rewards.values()
    scorers = dict.fromkeys(rewards, names["reward"])
    if spec.critic_path is not None:
        scorers[spec.critic_path] = names["critic"]
    for scorer, what in scorers.items():
        if not looks_at(scorer):
            continue
        check_scorer(scorer, what, trusted)
        if scorer in rewards and is_pretrained_critic(scorer):
            raise UserError(
                f"{what}: {scorer} is a pretrained critic, whose numbers say what is still to come of a text; it gives "
                "no scores. Name the reward model too: --reward_model_name_or_path, or reward_paths in Python."
            )
        if tokenizer is not None and (scorer == spec.critic_path or scorer not in spec.text_reward_paths):
            check_vocabularies(tokenizer, scorer, what, trusted)
    return tokenizer


def shared_trunk(spec: EngineSpec) -> SharedEngine:
    """One engine for all models (`EngineSpec.share_trunk`): actor and critic learn in it, reference and reward model
    compute in it.

    The engine has the actor's DeepSpeed configuration, and the actor's form of Adam, betas and epsilon. Each role has
    its own learning rate, weight decay and clipping.

    Raises: UserError if the models are not adapters on the same base model.
    """
    assert spec.actor_lora is not None
    ds_config = build_ds_config(spec.actor, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size)
    refuse_offload_of_roles(ds_config)
    scoring = scoring_roles(spec)
    policy = _loaded(partial(load_policy, merge=False), spec.actor_path, ds_config, spec.actor, spec)
    assert isinstance(policy, Policy)
    trunk = make_trunk(policy, spec.actor_lora, scoring)
    if spec.actor_gradient_checkpointing or spec.critic_gradient_checkpointing:
        trunk.checkpoint_activations()
    settings = {"actor": (spec.actor_optimizer, spec.actor_lora)}
    if spec.critic_lora is not None and "critic" in scoring:
        settings["critic"] = (spec.critic_optimizer, spec.critic_lora)
    trained = {name: parameter for name, parameter in trunk.named_parameters() if parameter.requires_grad}
    groups = []
    for role, (optimizer, lora) in settings.items():
        own = {name: parameter for name, parameter in trained.items() if owner(name) == role}
        groups += [{**group, "role": role} for group in optimizer_groups(own, optimizer, lora.lr)]
    adam = optimizer_of(groups, spec.actor_optimizer, offload=False)
    limits = {role: optimizer.max_grad_norm for role, (optimizer, _) in settings.items()}
    model = SharedEngine(trunk, ds_config, adam, limits)
    _probe(model)
    return model


def scoring_roles(
    spec: EngineSpec,
    actor_flag: str = "actor",
    critic_flag: str = "critic",
    reward_flag: str = "reward",
    with_tokenizer: bool = True,
) -> dict[str, ScoringRole]:
    """Returns {"critic": role, "reward": role, "reward_2": role, ...}. A role says how the critic or a reward model
    computes on the actor's base model. A model that the spec does not have is left out. No weights are read.

    actor_flag, critic_flag, reward_flag: what messages call the models. with_tokenizer: whether the pad token of a new
    critic is read from the actor's tokenizer. Raises: UserError if a model is not an adapter on the actor's base model.
    """
    found, pad = {}, None
    if with_tokenizer:
        tokenizer = read_tokenizer(spec.actor_path, "actor", trust_remote_code=spec.trust_remote_code)
        pad = classifier_pad_token_id(tokenizer)
    if spec.with_critic:
        start = _on_base(spec, actor_flag, spec.critic_path, critic_flag) if spec.critic_path is not None else None
        found["critic"] = ScoringRole(config=_score_config(spec, start, pad), start=start, lora=spec.critic_lora)
    for role, path in spec.rewards.items():
        start = _on_base(spec, actor_flag, path, critic_flag if spec.reward_paths is None else reward_flag)
        found[role] = ScoringRole(config=_score_config(spec, start, pad), start=start)
    return found


def _on_base(spec: EngineSpec, actor_flag: str, path: str, flag: str) -> AdapterFolder:
    """The adapter at `path`; raises UserError unless its base model is the actor's."""
    adapter, base = read_adapter(path, flag), base_of(spec.actor_path, actor_flag)
    if adapter is not None and same_model(adapter.base, base):
        return adapter
    kind = f"an adapter on {adapter.base}" if adapter is not None else "a whole model"
    if adapter is None and is_adapter(f"{path}/adapter"):
        kind += f" (its adapter is in {path}/adapter)"
    own = "" if base == spec.actor_path else f", an adapter on {base}"
    raise UserError(
        f"--share_trunk: {flag} {path} is {kind}, and {actor_flag} is {spec.actor_path}{own}. One trunk serves models "
        "that are adapters on one base: train the reward model with --lora_dim and --only_optimize_lora on the actor's "
        "base, or leave --share_trunk out."
    )


def _score_config(spec: EngineSpec, start: AdapterFolder | None, pad: int | None):
    """The configuration of a classifier on the actor's base model, with the settings of the adapter `start`; if `start`
    is None, with those of a new critic."""
    config = copy.deepcopy(read_config(spec.actor_path, "actor", spec.trust_remote_code))
    settings = {"num_labels": 1, "score_offset": 0.0, "score_position": "last", "pad_token_id": pad}
    for name, value in (settings | (start.settings() if start is not None else {})).items():
        setattr(config, name, value)
    return config


class RLHFEngine:
    """The models of PPO.

    actor, critic: the trained models; critic may be None.
    reference: the frozen model that the actor is kept close to. rewards: the frozen reward models, in the order of
        `EngineSpec.rewards`; empty if there are none.
    ema: the moving average of the actor, or None.
    tokenizer: the actor's tokenizer. saved_tokenizer: the same with its own pad token, to be saved with models.
    group: the ranks that compute rows together with this one (engine/models/sequence_parallel.py).
    """

    def __init__(
        self,
        *,
        actor: TrainedModel | TrainedRole,
        critic: TrainedModel | TrainedRole | None,
        reference: Reference,
        rewards: Sequence[RewardModel],
        ema: EMA | None,
        tokenizer,
        saved_tokenizer=None,
        group: RankGroup = ALONE,
    ):
        self.actor, self.critic = actor, critic
        self.reference, self.rewards = reference, list(rewards)
        self.ema = ema
        self.tokenizer = tokenizer
        self.saved_tokenizer = saved_tokenizer or tokenizer
        self.group = group
        for engine in self.engines:
            engine.module.split(group)

    @property
    def engines(self) -> list[TrainedModel | FrozenModel]:
        """All DeepSpeed engines, each once. Several models may share an engine."""
        hosts = dict.fromkeys(model.host for model in self.trained.values())
        return [*hosts, *self.reference.models, *(model for reward in self.rewards for model in reward.models)]

    @property
    def trained(self) -> dict[str, TrainedModel | TrainedRole]:
        """{role: trained model}."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @property
    def kept_reference(self) -> EMA | None:
        """The weights of a reference that is refreshed from the actor. A checkpoint has to save them. None for other
        references."""
        return self.reference.kept if isinstance(self.reference, MovingReference) else None

    @property
    def packs(self) -> bool:
        """Whether rows go through all models without padding."""
        return all(engine.module.packs for engine in self.engines)

    def destroy(self) -> None:
        """Release the memory of all models, which cannot be used afterwards. Without this call hooks of DeepSpeed keep
        weights and optimizer states in memory until the process ends; at stage 3 it keeps the partitions anyway."""
        for engine in self.engines:
            engine.ds_engine.destroy()

    @classmethod
    def from_pretrained(cls, spec: EngineSpec) -> "RLHFEngine":
        """Load the models and build their engines. Joins the process group if this process has not joined it yet.

        Raises: UserError in the cases of `check_roles` before a model is loaded, and if weights are unfit.
        """
        init()
        tokenizer = check_roles(spec)
        trained: Mapping[str, TrainedModel | TrainedRole]
        trained = shared_trunk(spec).roles if spec.share_trunk else _trained_models(spec)
        reference: Reference | None = None
        if not spec.reference_moves:
            reference = Reference(_frozen("reference", load_policy, spec.actor_path, spec, trained))
        rewards = [RewardModel(_frozen(role, load_scorer, path, spec, trained)) for role, path in spec.rewards.items()]
        ema = EMA(trained["actor"], spec.ema_decay, spec.ema_device) if spec.ema_decay is not None else None
        return cls(
            actor=trained["actor"],
            critic=trained.get("critic"),
            reference=reference or _moving_reference(spec, trained["actor"], ema),
            rewards=rewards,
            tokenizer=tokenizer,
            saved_tokenizer=read_tokenizer(
                spec.actor_path, "actor", trust_remote_code=spec.trust_remote_code, chat_template=spec.chat_template
            ),
            ema=ema,
            group=RankGroup(spec.attention.ranks),
        )


def _moving_reference(spec: EngineSpec, actor: TrainedModel | TrainedRole, ema: EMA | None) -> MovingReference:
    """A reference that follows the actor: the moving average, or weights that are refreshed from the actor's."""
    if spec.reference_refresh_steps is None:
        assert ema is not None, "EngineSpec sees to it"
        return MovingReference(ema)
    kept = EMA(actor, 1.0 - spec.reference_mixup_alpha, spec.ema_device, name="reference")
    return MovingReference(kept, spec.reference_refresh_steps)


def _trained_models(spec: EngineSpec) -> Mapping[str, TrainedModel | TrainedRole]:
    """Builds the actor and, if the spec has one, the critic, each in its own engine; returns {role: trained model}."""
    load = partial(load_hydra, layers=spec.hydra_layers) if spec.hydra_layers else load_policy
    actor = trained_model(
        load,
        spec.actor_path,
        spec.actor,
        spec.actor_optimizer,
        spec,
        spec.actor_gradient_checkpointing,
        spec.actor_lora,
    )
    return {"actor": actor} | ({"critic": critic_model(spec)} if spec.with_critic else {})


def critic_model(spec: EngineSpec) -> TrainedModel:
    """The critic, loaded from its path; without a path, the actor's model with a new head."""
    load, path = (new_critic, spec.actor_path) if spec.critic_path is None else (load_scorer, spec.critic_path)
    kept = next((role for role in spec.rewards if spec.engine_of.get(role) == "critic"), None)
    if kept is not None:
        load = partial(_load_with_kept_head, role=kept)
    return trained_model(
        load, path, spec.critic, spec.critic_optimizer, spec, spec.critic_gradient_checkpointing, spec.critic_lora
    )


def trained_model(
    load,
    path: str,
    config: EngineConfig,
    optimizer: OptimizerSpec,
    spec: EngineSpec,
    gradient_checkpointing: bool = False,
    lora: LoraSpec | None = None,
) -> TrainedModel:
    """The module that `load` loads from `path`, in an engine with an optimizer. load: `load_policy`, `load_scorer` or a
    similar function."""
    ds_config = build_ds_config(
        config, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size, gradient_clipping=optimizer.max_grad_norm
    )
    if lora is not None:
        load = partial(load, merge=False)  # training goes on with an adapter
    module = _loaded(load, path, ds_config, config, spec)
    frozen = spec.also_computes.get(config.role)
    return wrap_trained(module, ds_config, config, optimizer, gradient_checkpointing, lora, frozen)


@releasing_freed_memory()
def wrap_trained(
    module: Policy | Scorer,
    ds_config: dict,
    config: EngineConfig,
    optimizer: OptimizerSpec,
    gradient_checkpointing: bool = False,
    lora: LoraSpec | None = None,
    frozen_role: str | None = None,
) -> TrainedModel:
    """A module in an engine with an optimizer. The module must have been loaded with the same `ds_config`.

    lora: the module's adapter, or None. frozen_role: as in `adapt`.
    """
    if lora is not None:
        adapt(module, lora, config.role, frozen_role)
    if gradient_checkpointing:
        module.checkpoint_activations()
    offload = "offload_optimizer" in ds_config["zero_optimization"]
    adam = build_optimizer(module, optimizer, offload, lora.lr if lora is not None else None)
    model = TrainedModel(module, ds_config, adam, config.role)
    _probe(model)
    return model


def _load_with_kept_head(*args, role: str, **kwargs) -> Scorer:
    """The Scorer that `load_scorer` loads, with a second, frozen head for the reward model of this role."""
    scorer = load_scorer(*args, **kwargs)
    scorer.keep_head(role)
    return scorer


def _frozen(
    role: str, load, path: str, spec: EngineSpec, trained: Mapping[str, TrainedModel | TrainedRole]
) -> FrozenModel | FrozenRole:
    """The frozen model with this role. If the spec puts it into a trained model's engine, that engine computes it;
    otherwise it is loaded from `path` into an engine of its own."""
    if role in spec.engine_of:
        return FrozenRole(trained[spec.engine_of[role]].host, role)
    config = next(config for config in spec.engine_configs if config.role == role)
    return frozen_model(load, path, config, spec)


@releasing_freed_memory()
def frozen_model(load, path: str, config: EngineConfig, spec: EngineSpec) -> FrozenModel:
    """The module that `load` loads from `path`, in an engine without an optimizer."""
    ds_config = build_ds_config(config, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size, trained=False)
    module = _loaded(load, path, ds_config, config, spec)
    model = FrozenModel(module, ds_config, config.offload, config.role)
    _probe(model)
    return model


def _loaded(load, path: str, ds_config: dict, config: EngineConfig, spec: EngineSpec) -> Policy | Scorer:
    return load(
        path,
        DTYPES[spec.dtype],
        ds_config,
        what=f"{config.role} model",
        trust_remote_code=spec.trust_remote_code,
        attention=spec.attention,
    )


def _probe(model: TrainedModel | FrozenModel) -> None:
    """Try a model in its engine. In this trial a Policy finds out whether its logits are the unchanged output of its
    head. Raises: UserError if the model attends to padding, or cannot compute packed rows although it has to."""
    if isinstance(model.module, Policy):
        vocabulary = model.module.model.config.get_text_config().vocab_size
        tokens = (torch.arange(8, device=distributed.device()) * 7919 % vocabulary).unsqueeze(0)
        with torch.no_grad(), model.on_device():
            model(tokens, probe=True)
    with model.on_device():
        check_padding(model.module, model, f"{model.role} model")
    gc.collect(1)  # free the loader's full copy of the weights before the next model loads; skip generation 2
