"""Reads a model's configuration, class and tokenizer, before anything large is loaded.

The class is one of transformers' classes, or a class in the model's folder if the user allows code from there.

The weight files decide whether the output head is tied to the embedding. config.json may say that both are one matrix
(`tie_word_embeddings`) while the files hold two different matrices; peft's merge_and_unload writes such folders if
one of the two was trained. Without ZeRO-3, transformers loads both matrices of such a folder. Under ZeRO-3,
transformers cannot compare the partitioned matrices, and drops the head. `read_config` returns a configuration without
the tie in this case, so that engines, copies and memory plans all have a separate head.

A composite model has a vision tower, or an audio tower, beside its language model. `read_config` returns the
configuration of the language model, so that the rest of the program sees a language model and nothing else.

Each system has its own rule for the pad token. The field `pad_token` of its dialect names this rule. A system whose
attention mask is `ids != pad` cannot tell EOS from padding if EOS is the pad token. Such a system then does not learn
EOS, and reads the score one token earlier. The rule for the pad token therefore affects the results of a dialect.
"""

import contextlib
import copy
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from transformers import CONFIG_MAPPING, AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)
from transformers.utils import import_utils, is_kernels_available
from transformers.utils.chat_template_utils import render_jinja_template

from engine.algorithms.dialect import Dialect
from engine.errors import UserError, shortened
from engine.files import parsed_json, read_text, refuse_pointers, rust_panics
from engine.models import classifiers
from engine.models.model_paths import base_of, one_line, require_model
from engine.models.weight_files import file_names, mapped_tensors, weight_files, weights_folder

LANGUAGE_MODEL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
TOKEN_CLASSIFIER = "AutoModelForTokenClassification"
_CLASSES = {
    LANGUAGE_MODEL: MODEL_FOR_CAUSAL_LM_MAPPING,
    CLASSIFIER: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    TOKEN_CLASSIFIER: MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}


def model_class(config: PretrainedConfig, kind: str, path: str, what: str, trust_remote_code: bool = False) -> Any:
    """The Python class of a model with this configuration.

    kind: LANGUAGE_MODEL, CLASSIFIER or TOKEN_CLASSIFIER. trust_remote_code: whether a class in the model's folder, if
    the configuration's `auto_map` names one, is preferred to transformers' class.

    Raises: UserError, with the flag `what` in its message, if the model is not decoder-only, or if there is no class
    for it.
    """
    own = (getattr(config, "auto_map", None) or {}).get(kind) if trust_remote_code else None
    if own is not None:
        try:
            found = get_class_from_dynamic_module(own, base_of(path, what))
            found.register_for_auto_class(kind)  # so that the code of the class is saved with the model
            return add_generation_mixin_to_remote_model(found)
        except Exception as error:  # the folder's code may raise anything
            raise UserError(
                f"{what}: {path} names {own} as its class, and importing it raised {type(error).__name__}: "
                f"{str(error)[:300]}. Fix the folder's code."
            ) from None
    family = type(config)
    # transformers has causal classes for BERT and similar models too, but these models were trained on masked words.
    decoder = family in MODEL_FOR_CAUSAL_LM_MAPPING and family not in MODEL_FOR_MASKED_LM_MAPPING
    found = None
    if decoder and not config.is_encoder_decoder:
        name = MODEL_FOR_CAUSAL_LM_MAPPING[family].__name__.replace("ForCausalLM", "ForSequenceClassification")
        found = _CLASSES[kind].get(family, None)
        if found is None and kind == CLASSIFIER:
            found = getattr(classifiers, name, None)
    if found is None:
        raise UserError(
            f"{what}: {path} is of type {config.model_type!r}, which is not a decoder-only model that "
            "transformers offers for this role. Give one, such as Llama, Qwen, OPT or GPT-2."
        )
    return found


ROWS = 1 << 12  # rows of head and embedding that are compared at a time


def has_own_head(config: PretrainedConfig, path: str, what: str, trust_remote_code: bool = False) -> bool:
    """Whether the weight files at `path` hold an output head that differs from the embedding, although the
    configuration ties the two.

    False if the configuration does not tie head and embedding, or if the files are not on this machine or are broken;
    broken files are reported when the model is loaded. config: the configuration as in config.json.
    """
    folder = weights_folder(path) if getattr(config, "tie_word_embeddings", False) else None
    if folder is None:
        return False
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if trust_remote_code and LANGUAGE_MODEL in (getattr(config, "auto_map", None) or {}):
        kind = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)
    tied = getattr(kind, "_tied_weights_keys", None) or {}
    pairs = tuple((file_names(head, kind), file_names(embedding, kind)) for head, embedding in tied.items())
    try:
        files = weight_files(folder, what)
    except UserError:
        return False
    return _any_differ(folder, tuple((file, _stamp(file)) for file in files if file.is_file()), pairs)


