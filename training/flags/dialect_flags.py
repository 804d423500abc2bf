"""How the flags of step 3 (`args`, RLHFFlags) speak of the dialect, and where they contradict it."""

from engine.algorithms import Dialect, get_dialect, parse_settings
from engine.errors import UserError

# Flags that give a field of the dialect a value; first those of another name than the field.
DIALECT_FLAGS = {
    "actor_learning_rate": "actor_lr",
    "critic_learning_rate": "critic_lr",
    "num_warmup_steps": "warmup_steps",
    "lr_scheduler_type": "lr_schedule",
    "num_samples_per_prompt": "samples_per_prompt",
}
DIALECT_FLAGS |= {
    name: name
    for name in (
        "kl_coef",
        "score_clip",
        "gamma",
        "lam",
        "clip_range",
        "value_clip_range",
        "ppo_epochs",
        "whiten_advantages",
        "max_grad_norm",
        "actor_weight_decay",
        "critic_weight_decay",
        "temperature",
        "ema_decay",
        "old_logprobs",
    )
}


def given_fields(args) -> dict[str, object]:
    """The dialect's fields that flags give a value, by --set or by a flag of their own.

    Raises: UserError for a field that is given twice.
    """
    found = parse_settings(args.set)
    flags = {field: name for name, field in DIALECT_FLAGS.items() if getattr(args, name) is not None}
    if args.gradient_accumulation_steps is not None:
        flags["mini_batches"] = "gradient_accumulation_steps"
    for field, name in flags.items():
        if field in found:
            raise UserError(
                f"--set {field}={found[field]} and --{name} {getattr(args, name)} say the same. Give one of them."
            )
    found |= {field: getattr(args, name) for field, name in flags.items() if field != "mini_batches"}
    if args.gradient_accumulation_steps is not None:
        samples = found.get("samples_per_prompt", get_dialect(args.dialect).samples_per_prompt)
        made = args.per_device_generation_batch_size * args.generation_batches * samples
        a_step = args.per_device_training_batch_size * args.gradient_accumulation_steps
        found["mini_batches"] = max(1, made // a_step)
    return found


def check_sampling(args, dialect: Dialect) -> None:
    """Refuse ends that the dialect's sampling cannot come to."""
    if args.stop and dialect.sampling != "until_eos":
        raise UserError(
            f"--stop {' '.join(args.stop)}: the dialect's sampling is {dialect.sampling!r}, which gives "
            "every response the same length. Leave it out, or --set sampling=until_eos."
        )
    if dialect.truncate_after >= args.max_answer_seq_len:
        raise UserError(
            f"truncate_after {dialect.truncate_after} with --max_answer_seq_len "
            f"{args.max_answer_seq_len}: no response reaches that slot, so none would have an end. Raise "
            "the one, or lower the other with --set truncate_after=N."
        )
