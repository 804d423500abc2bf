"""Plans a run of step 3 before a model is loaded. Checks its files, models, machine and dialect, and that its reward
servers answer with scores.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine import distributed
from engine.algorithms import Dialect, check_sizes, end_token_id, token_id
from engine.engine_spec import EngineSpec
from engine.errors import UserError, in_words, without_query
from engine.models.checking import check_decoding, check_vocabularies, own_tokenizer, reads_texts
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL, pad_token_line, read_config, vocabulary_size
from engine.reward.server import FORMS, probe
from engine.rlhf_engine import check_roles, scoring_roles
from engine.rollout import Environments, SamplingConfig
from engine.rollout.vllm_rollouts import check_heads, vllm_version
from engine.zero.accelerator import on_gpu
from engine.zero.extensions import refuse_missing
from training.checkpoints.conditions import Conditions
from training.checkpoints.resuming import AUTO, Checkpoint
from training.config.models import ServerFlags
from training.config.reward import check_columns, check_held_out_number, load_functions
from training.config.step3 import RLHFFlags
from training.data.examples import Prompts, TextBlocks, prompt_fit
from training.data.record_forms import TEXTS
from training.data.row_selection import load_rows
from training.environments import environments_of, load_environment, prompts_for
from training.reward_texts import Reader, all_messages, check_prompts, reading_limit, step_ends
from training.runtime.launch import check_run
from training.runtime.models import adapted_roles, check_positions, generation_stops, prompt_and_answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything about a run that is decided before a model is loaded.

    texts: blocks of text for mixed pretraining, or None. total_steps: number of steps of the whole run, and the length
    of the learning rates' schedule. last_step: the step after which this start of the run ends. resume: the checkpoint
    from which the run resumes, or None. pad_token: the line about the pad token that the run prints.
    """

    dialect: Dialect
    tokenizer: object
    spec: EngineSpec
    reward_functions: Mapping[str, Callable]
    environments: Environments | None
    prompts: Prompts
    held_out: Prompts | None
    texts: TextBlocks | None
    sampling: SamplingConfig
    total_steps: int
    last_step: int
    resume: Checkpoint | None
    conditions: Conditions
    ds_configs: Mapping[str, dict]
    pad_token: str

    @property
    def scores_changed(self) -> bool:
        """Whether the reward has changed since the checkpoint from which the run resumes."""
        return self.resume is not None and self.conditions.scores_changed_since(Conditions.read(self.resume.state))


def make_plan(args: RLHFFlags, checkpoint: Checkpoint | None, inputs: Mapping[str, str | None] | None = None) -> Plan:
    """Make the plan of a run. Each rank that calls this reads the data. Raises: UserError; no model is loaded yet.

    inputs: the result of `training.checkpoints.conditions.fingerprints` on rank 0.
    """
    dialect = args.resolved.dialect
    tokenizer = args.read_tokenizer(args.actor_model_name_or_path, "--actor_model_name_or_path", dialect.pad_token)
    query = tuple(token_id(tokenizer, dialect, field) for field in ("query_start", "query_end"))
    prompts, held_out, fingerprints = read_prompts(args, tokenizer, args.text_reward_paths, *query)
    total_steps = count_steps(args, len(prompts))
    last_step = min(total_steps, args.test_stop_step or total_steps)
    functions = load_functions(args)
    check_columns(functions, by_part(prompts, held_out))
    environments = environments_of(args, tokenizer, [prompts, held_out])
    texts, texts_fingerprints = read_texts(args, tokenizer)
    conditions = Conditions.of(args, fingerprints + texts_fingerprints, tokenizer, inputs or {})
    if checkpoint:
        checkpoint.check(conditions, last_step)
    # With --resume auto the same command is started again, so --profile_steps may name steps that are already recorded.
    first = checkpoint.steps_done + 1 if checkpoint and args.resume != AUTO else 1
    check_profile_steps(args.profile_steps, first, last_step)
    return Plan(
        dialect=dialect,
        tokenizer=tokenizer,
        spec=args.spec,
        reward_functions=functions,
        environments=environments,
        prompts=prompts,
        held_out=held_out,
        texts=texts,
        sampling=sampling_config(args, dialect, tokenizer),
        total_steps=total_steps,
        last_step=last_step,
        resume=checkpoint,
        conditions=conditions,
        ds_configs=args.ds_configs,
        pad_token=pad_token_line(tokenizer, dialect, args.actor_model_name_or_path),
    )


