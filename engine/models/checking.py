"""Checks, before anything large is loaded, that the model at a path is of the kind that its role needs.

If the path is an adapter folder, both base model and adapter are checked. A resumed run compares the fingerprint of a
model with the fingerprint that was recorded before; this shows whether the weights at the path have changed.
"""

import copy
import hashlib
import inspect
import json
import re
import sys
from pathlib import Path

from transformers import MODEL_MAPPING, PreTrainedTokenizerBase
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from engine.errors import UserError
from engine.files import parsed_json
from engine.models.adapter_folders import BASE, SCORE, AdapterFolder, read_adapter
from engine.models.attention import keeps_states
from engine.models.config_and_tokenizer import (
    CLASSIFIER,
    LANGUAGE_MODEL,
    TOKEN_CLASSIFIER,
    has_tokenizer,
    model_class,
    read_config,
    read_tokenizer,
    vocabulary_size,
)
from engine.models.model_paths import ADAPTER_CONFIG, base_of
from engine.models.reward_formats import (
    ARCHITECTURE,
    LINE,
    STEP_END,
    TOKEN_HEADS,
    deepspeed_chat_names,
    head_name,
    is_deepspeed_chat_scorer,
    is_process_scorer,
    names_for_transformers,
)
from engine.models.weight_files import Header, check_headers, check_weights, headers, weight_files, weights_folder


def check_policy(path: str, what: str, trust_remote_code: bool = False):
    """Check the language model at `path`; returns its configuration. No weights are loaded.

    trust_remote_code: as for `read_config`.

    Raises: UserError, with the flag `what` in its message, if there is no language model at `path`, or its weights do
    not fit its configuration.
    """
    config, adapter = read_config(path, what, trust_remote_code), read_adapter(path, what)
    base = path if adapter is None else adapter.base
    kind = model_class(config, LANGUAGE_MODEL, base, what, trust_remote_code)
    heads = _scorers(config) or (config.architectures if is_process_scorer(config) else [])
    if is_deepspeed_chat_scorer(base, what):
        heads = ["a reward model of DeepSpeed-Chat"]
    if heads:  # its head would load with random weights
        raise UserError(f"{what}: {base} is not a language model but {heads[0]}. Give the SFT model or a base model.")
    check_weights(base, config, kind, what)
    if adapter is not None:
        if adapter.has_head:
            raise UserError(f"{adapter.label} is a reward model's. Give the SFT model, or an adapter of one.")
        _check_fit(adapter, config, kind)
    return config


def check_trunk(path: str, what: str, trust_remote_code: bool = False):
    """Check the model at `path`, which will get a new score head; returns its configuration.

    The model may be a language model, a classifier, or a model without a head. Its weights have to fit its
    configuration.

    Raises: UserError, with the flag `what` in its message, if transformers has no classifier for the model's family, or
    the weights do not fit the configuration; or if it is a process reward model, whose head has two rows.
    """
    config, adapter = read_config(path, what, trust_remote_code), read_adapter(path, what)
    base = path if adapter is None else adapter.base
    if is_process_scorer(config):
        raise UserError(f"{what}: {base} is a process reward model. Give the SFT model or a base model.")
    kind = classifier = model_class(config, CLASSIFIER, base, what, trust_remote_code)
    if not _scorers(config):
        kind = model_class(config, LANGUAGE_MODEL, base, what, trust_remote_code)
    trunk = MODEL_MAPPING.get(type(config), None)
    if trunk is not None and trunk.__name__ in _heads(config, "Model"):
        kind = trunk  # a model without a head
    if kind is classifier:
        _check_classifier(base, config, kind, what)
    else:
        check_weights(base, config, kind, what)
    if adapter is not None:
        head = adapter.adapted_head(config, kind) if kind not in (classifier, trunk) else None
        if head is not None:
            raise UserError(
                f"{adapter.label} changes the output head too ({head}), of which a model with a new score head has "
                "none. Give the model that the adapter is merged into (step 1 writes it around the adapter's folder; "
                "peft's merge_and_unload makes it), or an adapter without the head."
            )
        _check_fit(adapter, config, classifier)
    return config


