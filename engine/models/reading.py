"""Reads a model's configuration, class and tokenizer, before anything large is loaded.

The class is one of transformers', or one from the model's folder if that is allowed.

Whether the output head is a matrix of its own is decided here, by the weight files. Where config.json says that head
and embedding are one (`tie_word_embeddings`), and the files hold two matrices that differ, transformers loads both;
peft's merge_and_unload leaves such folders where one of the two was trained. Under ZeRO-3 it cannot compare them, as
both are partitioned, and drops the head. Whatever is built by the configuration, from engines and copies to memory
plans, then has that head too.

Each system has its own rule for the pad token: the field `pad_token` of its dialect. A system that takes
`ids != pad` for what is real cannot tell EOS from padding where EOS pads. It then does not learn EOS, and reads the
score one token earlier, so the rule belongs to what the system computes.
"""

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)
from transformers.utils import import_utils, is_kernels_available
from transformers.utils.chat_template_utils import render_jinja_template

from engine.algorithms.dialect import Dialect
from engine.errors import UserError, shortened
from engine.files import read_text, refuse_pointers
from engine.models.places import base_of, one_line, require_model
from engine.models.weight_files import file_names, mapped_tensors, weight_files, weights_folder

LANGUAGE_MODEL, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
_CLASSES = {LANGUAGE_MODEL: MODEL_FOR_CAUSAL_LM_MAPPING, CLASSIFIER: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING}


def model_class(config: PretrainedConfig, kind: str, path: str, what: str, trust_remote_code: bool = False) -> Any:
    """The class that a model of this configuration is built as.

    kind: LANGUAGE_MODEL or CLASSIFIER. trust_remote_code: whether a class in the model's folder, of which its
    `auto_map` speaks, goes before one of transformers'.

    Raises: UserError, naming `what` (a flag), where it is no decoder-only model or there is no such class.
    """
    own = (getattr(config, "auto_map", None) or {}).get(kind) if trust_remote_code else None
    if own is not None:
        try:
            found = get_class_from_dynamic_module(own, base_of(path, what))
            found.register_for_auto_class(kind)  # so that its code is saved with the model
            return add_generation_mixin_to_remote_model(found)
        except Exception as error:  # whatever the folder's code raises
            raise UserError(
                f"{what}: {path} names {own} as its class, and importing it raised {type(error).__name__}: "
                f"{str(error)[:300]}. Mend the folder's code."
            ) from None
    family = type(config)
    # BERT and its like are offered as causal models too, but they were trained on masked words.
    decoder = family in MODEL_FOR_CAUSAL_LM_MAPPING and family not in MODEL_FOR_MASKED_LM_MAPPING
    if family not in _CLASSES[kind] or not decoder or config.is_encoder_decoder:
        raise UserError(
            f"{what}: {path} is of type {config.model_type!r}, which is not a decoder-only model that "
            "transformers offers for this role. Give one, such as Llama, Qwen, OPT or GPT-2."
        )
    return _CLASSES[kind][family]


ROWS = 1 << 12  # of the two matrices, compared at a time


def has_own_head(config: PretrainedConfig, path: str, what: str, trust_remote_code: bool = False) -> bool:
    """Whether the weight files at `path` hold an output head other than the embedding to which it would be tied.

    config: as config.json has it; where that ties nothing there is nothing to decide, and this is False. So it is where
    the files are not on this machine, or are broken, which is for those to refuse who load them.
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
    """Whether the files have both tensors of a pair, with different numbers. _files: the files with sizes and times, a
    key of the cache."""
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
    """Give the tokenizer of the language model at `path` the pad token of a rule; EOS where the rule finds none.

    Args:
        rule: "tokenizer": the tokenizer's own.
            "never_eos": its own, unless that is EOS or there is none: then "[PAD]" is added, if there is room.
            "padding": its own; where there is none "<|padding|>", or what the tokenizer takes for that text: its
            unknown token, which is EOS for GPT-2.
            "eos": EOS.
            "eos_unless_llama": EOS; but if the model has "llama" in its name, the tokenizer's own; where there is none
            "[PAD]" is added, if there is room.
        room: whether the model has a row of its embedding to spare for a token that is added.

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
    """The pad token of a new classifier's configuration: None where it doubles as EOS, so that Hugging Face's own
    pooling cannot take a final EOS for padding."""
    return None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id


def pad_token_line(tokenizer, dialect: Dialect, path: str) -> str:
    """The line about the pad token that a run prints; "" if nothing that the dialect computes depends on it."""
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
    """The model configuration at `path`, of an adapter's folder its base's; output head and embedding are tied in it
    only if they are in the weight files too.

    trust_remote_code: whether code in the model's folder may run, where its `auto_map` names some, and code that its
    config.json would have fetched from the Hub.

    Raises: UserError, naming `what` (a flag), if there is none, or it cannot be read or built without such code.
    """
    require_model(path, what)
    path = base_of(path, what)
    try:
        config = copy.deepcopy(_parsed_config(path, trust_remote_code, _files_of(path)))
        config.output_attentions = False  # torch's attention has none to give, and transformers would refuse
    except Exception as error:  # whatever a broken config.json leads transformers to
        _refuse_code(error, path, what)
        if Path(path).is_dir():
            raise UserError(
                f"{what}: {path}/config.json describes no model ({one_line(error)}). Mend it, or give another model."
            ) from None
        raise UserError(
            f"{what}: no model at {path!r} ({one_line(error)}). Give a Hugging Face folder or hub name."
        ) from None
    if not trust_remote_code:
        _refuse_fetched_code(config, path, what)
    names = config.architectures
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(
            f"{what}: {path}/config.json names no class of its weights: architectures is {shortened(names)}. Make it a "
            'list of one name, such as ["LlamaForCausalLM"].'
        )
    if has_own_head(config, path, what, trust_remote_code):
        config.tie_word_embeddings = False
    return config