def read_prompts(
    args, tokenizer, readers: Sequence[str], *query: int | None
) -> tuple[Prompts | None, Prompts | None, list[str]]:
    """(prompts, or None; held-out prompts, or None; fingerprints of both).

    args: of step 3, or of a tool that measures. readers: the reward models that read texts. query: the ids of the
    dialect's query_start and query_end. Raises: UserError.
    """
    form, with_dialogues = prompts_for(args)
    with_dialogues = with_dialogues or bool(readers)
    fit = prompt_fit(tokenizer, args.max_prompt_seq_len, args.overlong, *query)
    parts = args.load_rows(
        form,
        tokenizer,
        fit,
        held_out=args.num_eval_prompts,
        eval_limit=args.num_eval_prompts,
        held_out_flag="--num_eval_prompts",
    )
    prompts, held_out = (
        Prompts(
            rows, tokenizer, args.max_prompt_seq_len, args.overlong, args.cache, *query, with_dialogues=with_dialogues
        )
        if len(rows)
        else None
        for rows in parts
    )
    return prompts, held_out, [rows.fingerprint for rows in parts]


def by_part(prompts: Prompts, held_out: Prompts | None) -> dict[str, Prompts]:
    """{name in messages: prompts}: the training prompts and, if there are any, the held-out prompts."""
    parts = {"the prompts": prompts, "the held-out prompts": held_out}
    return {name: part for name, part in parts.items() if part is not None}


def count_steps(args: RLHFFlags, prompts: int) -> int:
    """The number of steps of the whole run. Raises: UserError if there are too few prompts for one step."""
    a_step = args.per_device_generation_batch_size * args.generation_batches * distributed.data_parallel_size()
    total = args.max_steps or prompts * args.num_train_epochs // a_step
    if prompts < a_step or total == 0:
        raise UserError(
            f"--data_path {' '.join(args.data_path)}: {prompts} prompts are too few for one step, "
            f"which takes {a_step} over {in_words(distributed.data_parallel_size(), 'rank')}. Lower the batch sizes or "
            "add prompts."
        )
    return total


def sampling_config(args: RLHFFlags, dialect: Dialect, tokenizer) -> SamplingConfig:
    """The settings with which responses are drawn. Raises: UserError if the tokenizer lacks the dialect's end token."""
    end_token_id(tokenizer, dialect)
    return SamplingConfig.of(
        dialect,
        generation_stops(args.actor_model_name_or_path, tokenizer, args.trust_remote_code),
        args.dtype,
        max_new_tokens=args.max_answer_seq_len,
        pad_token_id=tokenizer.pad_token_id,
        stop_strings=tuple(args.stop),
        seed=args.seed,
        vocabulary_size=vocabulary_size(tokenizer),
    )


def check_profile_steps(steps: list[int], first: int, last: int) -> None:
    """Raise UserError if --profile_steps names a step that the run does not make. first, last: the first and the last
    step of the run."""
    outside = [str(step) for step in steps if not first <= step <= last]
    if outside:
        these = (
            f"this run trains steps {first} to {last}. Name some of these"
            if first <= last
            else f"this run ends with step {last}, which is done. Leave the flag out"
        )
        raise UserError(f"--profile_steps {' '.join(outside)}: {these}.")


def read_texts(args: RLHFFlags, tokenizer) -> tuple[TextBlocks | None, list[str]]:
    """(the texts of mixed pretraining, in blocks as long as prompt + response; a list with their fingerprint). Without
    mixed pretraining: (None, an empty list)."""
    if args.unsupervised_dataset_name is None:
        return None, []
    rows, _ = load_rows(
        args.unsupervised_dataset_name,
        TEXTS,
        tokenizer,
        phase=args.phase,
        seed=args.seed,
        config_name=args.unsupervised_dataset_config_name,
    )
    blocks = TextBlocks(rows, tokenizer, args.max_prompt_seq_len + args.max_answer_seq_len, args.cache)
    needed = args.rows_per_rank // args.mini_batches * distributed.data_parallel_size()
    if len(blocks) < needed:
        raise UserError(
            f"--unsupervised_dataset_name {args.unsupervised_dataset_name}: {len(blocks)} blocks of text "
            f"are fewer than the {needed} of an optimizer step. Give more text, or lower the batch sizes."
        )
    return blocks, [rows.fingerprint]