def check_decoding(path: str, what: str, trust_remote_code: bool = False) -> None:
    """Raise UserError, with the flag `what` in its message, if engine.rollout's sampler cannot draw from the language
    model at `path` (`can_decode`)."""
    config = read_config(path, what, trust_remote_code)
    if not can_decode(model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code), config):
        raise UserError(
            f"{what}: {path} is a {config.model_type} model. Some of its layers keep what is not in transformers' own "
            "cache, so that responses cannot join and leave a batch here. Step 3 may draw from it with "
            "--rollout_backend vllm; elsewhere, give another model."
        )


def can_decode(family, config) -> bool:
    """Whether engine.rollout's sampler can draw from models of this class. It removes rows from a batch and adds other
    rows, so all that layers keep of a row has to be in transformers' own cache: keys and values, or the states of
    linear attention and convolutions. Some families keep states elsewhere; their code never updates such states."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or []) - {"mlp", "moe"}  # these keep nothing
    layers = {DYNAMIC_LAYER_TYPE_MAPPING.get(kind) for kind in kinds} - {DynamicLayer, DynamicSlidingWindowLayer}
    if not all(layer is not None and issubclass(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return False
    if not (keeps_states(config) or getattr(family, "_is_stateful", False)):
        return True
    code = inspect.getsource(sys.modules[family.__module__])
    return "update_conv_state" in code or "update_recurrent_state" in code


def check_scorer(path: str, what: str, trust_remote_code: bool = False) -> str:
    """Check the reward model at `path`; returns its format. No weights are loaded.

    Returns: "sequence_classification", "token_classification" or "deepspeed_chat"; "language_model" for an adapter that
        contains the score head and whose base is a language model.
    Raises: UserError if there is no reward model at `path`; the message says what is there instead.
    """
    adapter = read_adapter(path, what)
    if adapter is None:
        return _check_whole_scorer(path, what, trust_remote_code)
    config, form = read_config(path, what, trust_remote_code), "language_model"
    kind = model_class(config, CLASSIFIER, adapter.base, what, trust_remote_code)
    if _scorers(config) or is_deepspeed_chat_scorer(adapter.base, what):
        form = _check_whole_scorer(adapter.base, what, trust_remote_code)
    elif not adapter.has_head:
        raise UserError(
            f"{adapter.label} is a language model's: neither it nor its base {adapter.base} has a score head. Give a "
            "reward model, or an adapter of one (task_type SEQ_CLS)."
        )
    else:
        check_trunk(adapter.base, what, trust_remote_code)
    adapter.settings()  # raises if they cannot be read
    _check_fit(adapter, config, kind)
    return form


def _check_fit(adapter: AdapterFolder, config, kind) -> None:
    config = copy.deepcopy(config)
    config.num_labels = 1
    adapter.check_fit(config, kind)
    check_base(adapter)


def _check_whole_scorer(path: str, what: str, trust_remote_code: bool) -> str:
    config = read_config(path, what, trust_remote_code)
    kind = model_class(config, CLASSIFIER, path, what, trust_remote_code)
    if is_process_scorer(config):
        _check_token_classifier(path, config, what)
        return "token_classification"
    if is_deepspeed_chat_scorer(path, what):
        config.num_labels = 1
        found = headers(Path(path), what)
        names = deepspeed_chat_names(found, kind.base_model_prefix)
        check_headers({names[name]: header for name, header in found.items()}, path, config, kind, what)
        return "deepspeed_chat"
    if not _scorers(config) and _score_head(path, config, what) is None:
        raise UserError(
            f"{what}: {path} is not a reward model but {', '.join(_heads(config, '')) or 'of no named architecture'}. "
            "Give a folder written by training/step2_reward.py or a ForSequenceClassification model with "
            "num_labels = 1."
        )
    _check_classifier(path, config, kind, what)
    return "sequence_classification"


def _check_token_classifier(path: str, config, what: str) -> None:
    """Check that the folder has the weights of a token classifier with two labels."""
    folder = weights_folder(path)
    if folder is None:
        raise UserError(f"{what}: {path} is a token classifier, which is read from a folder alone. Download it.")
    heads = (headers(folder, what).get(f"{name}.weight") for name in TOKEN_HEADS)
    rows = next((head.shape[0] for head in heads if head is not None), 0)
    if rows != 2:
        raise UserError(
            f"{what}: the token classifier in {path} has {rows} labels. A process reward model has 2: label 1 says "
            "that a step is good."
        )
    config.num_labels = 2
    check_weights(path, config, model_class(config, TOKEN_CLASSIFIER, path, what), what)


def step_end_of(path: str, what: str, trust_remote_code: bool = False) -> tuple[str, bool] | None:
    """How the steps end that the process reward model at `path` was trained on: (the text that ends a step, whether the
    end of a response ends its last step too). None if the reward model at `path` gives one number a response.

    Step 2 of this program writes the text into config.json (into score.json for an adapter), and trains on the end of
    the response. TRL writes nothing; it ends every step with its `step_separator`, which is a newline by default.
    """
    adapter, config = read_adapter(path, what), read_config(path, what, trust_remote_code)
    text = getattr(config, STEP_END, None) if adapter is None else adapter.step_end
    if text is None and not is_process_scorer(config):
        return None
    return (LINE, False) if text is None else (text, True)


def _check_classifier(path: str, config, kind, what: str) -> None:
    """Check that the weights are those of a classifier with one label, whose head has one row. The number of labels in
    config.json may be missing or wrong, so the head's shape decides."""
    head, is_here = _score_head(path, config, what), weights_folder(path) is not None
    if is_here:
        config.num_labels = 1 if head is None else head.shape[0]
    if config.num_labels != 1:
        way_out = "" if is_here else " If its head has one row all the same, download it, and give its folder."
        raise UserError(
            f"{what}: {path} has num_labels = {config.num_labels}. Give a reward model, which has 1.{way_out}"
        )
    check_weights(path, config, kind, what, names_for_transformers(config))


