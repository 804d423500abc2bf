"""Which engines the flags and the dialect of step 3 amount to."""

from engine.algorithms import Dialect
from engine.errors import UserError
from engine.rlhf_engine import EngineSpec, OptimizerSpec
from engine.zero.config import EngineConfig, build_ds_config, stage_of_file


def engine_spec(args, dialect: Dialect) -> EngineSpec:
    """Which engines are to be built, from RLHFFlags.

    Raises: UserError where flags contradict the dialect or a DeepSpeed file.
    """
    _check(args, dialect)

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

    def frozen(role: str, partner: str, offload: bool) -> EngineConfig:
        path = getattr(args, f"{role}_ds_config")
        stage = stage_of_file(path, role) if path else None
        return EngineConfig(role, stage if stage is not None else 3 if args.stage(partner) == 3 else 0, offload, path)

    scored = args.reward_path is not None
    return EngineSpec(
        actor_path=args.actor_model_name_or_path,
        with_critic=dialect.has_critic,
        critic_path=args.critic_model_name_or_path if dialect.critic_start == "reward_model" else None,
        reward_path=args.reward_path,
        with_reward_model=scored,
        hydra_layers=dialect.hydra_layers,
        pad_token=dialect.pad_token,
        dtype=args.dtype,
        actor=EngineConfig("actor", args.stage("actor"), args.offload, args.actor_ds_config),
        critic=EngineConfig("critic", args.stage("critic"), args.offload, args.critic_ds_config),
        reference=None if dialect.hydra_layers else frozen("reference", "actor", args.offload_reference_model),
        reward=frozen("reward", "critic" if dialect.has_critic else "actor", args.offload_reward_model)
        if scored
        else None,
        actor_optimizer=optimizer(dialect.actor_lr, dialect.actor_weight_decay),
        critic_optimizer=optimizer(dialect.critic_lr, dialect.critic_weight_decay),
        micro_batch_size=args.per_device_training_batch_size,
        actor_gradient_checkpointing=args.actor_gradient_checkpointing,
        critic_gradient_checkpointing=args.critic_gradient_checkpointing,
        ema_decay=dialect.ema_decay if args.enable_ema else None,
        ema_device=args.ema_device,
    )


def engine_configs(args, dialect: Dialect) -> dict[str, dict]:
    """Each engine's whole DeepSpeed configuration; raises UserError for a contradiction."""
    configs = {}
    for choice in engine_spec(args, dialect).choices:
        trained = choice.role in ("actor", "critic")
        configs[choice.role] = build_ds_config(
            choice,
            dtype=args.dtype,
            micro_batch_size=args.per_device_training_batch_size,
            trained=trained,
            gradient_clipping=dialect.max_grad_norm if trained else 0.0,
        )
    return configs


def _check(args, dialect: Dialect) -> None:
    """Raise UserError for flags of engines that this dialect does not have, and for offload of what has nothing."""
    for name in ("reference_ds_config", "offload_reference_model"):
        if dialect.hydra_layers and getattr(args, name):
            raise UserError(
                f"--{name} with hydra_layers {dialect.hydra_layers} (dialect {dialect.name}): the "
                "reference is a few layers within the actor's engine. Leave it out, or set hydra_layers to "
                "0."
            )
    for name in ("critic_zero_stage", "critic_ds_config", "critic_gradient_checkpointing", "critic_warmup_steps"):
        if not dialect.has_critic and getattr(args, name):
            given = getattr(args, name)
            told = "" if given is True else f" {given}"
            raise UserError(f"--{name}{told}: the dialect {dialect.name} has no critic. Leave it out.")
    path = args.critic_model_name_or_path
    if dialect.critic_start != "reward_model" and path is not None and path != args.reward_path:
        start = "starts with a new head on the SFT model" if dialect.has_critic else "does not exist"
        raise UserError(
            f"--critic_model_name_or_path {path}: in the dialect {dialect.name} the critic {start}, and "
            "the scores come from elsewhere. Leave it out."
        )
    for role in ("actor", "critic") if dialect.has_critic else ("actor",):
        path = getattr(args, f"{role}_ds_config")
        if args.offload and path is not None:
            raise UserError(
                f"--offload and --{role}_ds_config {path} contradict each other: say in the file what is offloaded."
            )
        if args.offload and args.stage(role) == 0:
            raise UserError(
                f"--offload with --{role}_zero_stage 0: there is nothing that could be offloaded. Offload "
                "needs stage 1, 2 or 3."
            )
