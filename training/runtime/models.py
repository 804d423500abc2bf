"""What a run reads from its models' folders before a model is loaded: how many positions the models have, which tokens
end a response, and which layers get LoRA factors.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from transformers import GenerationConfig

from engine.algorithms import Dialect
from engine.errors import UserError, shortened
from engine.models.adapter_folders import AdapterFolder, read_adapter
from engine.models.config_and_tokenizer import read_config
from engine.models.loading import saveable
from engine.models.lora import AdaptedModel, LoraSpec
from engine.models.model_paths import base_of, one_line
from training.config.flags import RunFlags
from training.config.models import LoraFlags
from training.config.step3 import RLHFFlags
from training.config.supervised import SFTFlags, SupervisedFlags
from training.data.tokens import stop_token_ids


def generation_stops(path: str, tokenizer, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The tokens that end a response of the model at `path`. They are read from its generation_config; nothing else in
    this file is used.

    Raises: UserError if the generation_config is broken.
    """
    path = base_of(path, "model")
    config = read_config(path, "model", trust_remote_code)
    return tuple(stop_token_ids(tokenizer, _generation_config(path), config))


def _generation_config(path: str) -> GenerationConfig | None:
    """The generation_config of a whole model; None if it has none. Raises: UserError if it is broken."""
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:  # wrong values make transformers raise errors of many kinds
        if isinstance(error, OSError) and not (Path(path) / "generation_config.json").is_file():
            return None
        raise UserError(
            f"{path}/generation_config.json is broken ({type(error).__name__}: {one_line(error)}). Fix or remove it."
        ) from None


HARMLESS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "do_sample")
HARMLESS += ("cache_implementation", "transformers_version")


def kept_settings(path: str) -> str:
    """The settings of transformers' `generate` that are saved with a model trained from the one at `path`, and that
    nothing here draws with: "top_p 0.9, suppress_tokens [3]"; "" if there are none."""
    path = base_of(path, "model")
    # transformers takes the settings from config.json if there is no other file.
    given = _generation_config(path) or GenerationConfig.from_pretrained(path, config_file_name="config.json")
    saved = vars(saveable(given))
    found = [
        f"{name} {shortened(saved[name])}"
        for name in vars(GenerationConfig())
        if saved[name] and (saved[name] != 1 or name == "top_k") and name not in HARMLESS and name[0] != "_"
    ]
    if found and saved["do_sample"]:
        on = "True" if given.do_sample else "turned on"
        found.append(f"do_sample {on} (transformers saves no temperature, top_k or top_p without it)")
    return ", ".join(found)


def check_positions(config, model: str, closing: bool = False, **lengths: int) -> None:
    """Raise UserError if the sum of `lengths` is larger than the number of positions that a model has.

    config: the model's configuration. model: the model's name in the message. closing: whether one more token closes
    the longest rows. lengths: {flag: number of tokens}.
    """
    longest, total = _positions(config), sum(lengths.values()) + closing
    if longest is not None and total > longest:
        given = " and ".join(f"--{name} {value}" for name, value in lengths.items())
        given += " and 1 for the end of cut responses (cut_responses closed)" * closing
        raise UserError(
            f"{given}: sequences may have {total} tokens, but {model} has {longest} positions. Lower "
            f"{'them' if len(lengths) > 1 else 'it'}."
        )


def prompt_and_answer(args) -> dict[str, int]:
    """{flag: tokens}, whose sum is the longest row of the models that get the policy's token ids."""
    return {name: getattr(args, name) for name in ("max_prompt_seq_len", "max_answer_seq_len")}


def most_tokens(args: RunFlags, models: Iterable[str | None], beside: int = 0) -> int | None:
    """The largest number of tokens for which all models on this machine have positions. `beside` further tokens of each
    sequence need positions too.

    None if there is no model, or if no model limits its positions. Raises UserError for an invalid model.
    """
    here = [path for path in models if path is not None and args.looks_at(path)]
    counts = [_positions(read_config(path, "model", args.trust_remote_code)) for path in here]
    known = [count for count in counts if count is not None]
    return min(known) - beside if known else None


