"""The specification of PPO's engines: the models and DeepSpeed configurations of the engines, and which models share an
engine."""

from dataclasses import dataclass, field, replace

from engine.models.attention import USUAL, Attention
from engine.models.lora import LoraSpec
from engine.models.model_paths import is_adapter, same_model
from engine.zero.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Adam's settings, the maximal gradient norm (0: no clipping) and the peak learning rate.

    form: "adamw", or "tf_adam" for TensorFlowAdam, which has no weight decay.
    decay: which weights `weight_decay` applies to: "matrices" (neither biases nor norms); "all", as in PyTorch's AdamW
        with all parameters in one group; "deepspeed_chat", all but those that
        engine.optim.NOT_DECAYED_BY_DEEPSPEED_CHAT names.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    form: str = "adamw"
    decay: str = "matrices"


def frozen_stage(partner: EngineConfig) -> int:
    """The ZeRO stage of a frozen model that is as large as the trained model `partner`: 3 if the partner is at stage 3,
    else 0."""
    return 3 if partner.stage == 3 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The models, their dtype, and their DeepSpeed configurations.

    critic_path: the folder of a reward model or critic from which the critic starts; None for the actor's model with a
        new head (`new_critic`).
    with_critic: whether there is a critic.
    reward_paths: the reward models' folders; empty if all scores come from other sources. None: `critic_path` alone.
    text_reward_paths: those of the reward models that read texts, not the actor's ids
        (`engine.models.checking.reads_texts`).
    hydra_layers: how many of the actor's last layers train. The reference is then a frozen copy of these layers in the
        actor's engine. With 0 all layers train, and there is no such copy.
    actor_lora, critic_lora: LoRA adapters that train in place of the model's own matrices; None trains the model
        itself.
    share_trunk: whether one frozen language model serves all roles; each role then has its own adapter and head.
    pad_token: the rule for the tokenizer's pad token (engine/models/config_and_tokenizer.py).
    chat_template: a file with the tokenizer's chat template, or None.
    trust_remote_code: whether code in the models' folders may run.
    attention: which implementation computes attention in all models, and the longest row, for models with longrope.
    reference, reward: the configurations of the frozen models; all reward models have the same. By default the
        reference is at stage 3 if the actor is at stage 3, and else at stage 0. In the same way the stage of the reward
        models follows the critic's, or the actor's if there is no critic.
    ema_decay: decay of the moving average of the actor; None for no average.
    ema_device: "cpu" keeps the moving average and a moving reference in host memory.
    reference_is_ema: whether the moving average is the reference.
    reference_refresh_steps: each time this number of PPO steps has passed, the reference becomes reference_mixup_alpha
        * actor + (1 - reference_mixup_alpha) * reference. None: the reference never changes.
    """

    actor_path: str
    critic_path: str | None
    reward_paths: tuple[str, ...] | None = None
    text_reward_paths: tuple[str, ...] = ()
    with_critic: bool = True
    hydra_layers: int = 0
    actor_lora: LoraSpec | None = None
    critic_lora: LoraSpec | None = None
    share_trunk: bool = False
    pad_token: str = "tokenizer"
    chat_template: str | None = None
    trust_remote_code: bool = False
    attention: Attention = USUAL
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
    reference_is_ema: bool = False
    reference_refresh_steps: int | None = None
    reference_mixup_alpha: float = 1.0

    def __post_init__(self):
        assert not self.reference_is_ema or (self.ema_decay is not None and self.reference_refresh_steps is None), (
            "the reference is the average, and there is none, or it is to be refreshed too"
        )
        assert self.reward_paths is not None or self.critic_path is not None, (
            "a reward model is wanted, and neither reward_paths nor critic_path says which"
        )
        assert self.with_critic or self.critic_path is None, f"critic_path {self.critic_path!r}, but no critic"
        assert not self.hydra_layers or self.actor_lora is None, "a hydra's last layers train whole"
        assert not self.share_trunk or (self.actor_lora is not None and self.actor_lora.only), (
            "one trunk trains factors"
        )
        for kind in ("reference", "reward"):
            assert getattr(self, kind) is None or self.has_engine(kind), (
                f"another model's engine computes the {kind}, which has none of its own"
            )

    @property
    def rewards(self) -> dict[str, str]:
        """Maps the role of each reward model ("reward", "reward_2", "reward_3", ...) to its folder."""
        paths = (self.critic_path,) if self.reward_paths is None else self.reward_paths
        return {f"reward_{number}" if number > 1 else "reward": str(path) for number, path in enumerate(paths, 1)}

    @property
    def reference_moves(self) -> bool:
        """Whether the reference follows the actor. A moving reference is a second set of weights in the actor's
        engine."""
        return self.reference_is_ema or self.reference_refresh_steps is not None

    @property
    def engine_of(self) -> dict[str, str]:
        """Maps the role of each frozen model without its own engine to the role of the trained model whose engine
        computes it."""
        only_factors = {
            role: lora is not None and lora.only
            for role, lora in (("actor", self.actor_lora), ("critic", self.critic_lora))
        }
        found = {}
        if self.share_trunk:
            return {"reference": "actor"} | dict.fromkeys(self.rewards, "actor")
        if self.hydra_layers or only_factors["actor"] or self.reference_moves:
            found["reference"] = "actor"
        start = self.critic_path if self.with_critic and only_factors["critic"] else None
        if start is not None:
            found |= {role: "critic" for role, path in self.rewards.items() if same_model(start, path)}
        return found

    @property
    def also_computes(self) -> dict[str, str]:
        """Maps the role of a trained model to the role of the frozen model that its module also computes. A moving
        reference is not included, because it is a second set of weights for the actor's module."""
        return {
            host: frozen
            for frozen, host in self.engine_of.items()
            if not (frozen == "reference" and self.reference_moves)
        }

    @property
    def shared(self) -> dict[str, str]:
        """Maps the role of each model without an engine of its own to a description of how it is computed."""
        if self.share_trunk:
            words = {
                "reference": self._moving_reference
                or "the reference is the actor with its adapter off, or the one that it began with",
                "critic": "the critic is the actor's trunk with an adapter and a head of its own",
            }
            words |= {
                role: f"{self._called(role)} is the actor's trunk with the adapter and the head that it came with"
                for role in self.rewards
            }
            return {role: words[role] for role in (*(["critic"] if self.with_critic else []), *self.engine_of)}
        words = {
            "reference": self._moving_reference
            or (
                "the reference is a few layers within the actor's engine"
                if self.hydra_layers
                else f"the reference is the actor with {_before(self.actor_path)}"
            ),
        }
        words |= {
            role: f"{self._called(role)} is the critic with {_before(self.critic_path)} and its first head"
            for role in self.rewards
        }
        return {role: words[role] for role in self.engine_of}

    def _called(self, role: str) -> str:
        """What messages call a reward model."""
        return "the reward model" if len(self.rewards) == 1 else f"the reward model {self.rewards[role]}"

    @property
    def _moving_reference(self) -> str | None:
        """A description of a reference that moves; None if it does not move."""
        if self.reference_is_ema:
            return "the reference is the moving average of the actor's weights, in their place while it computes"
        if self.reference_refresh_steps is None:
            return None
        return (
            f"the reference is the weights that the actor had at the latest refresh (every "
            f"{self.reference_refresh_steps} steps), in place of its own while it computes"
        )

    @property
    def engine_configs(self) -> list[EngineConfig]:
        """The configurations of all engines that are built: the actor's, and those of critic, reference and reward
        models as far as each has an engine of its own."""
        configs = [self.actor, *([self.critic] if self.with_critic and not self.share_trunk else [])]
        if "reference" not in self.engine_of:
            configs.append(self.reference or EngineConfig("reference", frozen_stage(self.actor)))
        partner = self.critic if self.with_critic else self.actor
        reward = self.reward or EngineConfig("reward", frozen_stage(partner))
        return configs + [replace(reward, role=role) for role in self.rewards if role not in self.engine_of]

    def has_engine(self, kind: str) -> bool:
        """Whether the reference, or one of the reward models ("reward"), has an engine of its own."""
        return any(config.role.partition("_")[0] == kind for config in self.engine_configs)


def _before(path: str | None) -> str:
    """Words for a message: the adapter that the model at `path` had before training, or that it had none."""
    return "the adapter that it began with" if path is not None and is_adapter(path) else "its adapters off"