def _score_head(path: str, config, what: str) -> Header | None:
    """The header of the score head's weight in the files at `path`; None if the files have no score head, or if no file
    is on this machine yet.

    Raises: UserError if the head's name is not the one that follows from config.json.
    """
    folder, head = weights_folder(path), head_name(config)
    found = headers(folder, what) if folder is not None else {}
    if f"{head}.weight" not in found:
        rows = (name for name, header in found.items() if len(header.shape) == 2 and header.shape[0] == 1)
        other = next((name.removesuffix(".weight") for name in rows if not re.search(r"\.\d+\.", name)), None)
        if other is not None:  # gates within layers may have one row too
            raise UserError(
                f"{what}: {path} has no {head}.weight, but a head of one row that is called {other}. If its output at "
                "the last token is the score, as OpenRLHF has it, add "
                f'"value_head_prefix": "{other}" to config.json. A value head (v_head.summary of TRL, for one) gives '
                "no scores: then give a reward model."
            )
        return None
    return found[f"{head}.weight"]


def check_rows(tokenizer: PreTrainedTokenizerBase, config, path: str, what: str) -> None:
    """Raise UserError, with the flag `what` in its message, if the tokenizer has tokens for which the model has no
    embedding."""
    rows, needed = getattr(config.get_text_config(), "vocab_size", None), vocabulary_size(tokenizer)
    if rows is not None and rows < needed:
        raise UserError(
            f"{what}: the tokenizer in {path} has ids up to {needed - 1}, the model's embedding {rows} rows. Take the "
            "added tokens out of the tokenizer, or give the model their rows (resize_token_embeddings)."
        )