@lru_cache(maxsize=32)
def _any_differ(folder: Path, _files: tuple, pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]) -> bool:
    """Whether the files hold both tensors of one of the pairs, with different numbers. pairs: (possible names of the
    head, possible names of the embedding). _files: the files with their sizes and times, so that the cache notices
    changes."""
    try:
        stored = mapped_tensors(folder, str(folder))
    except UserError:
        return False
    found = [[next((stored[name] for name in names if name in stored), None) for names in pair] for pair in pairs]
    return any(one is not None and two is not None and not _equal(one, two) for one, two in found)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    rows = zip(one.split(ROWS), two.split(ROWS))
    return one.shape == two.shape and all(torch.equal(some.float(), others.float()) for some, others in rows)


ADDED = "[PAD]"


def set_pad_token(tokenizer, rule: str, path: str, room: bool) -> None:
    """Set the pad token of the tokenizer of the language model at `path` by a rule. If the rule finds no pad token, EOS
    becomes the pad token.

    Args:
        rule: "tokenizer": the tokenizer's own pad token.
            "never_eos": the tokenizer's own pad token. If it is EOS, or there is none, "[PAD]" is added, if there is
            room. "padding": the tokenizer's own pad token. If there is none, the token whose id the tokenizer gives for
            "<|padding|>", which may be the unknown token (EOS in GPT-2).
            "eos": EOS.
            "eos_unless_llama": EOS, unless `path` contains "llama". If it does, the tokenizer's own pad token; if there
            is none, "[PAD]" is added, if there is room.
        room: whether the model's embedding has a free row for an added token.

    Sources: microsoft/DeepSpeedExamples 83757d9c, dschat/utils/utils.py, `get_tokenizer` ("eos_unless_llama");
    vwxyzjn/summarize_from_feedback_details ee77a9ab, ppo.py, and huggingface/trl f2cd5771, examples/scripts/ppo/ppo.py,
    which add "[PAD]" ("never_eos"); CarperAI/trlx 3340c2f3, trainer/accelerate_base_trainer.py ("padding").
    """
    own, eos = tokenizer.pad_token, tokenizer.eos_token
    if rule == "eos" or (rule == "eos_unless_llama" and "llama" not in path):
        tokenizer.pad_token = eos or own
    elif (rule == "never_eos" and own == eos) or (rule in ("never_eos", "eos_unless_llama") and own is None):
        if room:
            tokenizer.add_special_tokens({"pad_token": ADDED})
    elif rule == "padding" and own is None:
        tokenizer.pad_token_id = tokenizer.convert_tokens_to_ids("<|padding|>")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = eos


def classifier_pad_token_id(tokenizer) -> int | None:
    """The pad token id for the configuration of a new classifier. None if the pad token is EOS, because Hugging Face's
    pooling would take a final EOS for padding."""
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


def pad_token_line(tokenizer, dialect: Dialect, path: str) -> str:
    """The line that a run prints about the pad token; "" if the dialect's results do not depend on the pad token."""
    if dialect.length_rule not in ("not_pad", "before_pad"):
        return ""
    line = f"pad token {tokenizer.pad_token!r}"
    if tokenizer.pad_token != tokenizer.eos_token:
        return line
    why = "the dialect's system cannot tell it from padding"
    if dialect.pad_token == "never_eos":
        why = f"the model has no row for {ADDED!r}, which the dialect's system adds"
    elif dialect.pad_token == "eos_unless_llama" and "llama" in path:
        why = f"the tokenizer's own, or the model has no row for {ADDED!r}, which the dialect's system adds"
    return f"{line}, which is EOS ({why}): EOS is not learned"


VOCABULARIES = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")


def read_config(path: str, what: str, trust_remote_code: bool = False):
    """The configuration of the model at `path`; if `path` is an adapter folder, the configuration of the adapter's base
    model; if it holds a composite model, the configuration of its language model (`text_part`). The result does not tie
    output head and embedding if the weight files hold two different matrices (`has_own_head`).

    trust_remote_code: whether transformers may run code in the model's folder that `auto_map` names, or code from the
    Hub that config.json names.

    Raises: UserError, with the flag `what` in its message, if there is no configuration, or if it cannot be read
    without running such code.
    """
    require_model(path, what)
    path = base_of(path, what)
    try:
        config = copy.deepcopy(_parsed_config(path, trust_remote_code, _files_of(path)))
        check_settings(vars(config))
        config.output_attentions = False  # torch's attention returns no weights, so transformers would refuse True
    except Exception as error:  # transformers may raise anything for a broken config.json
        _refuse_code(error, path, what)
        if Path(path).is_dir():
            raise UserError(
                f"{what}: {path}/config.json describes no model ({one_line(error)}). Correct it, or give another model."
            ) from None
        raise UserError(
            f"{what}: no model at {path!r} ({one_line(error)}). Give a Hugging Face folder or hub name."
        ) from None
    if not trust_remote_code:
        _refuse_fetched_code(config, path, what)
    if not (trust_remote_code and getattr(config, "auto_map", None)):
        config = text_part(config)
    if has_own_head(config, path, what, trust_remote_code):
        config.tie_word_embeddings = False
    return config


