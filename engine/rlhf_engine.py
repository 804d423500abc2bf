"""The four engines of PPO: actor, critic, reference, reward.

models = RLHFEngine.from_pretrained(EngineSpec(actor_path="sft", critic_path="reward_model"))
logprobs, _ = models.actor(sequences, attention_mask, position_ids, response_length=8)
values = models.critic(sequences, attention_mask, position_ids)
"""

import gc
from dataclasses import dataclass, field
from functools import partial

import torch

from engine import distributed
from engine.ema import EMA
from engine.models.hydra import check_hydra, load_hydra
from engine.models.loading import DTYPES, load_policy, load_scorer, new_critic
from engine.models.lora import LoraSpec, adapt
from engine.models.policy import Policy
from engine.models.reading import read_tokenizer
from engine.models.scorer import Scorer
from engine.optim import build_optimizer
from engine.reference import EngineReference, HydraReference, Reference
from engine.reward.model import RewardModel
from engine.zero.communication import init
from engine.zero.config import EngineConfig, build_ds_config
from engine.zero.engines import FrozenModel, TrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Adam's settings, the maximal gradient norm (0: no clipping) and the peak learning rate.

    form, decay: as `build_optimizer` has them.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    form: str = "adamw"
    decay: str = "matrices"


def frozen_stage(partner: EngineConfig) -> int:
    """The ZeRO stage of a frozen model that is as large as a trained one: 3 where that one is at 3, else 0."""
    return 3 if partner.stage == 3 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Which models, in which precision, under which DeepSpeed configurations.

    critic_path: a reward model or critic; None for the actor's model with a new head (`new_critic`). with_critic: False
    where none is to be built. reward_path: the critic's path unless given. with_reward_model: False where scores come
    from elsewhere, and no such model is loaded. hydra_layers: how many of the actor's last layers train; the reference
    is then copies of those in the actor's engine. 0: all train, and the reference is an engine of its own.
    actor_lora, critic_lora: adapters that train instead of matrices, or None. share_trunk: one model for all roles.
    pad_token: the rule for the tokenizer's pad token (engine/models/pad_tokens.py). trust_remote_code: whether code in
    the models' folders may run.
    reference, reward: stage 3 where the actor (the critic, if there is one) is at stage 3, else 0, unless given.
    ema_decay: None for no average; ema_device: "cpu" keeps it in host memory.
    """

    actor_path: str
    critic_path: str | None
    reward_path: str | None = None
    with_critic: bool = True
    with_reward_model: bool = True
    hydra_layers: int = 0
    actor_lora: LoraSpec | None = None
    critic_lora: LoraSpec | None = None
    share_trunk: bool = False
    pad_token: str = "tokenizer"
    trust_remote_code: bool = False
    dtype: str = "fp32"
    actor: EngineConfig = field(default_factory=lambda: EngineConfig("actor", 0))
    critic: EngineConfig = field(default_factory=lambda: EngineConfig("critic", 0))
    reference: EngineConfig | None = None
    reward: EngineConfig | None = None
    actor_optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    critic_optimizer: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1e-5))
    micro_batch_size: int = 8
    actor_gradient_checkpointing: bool = False
    critic_gradient_checkpointing: bool = False
    ema_decay: float | None = None
    ema_device: str | None = None

    def __post_init__(self):
        assert not self.with_reward_model or self.reward_path is not None or self.critic_path is not None, (
            "a reward model is wanted, and neither reward_path nor critic_path says which"
        )
        assert self.with_critic or self.critic_path is None, f"critic_path {self.critic_path!r}, but no critic"
        assert not self.hydra_layers or self.reference is None, "a hydra's reference has no engine of its own"

    @property
    def engine_configs(self) -> list[EngineConfig]:
        """Of each engine that is built: the actor's, and if there are any the critic's, reference's, reward model's."""
        configs = [self.actor, *([self.critic] if self.with_critic else [])]
        if not self.hydra_layers:
            configs.append(self.reference or EngineConfig("reference", frozen_stage(self.actor)))
        if self.with_reward_model:
            partner = self.critic if self.with_critic else self.actor
            configs.append(self.reward or EngineConfig("reward", frozen_stage(partner)))
        return configs


class RLHFEngine:
    """actor and critic (trained; critic may be None), reference and reward (frozen; reward may be None), ema (or None),
    and the actor's tokenizer."""

    def __init__(
        self,
        *,
        actor: TrainedModel,
        critic: TrainedModel | None,
        reference: Reference,
        reward: RewardModel | None,
        ema: EMA | None,
        tokenizer,
    ):
        self.actor, self.critic = actor, critic
        self.reference, self.reward = reference, reward
        self.ema, self.tokenizer = ema, tokenizer

    @property
    def engines(self) -> list[TrainedModel | FrozenModel]:
        """All engines that there are."""
        return [*self.trained.values(), *self.reference.models, *([self.reward.model] if self.reward else [])]

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """Those that learn, by role."""
        return {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})

    @classmethod
    def from_pretrained(cls, spec: EngineSpec) -> "RLHFEngine":
        """Load the models and wrap each in an engine; joins the process group if that has not been done."""
        init()
        tokenizer = read_tokenizer(spec.actor_path, "actor", spec.pad_token, spec.trust_remote_code)
        if spec.hydra_layers:
            check_hydra(spec.actor_path, spec.hydra_layers, "actor", spec.trust_remote_code)
        configs = {config.role: config for config in spec.engine_configs}
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
        critic = critic_model(spec) if spec.with_critic else None
        reference = (
            HydraReference(actor)
            if spec.hydra_layers
            else EngineReference(frozen_model(load_policy, spec.actor_path, configs["reference"], spec))
        )
        reward, reward_path = None, spec.reward_path or spec.critic_path
        if spec.with_reward_model and reward_path is not None:
            reward = RewardModel(frozen_model(load_scorer, reward_path, configs["reward"], spec))
        return cls(
            actor=actor,
            critic=critic,
            reference=reference,
            reward=reward,
            tokenizer=tokenizer,
            ema=EMA(actor, spec.ema_decay, spec.ema_device) if spec.ema_decay is not None else None,
        )


