"""One engine for all models of PPO: `EngineSpec.share_trunk`."""

import copy

from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.loading import DTYPES, load_policy
from engine.models.places import base_of, same_model
from engine.models.reading import classifier_pad_token_id, read_config, read_tokenizer
from engine.models.trunk import ScoringRole, make_trunk, owner
from engine.optim import optimizer_groups, optimizer_of
from engine.zero.config import build_ds_config, refuse_offload_of_roles
from engine.zero.roles import SharedModel


def shared_trunk(spec: EngineSpec) -> SharedModel:
    """The engine in which the actor, and the critic if there is one, learn, and reference and reward model compute.

    It runs under the actor's DeepSpeed configuration. Adam's form, betas and epsilon are the actor's too; learning
    rates, weight decay and clipping are each role's own.

    Raises: UserError for models that share no base.
    """
    assert spec.actor_lora is not None
    ds_config = build_ds_config(spec.actor, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size)
    refuse_offload_of_roles(ds_config)
    scoring = scoring_roles(spec)
    policy = load_policy(
        spec.actor_path,
        DTYPES[spec.dtype],
        ds_config,
        what="actor model",
        trust_remote_code=spec.trust_remote_code,
        merge=False,
        attention=spec.attention,
    )
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
        found = optimizer_groups(own, optimizer.lr, optimizer.weight_decay, optimizer.form, optimizer.decay, lora.lr)
        groups += [{**group, "role": role} for group in found]
    adam = spec.actor_optimizer
    return SharedModel(
        trunk,
        ds_config,
        optimizer_of(groups, adam.lr, adam.betas, adam.eps, False, adam.form),
        {role: optimizer.max_grad_norm for role, (optimizer, _) in settings.items()},
    )


def scoring_roles(
    spec: EngineSpec,
    actor_flag: str = "actor",
    critic_flag: str = "critic",
    reward_flag: str = "reward",
    with_tokenizer: bool = True,
) -> dict[str, ScoringRole]:
    """What "critic" and "reward" are to be on the actor's base, as far as there are such; no weights are read.

    The flags name the models in messages. with_tokenizer: whether the actor's is asked for the pad token of a new
    critic. Raises: UserError for a model that is no adapter on that base.
    """
    found, pad = {}, None
    if with_tokenizer:
        tokenizer = read_tokenizer(spec.actor_path, "actor", trust_remote_code=spec.trust_remote_code)
        pad = classifier_pad_token_id(tokenizer)
    if spec.with_critic:
        start = _on_base(spec, actor_flag, spec.critic_path, critic_flag) if spec.critic_path is not None else None
        found["critic"] = ScoringRole(config=_score_config(spec, start, pad), start=start, lora=spec.critic_lora)
    path = spec.reward_path or spec.critic_path
    if spec.with_reward_model and path is not None:
        start = _on_base(spec, actor_flag, path, critic_flag if spec.reward_path is None else reward_flag)
        found["reward"] = ScoringRole(config=_score_config(spec, start, pad), start=start)
    return found


def _on_base(spec: EngineSpec, actor_flag: str, path: str, flag: str) -> AdapterFolder:
    """The adapter at `path`; raises UserError unless it is one on the actor's base."""
    adapter, base = read_adapter(path, flag), base_of(spec.actor_path, actor_flag)
    if adapter is not None and same_model(adapter.base, base):
        return adapter
    kind = f"an adapter on {adapter.base}" if adapter is not None else "a whole model"
    own = "" if base == spec.actor_path else f", an adapter on {base}"
    raise UserError(
        f"--share_trunk: {flag} {path} is {kind}, and {actor_flag} is {spec.actor_path}{own}. One trunk serves models "
        "that are adapters on one base: train the reward model with --lora_dim and --only_optimize_lora on the actor's "
        "base, or leave --share_trunk out."
    )


def _score_config(spec: EngineSpec, start: AdapterFolder | None, pad: int | None):
    """The configuration of a classifier on the actor's base: with its start's settings, or those of a new critic."""
    config = copy.deepcopy(read_config(spec.actor_path, "actor", spec.trust_remote_code))
    settings = {"num_labels": 1, "score_offset": 0.0, "score_position": "last", "pad_token_id": pad}
    for name, value in (settings | (start.settings() if start is not None else {})).items():
        setattr(config, name, value)
    return config