def check_server(args: ServerFlags, tokenizer, parts: Mapping[str, Prompts]) -> dict[str, float]:
    """Ask each reward server for the score of one text: {URL: score}. Each node asks, because each node's ranks will
    ask later. parts: {name in messages: prompts}.

    Raises: UserError if the data lack a column that is to be sent, or if a server cannot be reached or gives no score.
    """
    settings = args.reward_server()
    if settings is None or distributed.local_rank() != 0:
        return {}
    for where, part in parts.items():
        part.refuse_unread(settings.columns, f"--reward_url_columns {' '.join(settings.columns)} asks {where} for")
        row = part.rows[0]
        missing = [name for name in settings.columns if row.get(name) is None]
        if missing:
            raise UserError(
                f"--reward_url_columns {' '.join(settings.columns)}: {where} lack {missing[0]}: they have "
                f"{', '.join(row)}. Add the column, or name those that are there."
            )
    special_tokens = FORMS[settings.form].special_tokens
    first = next(iter(parts.values()))
    prompt = tokenizer.decode(first[0], skip_special_tokens=not special_tokens)
    return probe(settings, prompt, first.rows[0])


def server_lines(args: RLHFFlags) -> list[str]:
    """The lines about reward servers that are printed at the start of a run; [] without a server."""
    if not args.reward_url:
        return []
    columns = f", with {', '.join(args.reward_url_columns)}" if args.reward_url_columns else ""
    return [f"scores from {' and '.join(map(without_query, args.reward_url))} (form {args.reward_url_form}{columns})"]


def check_reward_texts(args, paths: Iterable[str], tokenizer, parts: Mapping[str, Prompts]) -> list[str]:
    """Check that the reward models can read the prompts. Returns lines to print: about those that read texts, and those
    that may have another tokenizer than the actor's.

    args: of step 3, or of a tool that measures. paths: the models' folders. tokenizer: the policy's. parts: {name in
    messages: prompts}. Raises: UserError.
    """
    lines, trusted, messages = [], args.trust_remote_code, all_messages(parts.values())
    flag = "--reward_model_name_or_path" if args.reward_model_name_or_path else "--critic_model_name_or_path"
    how = {
        True: "messages by its own chat template",
        False: "prompt + response + EOS, without a chat template, since the prompts are texts",
        None: "messages by its own chat template, prompts that are texts without",
    }[messages]
    stepwise = {path: step_ends(path, tokenizer, args.reward_step_end, trusted) for path in paths}
    if args.reward_step_end is not None and not any(stepwise.values()):
        raise UserError(f"{args.word('reward_step_end')}: no reward model is a token classifier. Leave it out.")
    for path, ends in stepwise.items():
        model = f"{flag} {path}"
        config, lengths = read_config(path, model, trusted), prompt_and_answer(args)
        if ends is not None:
            end = ", and the end of the response ends its last step" if ends.at_end else ""
            lines.append(f"{model}: a number for each step, which ends with {ends.text!r}{end}")
            if reads_texts(tokenizer, path, model, trusted, messages):
                raise UserError(
                    f"{model}: this process reward model has another tokenizer, or another chat template, than the "
                    "actor. Give one that was trained with the actor's: its numbers belong to the actor's tokens."
                )
        if not reads_texts(tokenizer, path, model, trusted, messages):
            check_positions(config, model, args.cut_responses == "closed", **lengths)
            lines += check_vocabularies(tokenizer, path, flag, trusted)
            continue
        limit = reading_limit(config, args.max_reward_seq_len, sum(lengths.values()))
        lines.append(f"{model}: gets texts of up to {limit} of its own tokens: {how}")
        reader = Reader(own_tokenizer(path, model, trusted), limit)
        for which, prompts in parts.items():
            lines += check_prompts(prompts, reader, which, model)
    return lines


