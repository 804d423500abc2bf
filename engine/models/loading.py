"""From folders (or hub names) to Policy and Scorer modules and back."""

import json
import math
import re
import zipfile
from pathlib import Path

import huggingface_hub
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from engine.errors import UserError
from engine.models.modules import Policy, Scorer
from engine.models.weight_files import check_weights
from engine.zero.gathering import set_parameter
from engine.zero.partitioned_loading import partitioned_loading

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def read_config(path: str, what: str):
    """The model configuration at `path`.

    Raises: UserError, naming `what` (a flag), if there is none.
    """
    _require_place(path, what)
    try:
        return AutoConfig.from_pretrained(path)
    except Exception as error:  # whatever a broken config.json leads transformers to
        raise UserError(
            f"{what}: no model at {path!r} ({_reason(error)}). Give a Hugging Face folder or hub name."
        ) from None


def read_tokenizer(path: str, what: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, left-padding; a missing pad token becomes the EOS token.

    Raises: UserError, naming `what` (a flag), if there is none or it has neither pad nor EOS.
    """
    _require_place(path, what)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except Exception as error:  # whatever broken files lead transformers to
        raise UserError(f"{what}: no tokenizer at {path!r} ({_reason(error)}). Save one beside the model.") from None
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"{what}: the tokenizer at {path!r} has neither a pad nor an EOS token. Set one.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_place(path: str, what: str) -> None:
    """Raise UserError unless there is a model's folder at `path`, or else a model of that name on the Hub.

    The Hub is asked once: transformers would ask again and again, for a minute, where no network is.
    """
    folder = Path(path)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return
        inner = next((name for name in ("actor", "reward", "sft") if (folder / name / "config.json").is_file()), None)
        raise UserError(
            f"{what}: the folder {path} holds no config.json. Give a folder that save_pretrained wrote"
            f"{f', {folder / inner} for instance' if inner else ''}."
        )
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) is None or "/" in path and folder.parent.is_dir():
        raise UserError(f"{what}: there is no folder {path} (relative paths start from {Path.cwd()}).")
    if huggingface_hub.constants.HF_HUB_OFFLINE or huggingface_hub.try_to_load_from_cache(path, "config.json"):
        return
    try:
        huggingface_hub.HfApi().model_info(path, timeout=10)
    except Exception as error:  # of the HTTP library's own kinds too, whichever that is
        raise UserError(
            f"{what}: found no folder {path} in {Path.cwd()}, and no model of that name on the Hugging "
            f"Face Hub can be reached ({_reason(error)}). Check the name; without a network, give a local "
            "folder."
        ) from None


def _reason(error: Exception) -> str:
    """A library's complaint in one line."""
    return " ".join((str(error).strip().splitlines() or [type(error).__name__])[0].split())


def load_policy(
    path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "model", dropout: float = 0.0
) -> Policy:
    """A causal language model in `dtype` (always given: the checkpoint's own would differ by stage).

    dropout: every dropout probability of its; it counts in train mode only.
    """
    config, dropouts = _with_dropout(check_policy(path, what), dropout)
    with partitioned_loading(ds_config):
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    _make_saveable(model)
    return Policy(model, dropouts)


def empty_like(module: Policy | Scorer, device: torch.device) -> Policy | Scorer:
    """A plain, unpartitioned module of the same architecture and dtype whose weights are still to be filled in."""
    dtype = next(module.parameters()).dtype
    auto = AutoModelForCausalLM if isinstance(module, Policy) else AutoModelForSequenceClassification
    with torch.device(device):
        model = auto.from_config(module.model.config, dtype=dtype)
    return module.around(model).to(device).requires_grad_(False).eval()


def load_scorer(path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "reward model") -> Scorer:
    """A reward model, dropout off: ours, any decoder-only `num_labels = 1` classifier, or DeepSpeed-Chat's format."""
    form = check_scorer(path, what)
    config, dropouts = _with_dropout(read_config(path, what), 0.0)
    config.num_labels = 1
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with partitioned_loading(ds_config):
        if form == "deepspeed_chat":
            _deepspeed_chat_padding(config, path, what)
            state = _deepspeed_chat_state(path, model_class.base_model_prefix)
            model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
        else:
            model = model_class.from_pretrained(path, config=config, dtype=dtype)
    return Scorer(model, dropouts)


def new_scorer(
    path: str,
    dtype: torch.dtype,
    pad_token_id: int | None,
    seed: int | None,
    ds_config: dict | None = None,
    what: str = "model",
    dropout: float = 0.0,
    scale: float = 1.0,
) -> Scorer:
    """A fresh reward model: the language model's trunk and a head drawn from N(0, 1 / sqrt(d + 1)).

    Source of the head's scale: Stiennon et al. 2020 (openai/summarize-from-feedback) and
    openai/lm-human-preferences cbfd210b, both by way of vwxyzjn/summarize_from_feedback_details ee77a9ab.

    Args:
        pad_token_id: the tokenizer's pad token; None where it doubles as EOS, so that Hugging Face's own pooling
            cannot take a final EOS for padding.
        seed: of the head; None for a head of zeros.
        dropout: every dropout probability of the trunk; it counts in train mode only.
        scale: what the head that was drawn is multiplied by.
    """
    config, dropouts = _with_dropout(check_trunk(path, what), dropout)
    config.num_labels, config.pad_token_id = 1, pad_token_id
    config.score_position, config.score_offset = "last", 0.0
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with partitioned_loading(ds_config):
        model = model_class.from_pretrained(path, config=config, dtype=dtype)
    scorer = Scorer(model, dropouts)
    width = scorer.model.score.in_features
    fresh = torch.zeros(1, width)
    if seed is not None:
        fresh = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width + 1)
    set_parameter(scorer.model.score.weight, scale * fresh)
    return scorer