@lru_cache(maxsize=16)
def _parsed_config(path: str, trust_remote_code: bool, _files: tuple) -> PretrainedConfig:
    """What transformers makes of a folder's config.json; _files: as `_files_of` gives them."""
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def _files_of(path: str) -> tuple:
    """A folder's files with their sizes and times, by which a change of the folder shows; none for a name on the Hub.

    A folder that cannot be listed, or that changes meanwhile, is never the same as before.
    """
    folder = Path(path)
    try:
        files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else ()
        return tuple((file.name, _stamp(file)) for file in files)
    except OSError:
        return (object(),)


def _stamp(file: Path) -> tuple[int, ...]:
    """What of a file changes with its content: size, times in nanoseconds, and which file it is."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def read_tokenizer(
    path: str,
    what: str,
    pad_token: str = "tokenizer",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`, left-padding, with the pad token that the rule `pad_token` gives it (`set_pad_token`).

    An adapter's folder need not have one: then it is that of its base.

    trust_remote_code: as for `read_config`. chat_template: a file whose template takes the place of its own.

    Raises: UserError, naming `what` (a flag), if there is none or it has neither pad nor EOS.
    """
    require_model(path, what)
    if not has_tokenizer(path):
        path = base_of(path, what)
    refuse_pointers(_tokenizer_files(Path(path)), what)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=trust_remote_code)
        # Some settings of wrong kinds are found in use alone.
        tokenizer.decode(tokenizer("a text").input_ids + tokenizer.all_special_ids)
        ends = tokenizer.pad_token_id, tokenizer.eos_token_id
    except Exception as error:  # whatever broken files lead transformers to
        _refuse_code(error, path, what)
        raise UserError(f"{what}: no tokenizer at {path!r} ({one_line(error)}). Save one beside the model.") from None
    if ends == (None, None):
        raise UserError(f"{what}: the tokenizer at {path!r} has neither a pad nor an EOS token. Set one.")
    rows = read_config(path, what, trust_remote_code).get_text_config().vocab_size if pad_token != "tokenizer" else 0
    set_pad_token(tokenizer, pad_token, path, room=vocabulary_size(tokenizer) < rows)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
    return tokenizer


def read_chat_template(path: str) -> str:
    """The chat template in the file that --chat_template names. Raises: UserError where there is none."""
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
        render_jinja_template([], chat_template=text)  # of no dialogues: it is compiled and not run
    except Exception as error:  # whatever a broken template leads Jinja to
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise UserError(f"{what}{line}: no valid Jinja ({one_line(error)}). Mend the template.") from None
    return text


def has_tokenizer(path: str) -> bool:
    """Whether a tokenizer stands in the folder `path`."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def _tokenizer_files(folder: Path) -> list[Path]:
    """The files of a tokenizer; beside tokenizer.json vocabularies of the older kinds are passed over."""
    whole = folder / "tokenizer.json"
    always = [folder / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    return [*always, *([whole] if whole.exists() else map(folder.joinpath, VOCABULARIES))]


def _refuse_code(error: Exception, path: str, what: str) -> None:
    """Raise UserError if the failure is that code in the model's folder may not run."""
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{what}: {path} brings code of its own (`auto_map` in its JSON files), without which it cannot be read. "
            "None of it was run. Look at its .py files, and give --trust_remote_code if you trust them."
        ) from None


def _refuse_fetched_code(config: PretrainedConfig, path: str, what: str) -> None:
    """Raise UserError where transformers would fetch code from the Hub for what config.json names, and run it."""
    for name in ("attn_implementation", "experts_implementation"):
        for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
            value = getattr(part, f"_{name}", None)
            if value is not None and _is_fetched(value):
                raise UserError(
                    f"{what}: {path}/config.json has {shortened(value)} as its {name}, code that would be fetched from "
                    "the Hugging Face Hub and run. None was. Take it out of the file, or give --trust_remote_code if "
                    "you trust it."
                )


def _is_fetched(implementation: object) -> bool:
    """Whether it is a repository's name, or one of those for which transformers has a repository where `kernels` is
    installed, and the package that has its code is not."""
    if not isinstance(implementation, str) or "/" in implementation:
        return True
    name = implementation.removeprefix("paged|")
    if name.startswith("flash_attention_"):
        return is_kernels_available() and not getattr(import_utils, f"is_flash_attn_{name[-1]}_available", bool)()
    return is_kernels_available() and name in ("deepgemm", "sonicmoe")


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id that the tokenizer knows."""
    return max(tokenizer.get_vocab().values()) + 1