def check_vocabularies(
    actor_tokenizer: PreTrainedTokenizerBase, path: str, what: str, trust_remote_code: bool = False
) -> list[str]:
    """Check that each token id stands for the same token in the reward model and in the actor. Returns a line if that
    cannot be told and is unlikely: the folder has no tokenizer, and the embedding has far more rows than the actor's
    tokenizer has tokens, more than padding explains. Else it returns [].

    Raises: UserError if the reward model's embedding has fewer rows than the actor's tokenizer has tokens, or if the
    reward model's own tokenizer assigns other ids.
    """
    rows = getattr(read_config(path, what, trust_remote_code), "vocab_size", None)
    needed = vocabulary_size(actor_tokenizer)
    if rows is not None and rows < needed:
        raise UserError(
            f"{what}: {path} knows {rows} tokens, the actor's tokenizer has {needed}. The reward model "
            "must be trained with the actor's tokenizer."
        )
    own = own_tokenizer(path, what, trust_remote_code)
    if own is not None and has_other_ids(actor_tokenizer, own):
        raise UserError(
            f"{what}: the tokenizer in {path} gives other ids than the actor's, which this model would read. A critic "
            "needs the actor's tokenizer. A reward model does not: name it with --reward_model_name_or_path alone, and "
            "it gets texts."
        )
    if own is None and rows is not None and rows > 1.05 * needed + 128:  # the most padded known models have 2.4 % more
        return [
            f"{what} {path}: reads the actor's token ids, since its folder has no tokenizer; its embedding has {rows} "
            f"rows, the actor's tokenizer {needed} tokens. If its tokenizer is another one, put that into the folder"
        ]
    return []


def reads_texts(
    actor_tokenizer: PreTrainedTokenizerBase,
    path: str,
    what: str,
    trust_remote_code: bool = False,
    messages: bool | None = None,
) -> bool:
    """Whether the reward model at `path` writes texts in other ids than the actor, so that it has to get texts.

    It does if its vocabulary is another one, if its tokenizer begins or ends a text otherwise (BOS, EOS), or if its
    chat template is another one. A folder without a tokenizer, or without a template, is taken to have the actor's.

    messages: whether the prompts are messages, which the template begins and ends, or texts, for which there is no
    template; None if that is not known, or if there are both.
    Raises: UserError, with the flag `what` in its message, if the tokenizer cannot be read.
    """
    own = own_tokenizer(path, what, trust_remote_code)
    if own is None:
        return False
    other_template = own.chat_template is not None and own.chat_template != actor_tokenizer.chat_template
    other_ends = _written(own) != _written(actor_tokenizer)
    return (
        has_other_ids(actor_tokenizer, own)
        or (messages is not False and other_template)
        or (messages is not True and other_ends)
    )


def has_other_ids(actor_tokenizer: PreTrainedTokenizerBase, own: PreTrainedTokenizerBase) -> bool:
    """Whether an id stands for another token in the tokenizer `own` than in the actor's."""
    differing = own.get_vocab().items() ^ actor_tokenizer.get_vocab().items()
    return bool(differing - {(actor_tokenizer.pad_token, actor_tokenizer.pad_token_id)})  # the run may have added it


def _written(tokenizer: PreTrainedTokenizerBase) -> list[int | None]:
    """The ids of a text, with the tokens that the tokenizer puts before it, and EOS."""
    ids, eos = tokenizer("a text")["input_ids"], tokenizer.eos_token_id
    return ids if ids[-1:] == [eos] else [*ids, eos]


