"""One engine for all models of PPO: `--share_trunk`."""

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.models.loading import DTYPES, load_policy
from engine.models.reading import read_config, read_tokenizer
from engine.models.trunk import make_trunk, owner
from engine.optim import optimizer_groups, optimizer_of
from engine.zero.config import build_ds_config
from engine.zero.roles import SharedModel


def shared_trunk(spec: EngineSpec) -> SharedModel:
    """The engine in which the actor, and the critic if there is one, learn, and reference and reward model compute.

    It runs under the actor's DeepSpeed configuration. Adam's form, betas and epsilon are the actor's too; learning
    rates, weight decay and clipping are each role's own.
    """
    assert spec.actor_lora is not None
    ds_config = build_ds_config(spec.actor, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size)
    policy = load_policy(
        spec.actor_path,
        DTYPES[spec.dtype],
        ds_config,
        what="actor model",
        trust_remote_code=spec.trust_remote_code,
    )
    config = read_config(spec.actor_path, "actor model", spec.trust_remote_code)
    tokenizer = read_tokenizer(spec.actor_path, "actor model", trust_remote_code=spec.trust_remote_code)
    config.num_labels, config.score_offset, config.score_position = 1, 0.0, "last"
    config.pad_token_id = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    critic = (spec.critic_lora or spec.actor_lora) if spec.with_critic else None
    trunk = make_trunk(policy, config, actor=spec.actor_lora, critic=critic)
    if spec.actor_gradient_checkpointing or spec.critic_gradient_checkpointing:
        trunk.model.gradient_checkpointing_enable({"use_reentrant": False})
    settings = {"actor": (spec.actor_optimizer, spec.actor_lora)}
    if critic is not None:
        settings["critic"] = (spec.critic_optimizer, critic)
    groups = []
    for role, (optimizer, lora) in settings.items():
        own = {name: p for name, p in trunk.named_parameters() if p.requires_grad and owner(name) == role}
        groups += [{**group, "role": role} for group in _groups(own, optimizer, lora.lr)]
    shared, lr = spec.actor_optimizer, spec.actor_optimizer.lr
    offload = "offload_optimizer" in ds_config["zero_optimization"]
    adam = optimizer_of(groups, lr, shared.betas, shared.eps, offload, shared.form)
    return SharedModel(
        trunk, ds_config, adam, {role: optimizer.max_grad_norm for role, (optimizer, _) in settings.items()}
    )


def _groups(parameters: dict, optimizer: OptimizerSpec, lora_lr: float) -> list[dict]:
    return optimizer_groups(parameters, optimizer.lr, optimizer.weight_decay, optimizer.form, optimizer.decay, lora_lr)