def new_critic(path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "model") -> Scorer:
    """A critic where there is no reward model to start from: the language model's trunk and a head of zeros.

    Zeros, as openai/lm-human-preferences cbfd210b has for its values: a random head would add noise of the scores' own
    size to the first advantages. The first update moves the head alone, and from then on the trunk learns too.
    """
    tokenizer = read_tokenizer(path, what)
    pad = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    return new_scorer(path, dtype, pad, None, ds_config, what)


def check_policy(path: str, what: str):
    """The configuration of the language model at `path`, looked at before anything large is loaded.

    Raises: UserError, naming `what` (a flag), if something else stands there.
    """
    config = read_config(path, what)
    _require_family(config, MODEL_FOR_CAUSAL_LM_MAPPING, what, path)
    heads = [name for name in config.architectures or [] if name.endswith("ForSequenceClassification")]
    if _is_deepspeed_chat_scorer(path):
        heads = ["a reward model of DeepSpeed-Chat"]
    if heads:  # it would load, with random numbers for weights
        raise UserError(f"{what}: {path} is no language model but {heads[0]}. Give the SFT model or a base model.")
    check_weights(path, config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], what)
    return config


def check_trunk(path: str, what: str):
    """The configuration of the model at `path`, which is to get a new score head.

    Raises: UserError, naming `what` (a flag), if transformers has no scorer of its family.
    """
    config = read_config(path, what)
    _require_family(config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, what, path)
    check_weights(path, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)], what)
    return config