def own_tokenizer(path: str, what: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a reward model's folder, or that of its adapter's base, brings; None if it brings none."""
    if any(has_tokenizer(folder) for folder in (path, base_of(path, what))):
        return read_tokenizer(path, what, trust_remote_code=trust_remote_code)
    return None


PRETRAINING_RECORD = "critic_pretraining.json"
"""A file in the folder of a pretrained critic, which records the pretraining. A reward model's folder does not have
it."""


def is_pretrained_critic(path: str) -> bool:
    """Whether `path` is the folder of a critic that a run has pretrained and saved."""
    return (Path(path) / PRETRAINING_RECORD).is_file()


def _scorers(config) -> list[str]:
    """The classifiers among the names in the configuration's `architectures`."""
    return [name for name in _heads(config, "") if name.endswith("ForSequenceClassification") or name == ARCHITECTURE]


def _heads(config, ending: str) -> list[str]:
    """The names in the configuration's `architectures` that have this ending."""
    return [name for name in config.architectures or [] if name.endswith(ending)]


BLOCK, BLOCKS = 1 << 16, 64  # the bytes in a block, and the number of blocks read of a file
_OF_A_PLACE = ("base_model_name_or_path", "peft_version", "inference_mode")  # and of an adapter's configuration
_PASSING = ("transformers_version", "_name_or_path")  # what saving a model anew may change in its config.json


def fingerprint(path: str, what: str) -> str | None:
    """The fingerprint of the model at `path`: a hash of its config.json and weight files. If `path` is a name on the
    Hub, the fingerprint is the commit that was fetched, or None if none was fetched yet.

    For each weight file, the hash covers the name, the size, and 64 evenly spaced blocks of 64 KiB, including the first
    and the last bytes. These blocks contain the header and a part of every large tensor. The hash thus reads at most 4
    MiB of a file, which is the whole file if it is no larger. A change between the blocks (of single numbers, or of a
    few rows of a large model) is missed, but training changes every number.

    For an adapter, the hash covers its whole weight file and the fingerprint of its base model.

    Raises: UserError, with the flag `what` in its message, if there are no weights at `path`.
    """
    adapter = read_adapter(path, what)
    if adapter is not None:
        digest, frozen = hashlib.sha256(), frozen_fingerprint(path, what)
        for file in (adapter.file, Path(path) / SCORE):
            digest.update(file.read_bytes() if file.is_file() else b"")
        return None if frozen is None else hashlib.sha256(f"{digest.hexdigest()} {frozen}".encode()).hexdigest()
    folder = weights_folder(path)
    if folder is not None and not Path(path).is_dir():
        return f"commit {folder.name}"
    return contents(path, what)


def contents(path: str, what: str) -> str | None:
    """The hash of a whole model's files, as in `fingerprint`. For a name on the Hub it is the hash of the fetched
    files, or None if they have not been fetched."""
    folder = weights_folder(path)
    if folder is None:
        return None
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _PASSING}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    for file in weight_files(folder, what):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            for start in block_starts(size):
                content.seek(start)
                digest.update(content.read(BLOCK))
    return digest.hexdigest()


def frozen_fingerprint(path: str, what: str) -> str | None:
    """The fingerprint of everything that does not change while LoRA factors train. For a whole model it is the model's
    `fingerprint`. For an adapter it is the base model's fingerprint, a space, and a hash of the adapter's settings
    (layers, ranks, scaling), which leaves out the factors. Raises: UserError, as `fingerprint` does."""
    adapter = read_adapter(path, what)
    if adapter is None:
        return fingerprint(path, what)
    settings = {name: value for name, value in adapter.config.to_dict().items() if name not in _OF_A_PLACE}
    text, base = json.dumps(settings, sort_keys=True, default=sorted), fingerprint(adapter.base, what)
    return None if base is None else f"{base} {hashlib.sha256(text.encode()).hexdigest()}"


def check_base(adapter: AdapterFolder) -> None:
    """Raise UserError if the `contents` of the base model have changed since the adapter's folder recorded them.

    Only adapters that this program saved record the contents of their base model. A base model on the Hub is not
    checked before it has been fetched.
    """
    file = Path(adapter.path) / BASE
    if not file.is_file():
        return
    try:
        found = parsed_json(file.read_text(encoding="utf-8"))
        model, known = found["model"], found["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{adapter.what}: {file} is broken ({type(error).__name__}: {error}). Copy it again.") from None
    if contents(adapter.base, adapter.what) not in (None, known):
        raise UserError(
            f"{adapter.label} does not belong to the weights in its base {adapter.base}: it was trained on {model}, "
            "and since then the weights or config.json have changed. Put that model there, or write its path as "
            f"base_model_name_or_path of its {ADAPTER_CONFIG}. If you know the two to be the same, delete {file}."
        )


def block_starts(size: int) -> list[int]:
    """The offsets at which the blocks start in a file of `size` bytes. The first block starts at 0, and the last block
    ends at the end of the file."""
    if size <= BLOCK * BLOCKS:
        return list(range(0, size, BLOCK))
    return [(size - BLOCK) * number // (BLOCKS - 1) for number in range(BLOCKS)]
