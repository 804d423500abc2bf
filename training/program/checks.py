"""What can be wrong with a run of step 3 before data are read: files, models, machine, dialect."""

from engine import distributed
from engine.algorithms import Dialect, check
from engine.errors import UserError
from engine.models.checking import check_policy, check_rows, check_scorer, check_trunk, check_vocabularies
from engine.models.hydra import check_hydra
from engine.models.reading import CLASSIFIER, LANGUAGE_MODEL, read_config
from engine.rollout.families import check_attention
from engine.rollout.vllm_engine import check_heads, vllm_version
from engine.shared_trunk import scoring_roles
from engine.zero.accelerator import on_gpu
from engine.zero.extensions import refuse_missing
from training.checkpoints.resuming import ResumePoint
from training.config.reward import load_functions
from training.config.step3 import RLHFFlags
from training.program.adapted_models import adapted_roles
from training.program.hub import check_hub
from training.program.model_files import check_positions, generation_stops, is_pretrained_critic
from training.program.startup import check_run


def check_files(args: RLHFFlags, dialect: Dialect, point: ResumePoint | None) -> None:
    """What can be wrong with files, models and machine, looked at by one process; point: what is gone on from."""
    check_run(args, resumed=point is not None and point.in_output_dir)
    check_hub(args)
    check_engines(args, dialect)
    check_vllm(args)
    load_functions(args)
    check_dialect(args, dialect)
    check_models(args, dialect)
    adapted_roles(args, dialect)
    check_trunk_shared(args, dialect)


def check_engines(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether DeepSpeed can make engines of these configurations, all in one process and on this machine."""
    configs = args.engine_configs(dialect)
    for choice in args.engine_spec(dialect).engine_configs if not args.dry_run else ():  # which may be for other ones
        refuse_missing(configs[choice.role], choice.path)


def check_vllm(args: RLHFFlags) -> None:
    """Whether vLLM is there where it is to draw, and can compute the actor."""
    if args.rollout_backend != "vllm":
        return
    vllm_version()
    path, on_cpu = args.actor_model_name_or_path, not (args.dry_run or on_gpu())  # a dry run may be for other machines
    if args.looks_at(path):
        config = read_config(path, "--actor_model_name_or_path", args.trust_remote_code)
        check_heads(config, f"--actor_model_name_or_path {path}", args.vllm_tensor_parallel_size, on_cpu)


def check_trunk_shared(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether models that are to share a trunk have one."""
    flags = [f"--{role}_model_name_or_path" for role in ("actor", "critic", "reward")]
    paths = [getattr(args, flag.removeprefix("--")) for flag in flags]
    if args.share_trunk and all(path is None or args.looks_at(path) for path in paths):
        scoring_roles(args.engine_spec(dialect), *flags)


def check_dialect(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether the dialect's choices go together with the run's sizes and the actor."""
    layers, path = None, args.actor_model_name_or_path
    if args.looks_at(path):
        config = read_config(path, "--actor_model_name_or_path", args.trust_remote_code)
        layers = config.get_text_config().num_hidden_layers
    check(
        dialect,
        rows_per_rank=args.rows_per_rank,
        mini_batches=max(dialect.mini_batches, dialect.critic_passes[1]),
        micro_batch_size=args.per_device_training_batch_size,
        ranks=distributed.world_size(),
        layers=layers,
        given=args.given_fields(),
    )


def check_models(args: RLHFFlags, dialect: Dialect) -> None:
    """Whether the models are what the flags say, and fit each other."""
    names = [
        name
        for name in ("actor_model_name_or_path", "critic_model_name_or_path", "reward_model_name_or_path")
        if getattr(args, name) is not None and args.looks_at(getattr(args, name))
    ]
    tokenizer, trusted = None, args.trust_remote_code
    for name in names:
        path = getattr(args, name)
        if name == "actor_model_name_or_path":
            tokenizer = args.read_tokenizer(path, f"--{name}", dialect.pad_token)
            check_rows(tokenizer, check_policy(path, f"--{name}", trusted), path, f"--{name}")
            check_attention(path, f"--{name}", trusted)
            generation_stops(path, tokenizer, trusted)
            if dialect.hydra_layers:
                check_hydra(path, dialect.hydra_layers, f"--{name}", trusted)
            starts_anew = dialect.critic_start == "zero_head" or args.critic_model_name_or_path is None
            if dialect.has_critic and starts_anew:
                check_trunk(path, f"--{name}", trusted)
        else:
            check_scorer(path, f"--{name}", trusted)
            if path == args.reward_path and is_pretrained_critic(path):
                raise UserError(
                    f"--{name} {path}: that is a pretrained critic, whose numbers say what is still to come of a text; "
                    "it gives no scores. Name the reward model with --reward_model_name_or_path."
                )
            if tokenizer is not None:
                check_vocabularies(tokenizer, path, f"--{name}", trusted)
        args.check_attention(path, LANGUAGE_MODEL if name.startswith("actor") else CLASSIFIER, f"--{name}")
        check_positions(
            read_config(path, f"--{name}", trusted),
            f"--{name} {path}",
            max_prompt_seq_len=args.max_prompt_seq_len,
            max_answer_seq_len=args.max_answer_seq_len,
        )