_TEXT = ("a text", lambda value: isinstance(value, str))
_NUMBER = ("a finite number", lambda value: isinstance(value, (int, float)) and math.isfinite(value))
# {setting that is read here, where transformers checks nothing: (what it must be, the same as a test)}
_SETTINGS = {
    "architectures": (
        "a list of names",
        lambda value: type(value or []) is list and all(isinstance(each, str) for each in value or []),
    ),
    "value_head_prefix": _TEXT,
    "step_end": _TEXT,
    "score_position": ("last or last_non_pad", ("last", "last_non_pad").__contains__),
    "score_offset": _NUMBER,
    "mean": _NUMBER,
    "std": ("a finite number above 0", lambda value: _NUMBER[1](value) and value > 0),
}


def check_settings(settings: Mapping[str, object]) -> None:
    """Raise ValueError if a model's settings have a value with which it cannot be read or give scores. mean and std
    count where normalize_reward is on, since other programs may write settings of these names."""
    for name, (needed, fits) in _SETTINGS.items():
        read = name in settings and (name not in ("mean", "std") or settings.get("normalize_reward"))
        if read and not fits(settings[name]):
            raise ValueError(f"{name} is {shortened(settings[name])}, and must be {needed}")


# The language models of these composite models have no class of their own. They differ from the models named here in
# their positions, of which an image's tokens have three (row, column, time). A text's three are equal: on texts both
# compute the same, and their weights have the same names.
_ON_TEXTS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_ROTATION_OF_IMAGES = ("type", "mrope_section", "mrope_interleaved")


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the language model within a composite model, with the attribute `text_part_of`: the
    composite model's type. Any other configuration, and one whose language model has no class of its own in
    transformers, is returned as it is.

    Transformers' versions write some settings at the top only: the number of labels, the ids of special tokens, and
    whether head and embedding are tied. Where both levels say something about the tie, the weight files decide
    (`has_own_head`).
    """
    text = getattr(config, "text_config", None)
    if not isinstance(text, PretrainedConfig):
        return config
    if text.model_type in _ON_TEXTS:
        settings = text.to_dict()
        settings["rope_parameters"] = {
            name: value for name, value in text.rope_parameters.items() if name not in _ROTATION_OF_IMAGES
        }
        text = CONFIG_MAPPING[_ON_TEXTS[settings.pop("model_type")]].from_dict(settings)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    # The whole model's texts end by the ids at the top; its classifiers find padding by the id of the language model.
    for name, parts in (("bos", (config, text)), ("eos", (config, text)), ("pad", (text, config))):
        ids = (getattr(part, f"{name}_token_id", None) for part in parts)
        setattr(text, f"{name}_token_id", next((found for found in ids if found is not None), None))
    text.tie_word_embeddings = any(getattr(part, "tie_word_embeddings", False) for part in (config, text))
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    names = [name for name in config.architectures or [] if name.endswith("ForSequenceClassification")]
    if names:
        text.id2label = config.id2label  # the labels and their number
    text.architectures = names or [MODEL_FOR_CAUSAL_LM_MAPPING[type(text)].__name__]
    text.text_part_of = config.model_type
    return text


@lru_cache(maxsize=16)
def _parsed_config(path: str, trust_remote_code: bool, _files: tuple) -> PretrainedConfig:
    """The configuration that transformers reads from a model's config.json. _files: from `_files_of`, so that the cache
    notices changes."""
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _files_of(path: str) -> tuple:
    """The name, size and times of each file in a folder; any change in the folder changes this result. () for a name on
    the Hub."""
    folder = Path(path)
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else ()
    return tuple((file.name, _stamp(file)) for file in files)


def _stamp(file: Path) -> tuple[int, ...]:
    """The size, times in nanoseconds and inode of a file; any change of the file's content changes this result."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def read_tokenizer(
    path: str,
    what: str,
    pad_token: str = "tokenizer",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, set to pad on the left. If `path` is an adapter folder without a tokenizer, it is the
    base model's tokenizer.

    It decodes texts as they are, whatever its files say: with clean_up_tokenization_spaces, as in Llama 3's, the space
    before a full stop would be lost (huggingface/transformers#35175). `save_tokenizer` writes the files' own setting.

    pad_token: the rule for the pad token, as in `set_pad_token`. trust_remote_code: as in `read_config`. chat_template:
    a file with a chat template that replaces the tokenizer's own.

    Raises: UserError, with the flag `what` in its message, if there is no tokenizer, or if it has neither a pad token
    nor an EOS token.
    """
    require_model(path, what)
    if not has_tokenizer(path):
        path = base_of(path, what)
    refuse_pointers(_tokenizer_files(Path(path)), what)
    try:
        with rust_panics():
            tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
            tokenizer.clean_up_tokenization_spaces = False
            # Some invalid settings raise an exception only when the tokenizer is used.
            tokenizer.decode(tokenizer("a text").input_ids + tokenizer.all_special_ids)
        ends = tokenizer.pad_token_id, tokenizer.eos_token_id
    except Exception as error:  # transformers may raise anything for broken files
        _refuse_code(error, path, what)
        raise UserError(f"{what}: no tokenizer at {path!r} ({one_line(error)}). Save one beside the model.") from None
    if ends == (None, None):
        raise UserError(f"{what}: the tokenizer at {path!r} has neither a pad nor an EOS token. Set one.")
    rows = read_config(path, what, trust_remote_code).get_text_config().vocab_size if pad_token != "tokenizer" else 0
    set_pad_token(tokenizer, pad_token, path, room=vocabulary_size(tokenizer) < rows)
    of_processor = Path(path) / "chat_template.json"  # where older folders of composite models have it
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    elif not tokenizer.chat_template and of_processor.is_file():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            tokenizer.chat_template = parsed_json(read_text(of_processor))["chat_template"]
    return tokenizer


def read_chat_template(path: str) -> str:
    """The chat template in the file `path`, the value of --chat_template. Raises: UserError if the file cannot be read
    or is not a Jinja template."""
    what = f"--chat_template {path}"
    refuse_pointers([Path(path)], what)
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{what}: cannot be read ({reason}). Give a text file with a chat template (Jinja).") from None
    if not text.strip():
        raise UserError(f"{what}: the file is empty. Give a text file with a chat template (Jinja).")
    try:
        render_jinja_template([], chat_template=text)  # there are no dialogues, so the template is compiled but not run
    except Exception as error:  # Jinja may raise anything for a broken template
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"{what}{line}: no valid Jinja ({one_line(error)}). Correct the template.") from None
    return text


def has_tokenizer(path: str) -> bool:
    """Whether the folder `path` has files of a tokenizer."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files from which a tokenizer is read: tokenizer.json, or older kinds of vocabulary files if tokenizer.json is
    missing; and the files with the tokenizer's settings."""
    whole = folder / "tokenizer.json"
    always = [folder / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    return [*always, *([whole] if whole.exists() else map(folder.joinpath, VOCABULARIES))]


def _refuse_code(error: Exception, path: str, what: str) -> None:
    """Raise UserError if `error` says that the model needs code from its folder."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{what}: {path} brings code of its own (`auto_map` in its JSON files) and cannot be read without it. None "
            "of this code was run. Look at the .py files, and give --trust_remote_code if you trust them."
        ) from None


def _refuse_fetched_code(config: PretrainedConfig, path: str, what: str) -> None:
    """Raise UserError if config.json names an implementation for which transformers would fetch code from the Hub and
    run it."""
    for name in ("attn_implementation", "experts_implementation"):
        for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
            value = getattr(part, f"_{name}", None)
            if value is not None and _is_fetched(value):
                raise UserError(
                    f"{what}: {path}/config.json has {shortened(value)} as its {name}: code that would be fetched from "
                    "the Hugging Face Hub and run. It was not fetched. Remove it from the file, or give "
                    "--trust_remote_code if you trust it."
                )


def _is_fetched(implementation: object) -> bool:
    """Whether transformers would fetch this implementation from the Hub. It does so if `implementation` names a
    repository. If the package `kernels` is installed, it also does so for implementations for which transformers knows
    a repository: deepgemm, sonicmoe, and flash attention if the package of flash attention is not installed."""
    if not isinstance(implementation, str) or "/" in implementation:
        return True
    name = implementation.removeprefix("paged|")
    if name.startswith("flash_attention_"):
        return is_kernels_available() and not getattr(import_utils, f"is_flash_attn_{name[-1]}_available", bool)()
    return is_kernels_available() and name in ("deepgemm", "sonicmoe")


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest token id of the tokenizer, plus one."""
    return max(tokenizer.get_vocab().values()) + 1


def head_sizes(config: PretrainedConfig) -> tuple[int, int, int]:
    """(number of attention heads, number of heads that have keys and values of their own, width of a head); zeros for
    a model without attention. Those of the first layer if layers differ."""
    config = config.get_text_config()
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[0]
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:
        return 0, 0, 0
    kept = getattr(config, "num_key_value_heads", None) or heads
    return heads, kept, getattr(config, "head_dim", None) or config.hidden_size // heads
