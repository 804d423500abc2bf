"""The flags that say which models there are, what scores responses, and how DeepSpeed runs each model."""

import math
from dataclasses import dataclass, replace

from engine.algorithms import Dialect
from engine.engine_spec import EngineSpec, OptimizerSpec, frozen_stage
from engine.errors import UserError
from engine.models.adapter_folders import read_adapter
from engine.models.lora import LoraSpec
from engine.zero.config import EngineConfig, build_ds_config, refuse_offload_of_roles, stage_of_file
from training.flags.arguments import REQUIRED, flag
from training.flags.lora_flags import LEARNING_RATE, RoleLoraFlags
from training.flags.reference_flags import MOVING, ReferenceFlags
from training.flags.reward_server_flags import RewardServerFlags


@dataclass(kw_only=True)
class ModelFlags(RoleLoraFlags, ReferenceFlags, RewardServerFlags):
    """The models of step 3, their adapters and their engines."""

    actor_model_name_or_path: str = flag(
        REQUIRED, "the SFT model that the actor and the reference start from", group="models"
    )
    critic_model_name_or_path: str | None = flag(
        None,
        "the reward model that the critic starts from; with --reward_function or --reward_url it may be left out, and "
        "the critic is then the SFT model with a new head; in dialects without such a critic it names the reward model "
        "alone",
    )
    reward_model_name_or_path: str | None = flag(
        None, "the reward model; by default the critic's path, or none with --reward_function or --reward_url"
    )
    actor_dropout: float | None = flag(None, "0, as it is anyway: responses are learned by the function that gave them")
    critic_dropout: float | None = flag(None, "0, as it is anyway")

    actor_zero_stage: int | None = flag(
        None, "ZeRO stage of the actor, and 3 or 0 of the reference (default 0)", group="engines"
    )
    critic_zero_stage: int | None = flag(None, "ZeRO stage of the critic, and 3 or 0 of the reward (default 0)")
    offload: bool = flag(False, "optimizer states (stage 3: parameters too) of actor and critic in host memory")
    offload_reference_model: bool = flag(False, "the reference in host memory while it is not used")
    offload_reward_model: bool = flag(False, "the reward model in host memory while it is not used")
    actor_ds_config: str | None = flag(None, "DeepSpeed JSON of the actor, instead of one of configs/ds")
    critic_ds_config: str | None = flag(None, "DeepSpeed JSON of the critic")
    reference_ds_config: str | None = flag(None, "DeepSpeed JSON of the reference")
    reward_ds_config: str | None = flag(None, "DeepSpeed JSON of the reward model")
    actor_gradient_checkpointing: bool = flag(False, "compute the actor's activations again in backward passes")
    critic_gradient_checkpointing: bool = flag(False, "compute the critic's activations again in backward passes")

    def validate(self) -> None:
        """Raise UserError for values that cannot work, alone or together."""
        RewardServerFlags.validate(self)
        self.validate_lora()
        self.validate_functions()
        self.validate_server()
        for role in ("actor", "critic"):
            self._trained(role).check_stage()
        self._validate_rewards(self.resolved_dialect()[0])
        for name in ("actor_dropout", "critic_dropout"):
            if getattr(self, name):
                raise UserError(
                    f"--{name} {getattr(self, name)}: PPO compares the probabilities that a response had "
                    "when it was sampled with those that it has now, and dropout would change them by "
                    "itself. Leave it out, or give 0."
                )
        self.validate_reference()
        for role in ("reference", "reward"):
            offload, path = f"offload_{role}_model", getattr(self, f"{role}_ds_config")
            EngineConfig(role, 0, getattr(self, offload), path).check_offload(f"--{offload}", trained=False)

    def _validate_rewards(self, dialect: Dialect) -> None:
        role = "critic" if dialect.critic_start == "reward_model" else "reward"
        given = self.critic_model_name_or_path if role == "critic" else self.reward_path
        if not self.other_rewards and given is None:
            raise UserError(
                f"--{role}_model_name_or_path is missing: give the reward model's folder, or a function of "
                "your own with --reward_function, or a server with --reward_url."
            )
        self._validate_weights()
        beside = "--reward_function" if self.reward_function else "--reward_url"
        if self.reward_path is None:
            for name in ("reward_ds_config", "offload_reward_model"):
                if getattr(self, name):
                    raise UserError(
                        f"--{name} is given, but there is no reward model beside {beside}. Name "
                        "one with --reward_model_name_or_path."
                    )
            if self.reward_weights and not any(self.reward_weights):
                said = " ".join(f"{weight:g}" for weight in self.reward_weights)
                raise UserError(f"--reward_weights {said}: every score would be 0. Give one that is not.")
            if self.reward_model_weight != 1.0:
                raise UserError(
                    f"--reward_model_weight {self.reward_model_weight}: there is no reward model beside "
                    f"{beside}. Name one with --reward_model_name_or_path."
                )

    def _validate_weights(self) -> None:
        weights, others = self.reward_weights, self.other_rewards
        if not weights:
            return
        said = f"--reward_weights {' '.join(f'{weight:g}' for weight in weights)}"
        if not others:
            raise UserError(
                f"{said} needs --reward_function or --reward_url. The reward model's weight is --reward_model_weight."
            )
        if len(weights) != len(others):
            parts = [*self.reward_function, *["the reward server"] * bool(self.reward_url)]
            raise UserError(
                f"{said}: {len(weights)} weights. They belong to {', '.join(parts)}, in this order: give {len(others)} "
                "or none. The reward model's weight is --reward_model_weight. To mix the reward model in by half, give "
                f"{self.half_by_model}."
            )
        if not all(map(math.isfinite, weights)):
            raise UserError(f"{said}: must be finite.")

    @property
    def half_by_model(self) -> str:
        """The flags by which the reward model is half of the score, and the other half what else scores."""
        model = self.reward_path or self.critic_model_name_or_path or "REWARD_MODEL"
        count = len(self.other_rewards)
        weights = " ".join([f"{0.5 / count:g}"] * count)
        return f"--reward_model_name_or_path {model} --reward_model_weight 0.5 --reward_weights {weights}"

    @property
    def reward_path(self) -> str | None:
        """The reward model's path; None where functions or a server alone give the scores."""
        if self.reward_model_name_or_path is not None or self.other_rewards:
            return self.reward_model_name_or_path
        return self.critic_model_name_or_path

    def stage(self, role: str) -> int:
        """The ZeRO stage of the actor or the critic."""
        given, path = getattr(self, f"{role}_zero_stage"), getattr(self, f"{role}_ds_config")
        if given is None and path is not None:
            given = stage_of_file(path, role)
        return given or 0

    def _trained(self, role: str) -> EngineConfig:
        return EngineConfig(role, self.stage(role), self.offload, getattr(self, f"{role}_ds_config"))

    def engine_spec(self, dialect: Dialect) -> EngineSpec:
        """Which engines are to be built; raises UserError where flags contradict the dialect or a DeepSpeed file."""
        self._check(dialect)

        def optimizer(lr: float, weight_decay: float) -> OptimizerSpec:
            return OptimizerSpec(
                lr=lr,
                betas=dialect.betas,
                eps=dialect.eps,
                weight_decay=weight_decay,
                max_grad_norm=dialect.max_grad_norm,
                form=dialect.optimizer,
                decay=dialect.decay,
            )

        def frozen(role: str, partner: EngineConfig, offload: bool) -> EngineConfig:
            path = getattr(self, f"{role}_ds_config")
            stage = stage_of_file(path, role) if path else None
            return EngineConfig(role, frozen_stage(partner) if stage is None else stage, offload, path)

        actor, critic = self._trained("actor"), self._trained("critic")
        scored = self.reward_path is not None
        spec = EngineSpec(
            actor_path=self.actor_model_name_or_path,
            with_critic=dialect.has_critic,
            critic_path=self.critic_model_name_or_path if dialect.critic_start == "reward_model" else None,
            reward_path=self.reward_path,
            with_reward_model=scored,
            hydra_layers=dialect.hydra_layers,
            actor_lora=self.lora("actor_"),
            critic_lora=self._critic_lora(dialect),
            share_trunk=self.share_trunk,
            pad_token=dialect.pad_token,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
            attention=self.attention,
            dtype=self.dtype,
            actor=actor,
            critic=critic,
            actor_optimizer=optimizer(dialect.actor_lr, dialect.actor_weight_decay),
            critic_optimizer=optimizer(dialect.critic_lr, dialect.critic_weight_decay),
            micro_batch_size=self.per_device_training_batch_size,
            actor_gradient_checkpointing=self.actor_gradient_checkpointing,
            critic_gradient_checkpointing=self.critic_gradient_checkpointing,
            ema_decay=dialect.ema_decay if self.keeps_average else None,
            ema_device=self.ema_device,
            reference_is_ema=self.reference == MOVING,
            reference_refresh_steps=self.reference_refresh_steps,
            reference_mixup_alpha=self.reference_mixup_alpha,
        )
        self._check_shared(spec, dialect)
        engines = {"reference": frozen("reference", actor, self.offload_reference_model)}
        if scored:
            partner = critic if dialect.has_critic else actor
            engines["reward"] = frozen("reward", partner, self.offload_reward_model)
        return replace(spec, **{role: config for role, config in engines.items() if role not in spec.hosts})

    def engine_configs(self, dialect: Dialect) -> dict[str, dict]:
        """Each engine's whole DeepSpeed configuration; raises UserError for a contradiction."""
        configs, choices = {}, self.engine_spec(dialect).engine_configs
        for config in choices:
            trained = config.role in ("actor", "critic")
            configs[config.role] = build_ds_config(
                config,
                dtype=self.dtype,
                micro_batch_size=self.per_device_training_batch_size,
                trained=trained,
                gradient_clipping=dialect.max_grad_norm if trained and not self.share_trunk else 0.0,  # by role
            )
        if self.share_trunk:
            refuse_offload_of_roles(configs["actor"])
        return configs

    def _check(self, dialect: Dialect) -> None:
        """Raise UserError for flags of models that this dialect does not have, and for offload of what has nothing."""
        for name in (
            "critic_zero_stage",
            "critic_ds_config",
            "critic_gradient_checkpointing",
            "critic_pretrain_steps",
            "critic_warmup_steps",
            "critic_lora_dim",
        ):
            if not dialect.has_critic and getattr(self, name):
                value = "" if getattr(self, name) is True else f" {getattr(self, name)}"
                raise UserError(f"--{name}{value}: the dialect {dialect.name} has no critic. Leave it out.")
        path = self.critic_model_name_or_path
        if dialect.critic_start != "reward_model" and path is not None and path != self.reward_path:
            start = "starts with a new head on the SFT model" if dialect.has_critic else "does not exist"
            add = f", or give --reward_model_name_or_path {path} to have it score, too" * (self.reward_path is None)
            raise UserError(
                f"--critic_model_name_or_path {path}: in the dialect {dialect.name} the critic {start}, and "
                f"the scores come from elsewhere. Leave it out{add}."
            )
        for role in ("actor", "critic") if dialect.has_critic else ("actor",):
            if role == "actor" or not self.share_trunk:
                self._trained(role).check_offload()
        if self.share_trunk and self.critic_ds_config is not None:
            raise UserError(
                f"--critic_ds_config {self.critic_ds_config} with --share_trunk: actor and critic are one engine, "
                "which has the actor's configuration. Leave it out, and give --actor_ds_config."
            )
        if self.share_trunk and self.critic_zero_stage not in (None, self.stage("actor")):
            raise UserError(
                f"--critic_zero_stage {self.critic_zero_stage} with --share_trunk: actor and critic are one engine, at "
                f"the actor's stage, {self.stage('actor')}. Leave it out."
            )
        self.check_rate("actor_", dialect.actor_lr)
        if dialect.has_critic:
            self.check_rate("critic_", dialect.critic_lr, "--share_trunk" if self.share_trunk else None)
        if dialect.hydra_layers and self.actor_lora_dim:
            raise UserError(
                f"--actor_lora_dim {self.actor_lora_dim} with hydra_layers {dialect.hydra_layers} (dialect "
                f"{dialect.name}): a hydra's last layers train whole. Leave it out, or set hydra_layers to 0."
            )

    def _critic_lora(self, dialect: Dialect) -> LoraSpec | None:
        """The critic's adapter; within a shared trunk it has one in any case, of its start's rank or the actor's."""
        given = self.lora("critic_")
        if given is not None or not self.share_trunk or not dialect.has_critic:
            return given
        actor, path = self.lora("actor_"), self.critic_model_name_or_path
        start = read_adapter(path, "--critic_model_name_or_path") if path is not None else None
        assert actor is not None, "validate_lora"
        starts_so = start is not None and dialect.critic_start == "reward_model"
        return replace(actor, lr=LEARNING_RATE, dim=start.config.r if start is not None and starts_so else actor.dim)

    def _check_shared(self, spec: EngineSpec, dialect: Dialect) -> None:
        """Raise UserError for flags of engines that do not exist, because another one plays their role."""
        for role, what in spec.shared.items():
            for name in (f"{role}_ds_config", f"offload_{role}_model"):
                if not getattr(self, name, None):
                    continue
                if role == "reference" and spec.reference_moves:
                    cause = next(f"{name} {value}" for name, value in self.moving_reference().items() if value)
                    remedy = f"train without {cause}"
                elif role == "reference" and spec.hydra_layers:
                    cause = f"hydra_layers {spec.hydra_layers} (dialect {dialect.name})"
                    remedy = "set hydra_layers to 0"
                else:
                    cause = "--share_trunk" if spec.share_trunk else "--only_optimize_lora"
                    remedy = f"train without {cause}"
                raise UserError(f"--{name} with {cause}: {what}. Leave it out, or {remedy}.")