def check_scorer(path: str, what: str) -> str:
    """Whether a reward model stands at `path`, looked at before anything large is loaded.

    Returns: "sequence_classification" or "deepspeed_chat". Raises: UserError that says what stands there instead.
    """
    config = read_config(path, what)
    _require_family(config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, what, path)
    if _is_deepspeed_chat_scorer(path):
        return "deepspeed_chat"
    names = config.architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        raise UserError(
            f"{what}: {path} is no reward model but {', '.join(names) or 'of no named architecture'}. "
            "Give a folder written by training/step2_reward.py or a ForSequenceClassification model with "
            "num_labels = 1."
        )
    if config.num_labels != 1:
        raise UserError(f"{what}: {path} has num_labels = {config.num_labels}. Give a reward model, which has 1.")
    check_weights(path, config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)], what)
    return "sequence_classification"


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that the tokenizer knows."""
    return max(tokenizer.get_vocab().values()) + 1


def check_vocabularies(actor_tokenizer: PreTrainedTokenizerBase, path: str, what: str) -> None:
    """Refuse a reward model that would read the actor's tokens as other words.

    Raises: UserError if its embedding has fewer rows than the tokenizer has tokens, or its own tokenizer differs.
    """
    rows = getattr(read_config(path, what), "vocab_size", None)
    needed = vocabulary_size(actor_tokenizer)
    if rows is not None and rows < needed:
        raise UserError(
            f"{what}: {path} knows {rows} tokens, the actor's tokenizer has {needed}. The reward model "
            "must be trained with the actor's tokenizer."
        )
    if not any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return
    if read_tokenizer(path, what).get_vocab() != actor_tokenizer.get_vocab():
        raise UserError(
            f"{what}: the tokenizer in {path} gives other ids than the actor's. The reward model must be "
            "trained with the actor's tokenizer."
        )


def save_model(module: Policy | Scorer, state: dict, tokenizer: PreTrainedTokenizerBase, folder: str | Path) -> None:
    """Write a Hugging Face folder (safetensors, config, tokenizer) from gathered weights; one process calls this.

    Args:
        state: full weights by the names of `module.model`, tied ones once.
    """
    model = module.model
    silenced = {name: getattr(model.config, name) for name in module.dropouts}
    vars(model.config).update(module.dropouts)
    try:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    finally:
        vars(model.config).update(silenced)


def _make_saveable(model) -> None:
    """Mend a generation_config that transformers reads but refuses to write, as Llama-2's: found out at the end of a
    run, it would cost the run. Sampling does not use it."""
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True  # what its temperature and top_p meant
        try:
            generation.validate(strict=True)
        except ValueError:
            model.generation_config = GenerationConfig(
                eos_token_id=generation.eos_token_id, pad_token_id=generation.pad_token_id
            )


def _with_dropout(config, probability: float) -> tuple:
    """The configuration with every dropout probability replaced, and what they were, for the saved model's sake."""
    dropouts = {name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    for name in dropouts:
        setattr(config, name, probability)
    return config, dropouts


def _require_family(config, mapping, what: str, path: str) -> None:
    kind = type(config)
    # BERT and its like are offered as causal models too; what is trained on masked words is told apart by that.
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    if kind not in mapping or not decoder or config.is_encoder_decoder:
        raise UserError(
            f"{what}: {path} is of type {config.model_type!r}, which is not a decoder-only model that "
            "transformers offers for this role. Give one, such as Llama, Qwen, OPT or GPT-2."
        )


def _is_deepspeed_chat_scorer(path: str) -> bool:
    weights = Path(path) / "pytorch_model.bin"
    if not zipfile.is_zipfile(weights):  # none, or in torch's first format, which is older than DeepSpeed-Chat
        return False
    return "v_head.weight" in torch.load(weights, mmap=True, weights_only=True)


def _deepspeed_chat_state(path: str, prefix: str) -> dict:
    """DeepSpeed-Chat's `rwtransformer.*` and `v_head.weight` under Hugging Face's names."""
    state = torch.load(Path(path) / "pytorch_model.bin", mmap=True, weights_only=True)
    names = {name: name.replace("rwtransformer.", f"{prefix}.", 1).replace("v_head.", "score.", 1) for name in state}
    return {names[name]: tensor for name, tensor in state.items()}


def _deepspeed_chat_padding(config, path: str, what: str) -> None:
    """DeepSpeed-Chat reads the score before the first pad token, and its pad token may be the tokenizer's EOS."""
    tokenizer_config = Path(path) / "tokenizer_config.json"
    if tokenizer_config.is_file() and json.loads(tokenizer_config.read_text()).get("pad_token"):
        config.pad_token_id = read_tokenizer(path, what).pad_token_id