def check_files(args: RLHFFlags, checkpoint: Checkpoint | None) -> None:
    """Check files, models and machine; called by one process. checkpoint: the checkpoint from which the run resumes, or
    None. Raises: UserError."""
    dialect = args.resolved.dialect
    check_run(args, resumed=checkpoint is not None and checkpoint.in_output_dir)
    check_engines(args)
    check_rollouts(args)
    check_held_out_number(args, "keep_best_by", load_functions(args), dialect.likelihood_coef != 0)
    load_environment(args, args.text_reward_paths)
    check_dialect(args, dialect)
    check_models(args, dialect)
    adapted_roles(args, dialect)
    check_trunk_shared(args)


def check_engines(args: RLHFFlags) -> None:
    """Check, in one process, that DeepSpeed can make the engines of these configurations on this machine. Raises:
    UserError."""
    configs = args.ds_configs
    for choice in args.spec.engine_configs if not args.dry_run else ():  # a dry run may be for other machines
        refuse_missing(configs[choice.role], choice.path)


def check_rollouts(args: RLHFFlags) -> None:
    """Check that the rollout backend can draw from the actor and, with --rollout_backend vllm, that vLLM is installed.
    A user's own backend is not checked. Raises: UserError."""
    path, flag, trusted = args.actor_model_name_or_path, "--actor_model_name_or_path", args.trust_remote_code
    if args.rollout_backend == "vllm":
        vllm_version()
        if args.looks_at(path):
            on_cpu = not (args.dry_run or on_gpu())  # a dry run may be for other machines
            check_heads(read_config(path, flag, trusted), f"{flag} {path}", args.vllm_tensor_parallel_size, on_cpu)
    elif args.rollout_backend in ("auto", "replica", "zero3") and args.looks_at(path):
        check_decoding(path, flag, trusted)


def check_trunk_shared(args: RLHFFlags) -> None:
    """With --share_trunk: check that the models are adapters on one base. Raises: UserError."""
    if args.share_trunk and all(args.looks_at(path) for _, path in args.models):
        scoring_roles(args.spec, *named_by(args).values())


def named_by(args: RLHFFlags) -> dict[str, str]:
    """{role: the flag that names its model}, for actor, critic and reward models."""
    flags = {role: f"--{role}_model_name_or_path" for role in ("actor", "critic", "reward")}
    if not args.reward_model_name_or_path:
        flags["reward"] = flags["critic"]
    elif args.critic_model_name_or_path is None:
        flags["critic"] = flags["reward"]
    return flags


def check_dialect(args: RLHFFlags, dialect: Dialect) -> None:
    """Check that the dialect fits the run's batch sizes. Raises: UserError."""
    check_sizes(
        dialect,
        rows_per_rank=args.rows_per_rank,
        mini_batches=max(dialect.mini_batches, dialect.critic_passes[1]),
        micro_batch_size=args.per_device_training_batch_size,
        ranks=distributed.data_parallel_size(),
    )


def check_models(args: RLHFFlags, dialect: Dialect) -> None:
    """Check that the models are of the kinds that the flags need, and fit each other. Raises: UserError."""
    tokenizer = check_roles(args.spec, named_by(args), args.looks_at)
    if tokenizer is not None:
        generation_stops(args.actor_model_name_or_path, tokenizer, args.trust_remote_code)
    lengths = prompt_and_answer(args)
    own = set(args.reward_paths) - set(args.text_reward_paths)  # these read the policy's token ids
    closed = own if dialect.cut_responses == "closed" else set()
    if closed and dialect.score_before_pad and tokenizer and tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise UserError(
            f"cut_responses closed: EOS is the pad token, and the dialect {dialect.name} scores what stands before it. "
            "Give --set pad_token=tokenizer with a tokenizer whose pad token is another one, or leave it open."
        )
    for name, path in args.models:
        if not args.looks_at(path):
            continue
        args.check_attention(path, LANGUAGE_MODEL if name.startswith("actor") else CLASSIFIER, f"--{name}")
        given = lengths
        if path in args.text_reward_paths and path != args.critic_path:
            limit = args.max_reward_seq_len
            given = {} if limit is None else {"max_reward_seq_len": limit}
        config = read_config(path, f"--{name}", args.trust_remote_code)
        check_positions(config, f"--{name} {path}", path in closed, **given)
    if args.max_reward_seq_len is not None and tokenizer is not None and not args.text_reward_paths:
        raise UserError(
            f"{args.word('max_reward_seq_len')}: every reward model reads the actor's token ids, so "
            "--max_prompt_seq_len and --max_answer_seq_len say how much. Leave it out."
        )