def critic_model(spec: EngineSpec) -> TrainedModel:
    """The critic: what stands at its path, or else the actor's model with a new head."""
    load, path = (new_critic, spec.actor_path) if spec.critic_path is None else (load_scorer, spec.critic_path)
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
    """An engine with an optimizer around what `load` (`load_policy`, `load_scorer`, or alike) makes of `path`."""
    ds_config = build_ds_config(
        config, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size, gradient_clipping=optimizer.max_grad_norm
    )
    module = _loaded(load, path, ds_config, config, spec)
    return wrap_trained(module, ds_config, config, optimizer, gradient_checkpointing, lora)


def wrap_trained(
    module: Policy | Scorer,
    ds_config: dict,
    config: EngineConfig,
    optimizer: OptimizerSpec,
    gradient_checkpointing: bool = False,
    lora: LoraSpec | None = None,
) -> TrainedModel:
    """An engine with an optimizer around a module that was loaded under the same `ds_config`, with `lora` adapted."""
    if lora is not None:
        adapt(module, lora, config.role)
    if gradient_checkpointing:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    offload = "offload_optimizer" in ds_config["zero_optimization"]
    adam = build_optimizer(
        module,
        optimizer.lr,
        optimizer.betas,
        optimizer.eps,
        optimizer.weight_decay,
        offload,
        optimizer.form,
        optimizer.decay,
        lora.lr if lora is not None else None,
    )
    model = TrainedModel(module, ds_config, adam, config.role)
    _probe(model)
    return model


def frozen_model(load, path: str, config: EngineConfig, spec: EngineSpec) -> FrozenModel:
    """An engine without optimizer around what `load` makes of `path`."""
    ds_config = build_ds_config(config, dtype=spec.dtype, micro_batch_size=spec.micro_batch_size, trained=False)
    module = _loaded(load, path, ds_config, config, spec)
    model = FrozenModel(module, ds_config, config.offload, config.role)
    _probe(model)
    return model


def _loaded(load, path: str, ds_config: dict, config: EngineConfig, spec: EngineSpec) -> Policy | Scorer:
    return load(
        path, DTYPES[spec.dtype], ds_config, what=f"{config.role} model", trust_remote_code=spec.trust_remote_code
    )


def _probe(model: TrainedModel | FrozenModel) -> None:
    """Let a Policy find out, within its engine, whether its head's output is all there is to its logits."""
    if isinstance(model.module, Policy):
        vocabulary = model.module.model.config.get_text_config().vocab_size
        tokens = (torch.arange(8, device=distributed.device()) * 7919 % vocabulary).unsqueeze(0)
        with torch.no_grad(), model.on_device():
            model(tokens, probe=True)
    gc.collect(1)  # the loader's full copy of the weights goes before the next model comes; old objects are left out