def _positions(config) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def model_notes(args: RunFlags, models: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each setting of a model's files that other programs use in training, scoring or generating. The line
    says what this run does with the setting, and which flags name models that have it. models: (flag, path)."""
    notes: dict[str, list[str]] = {}
    models = list(models)
    flags = [flag for flag, _ in models]
    for flag, path in models:
        if not args.looks_at(path):
            continue
        name = f"--{flag}" if flags.count(flag) == 1 else f"--{flag} {path}"
        config, found = read_config(path, f"--{flag}", args.trust_remote_code), []
        if hasattr(config, "text_part_of"):
            found.append(
                f"the language model alone of a {config.text_part_of} model: it is shown texts alone, and saved models "
                "have no towers for images or sound"
            )
        if getattr(config, "output_router_logits", False):
            found.append("no balancing loss is trained with, which config.json asks for (output_router_logits)")
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope" and args.max_length is not None:
            known = rope["original_max_position_embeddings"]
            found.append(
                f"longrope's {'long' if args.max_length > known else 'short'} factors in all rows, since rows may have "
                f"{args.max_length} tokens (original_max_position_embeddings is {known}); saved models keep both"
            )
        language_model = flag.startswith("actor") or isinstance(args, SFTFlags)
        if language_model and (kept := kept_settings(path)):
            found.append(f"saved models keep settings of generate() that nothing here draws with: {kept}")
        if hasattr(config, "mean") and hasattr(config, "std"):
            used = getattr(config, "normalize_reward", False)
            note = "scores are (score - mean) / std" if used else "scores stay without mean and std"
            found.append(f"{note} of config.json (OpenRLHF's normalize_reward is {str(used).lower()})")
        for note in found:
            notes.setdefault(note, []).append(name)
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


def adapted_lines(found: dict[str, AdaptedModel]) -> list[str]:
    """A line for each model with an adapter. found: {name of the model in the line: its adapter's facts}."""
    return [f"LoRA of the {name}: {model.summary()}" for name, model in found.items()]


def adapted_model(args: SupervisedFlags, scorer: bool) -> dict[str, AdaptedModel]:
    """{"model": the adapted model of step 1 or 2}; {} if it has no adapter or is not on this machine. scorer: whether
    the model is step 2's.

    Raises: UserError if the flags match no layer, or if a flag has no effect because training continues an adapter that
    exists already.
    """
    found = _adapted(args, args.lora(), "", "model_name_or_path", args.model_name_or_path, scorer)
    if found:
        _refuse_idle(args, {"": read_adapter(args.model_name_or_path, "--model_name_or_path")})
    return {"model": found} if found else {}


def adapted_roles(args: RLHFFlags, dialect: Dialect) -> dict[str, AdaptedModel]:
    """The models of step 3 that have an adapter and are on this machine.

    Raises: UserError if the flags match no layer, or if a flag has no effect because training continues adapters that
    exist already.
    """
    starting = {"actor": ("actor_model_name_or_path", args.actor_model_name_or_path)}
    spec = args.spec
    specs = {"actor": spec.actor_lora, "critic": spec.critic_lora}
    if dialect.has_critic:
        given = "critic" if args.critic_model_name_or_path is not None else "reward"
        own = args.critic_path is not None
        starting["critic"] = (f"{given}_model_name_or_path", args.critic_path) if own else starting["actor"]
    found: dict[str, AdaptedModel | None] = {}
    starts: dict[str, AdapterFolder | None] = {}
    for role, (flag, path) in starting.items():
        scorer = role == "critic"
        # With a shared trunk (actor and critic use one set of weights), a critic that starts from no reward model gets
        # a new adapter in addition to the actor's.
        goes_on = not (args.share_trunk and scorer and args.critic_path is None)
        found[role] = _adapted(args, specs[role], f"{role}_", flag, path, scorer, goes_on)
        if specs[role] is not None:
            starts[f"{role}_"] = read_adapter(path, f"--{flag}") if goes_on and args.looks_at(path) else None
    _refuse_idle(args, starts)
    return {role: model for role, model in found.items() if model}


def _refuse_idle(args: LoraFlags, starts: Mapping[str, AdapterFolder | None]) -> None:
    """Raise UserError for flags that describe a new adapter although no adapter is new.

    starts: {prefix of the model's "lora_dim" flag: the adapter that training continues}; None for a new adapter, or if
    the model is not on this machine. A flag for several models is refused if it has an effect on none of them."""
    end = "Leave the flag out; for an adapter of another form, merge this one into its model and start from that."
    for model, start in starts.items():
        name = f"{model}lora_module_name"
        if start is not None and getattr(args, name):
            raise UserError(f"--{name} {getattr(args, name)}: {_gone_on(start)}, which has {_layers(start)}. {end}")
    known = [start for start in starts.values() if start is not None]
    if not known or len(known) < len(starts):
        return
    if args.lora_target_modules:
        has = f"{_gone_on(known[0])}, which has {_layers(known[0])}"
        raise UserError(f"--lora_target_modules {' '.join(args.lora_target_modules)}: {has}. {end}")
    if args.lora_alpha is not None and all(float(start.config.lora_alpha) != args.lora_alpha for start in known):
        told = "; ".join(f"{_gone_on(start)}, which has alpha {float(start.config.lora_alpha):g}" for start in known)
        raise UserError(f"--lora_alpha {args.lora_alpha:g}: {told}. {end}")


def _gone_on(start: AdapterFolder) -> str:
    return f"{start.what}: training goes on with the adapter in {start.path}"


def _layers(start: AdapterFolder) -> str:
    """Text that lists the layers that an adapter adapts, by the last parts of their names."""
    names = [name.removesuffix(".lora_A.weight") for name in start.headers if name.endswith(".lora_A.weight")]
    return f"factors in {', '.join(sorted({name.rpartition('.')[2] for name in names}))}"


def _adapted(
    args: LoraFlags,
    spec: LoraSpec | None,
    model: str,
    path_flag: str,
    path: str,
    scorer: bool,
    goes_on: bool = True,
) -> AdaptedModel | None:
    if spec is None or not args.looks_at(path):
        return None
    given = f"--{model}lora_dim {spec.dim}"
    if getattr(args, f"{model}lora_module_name"):
        given = f"--{model}lora_module_name {spec.targets}"
    elif args.lora_target_modules:
        given = f"--lora_target_modules {' '.join(args.lora_target_modules)}"
    return AdaptedModel.of(path, spec, f"{given}: --{path_flag}", scorer, args.trust_remote_code, goes_on)
