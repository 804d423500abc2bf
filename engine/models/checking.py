"""Whether what stands at a model's path is what its role needs, looked at before anything large is loaded.

An adapter's folder is as good as its model's: then the base and the adapter are looked at.
"""

import copy
import re
from pathlib import Path

import torch
from transformers import MODEL_MAPPING, PreTrainedTokenizerBase

from engine.errors import UserError
from engine.models.adapter_folders import SCORE, AdapterFolder, read_adapter
from engine.models.classes import CLASSIFIER, LANGUAGE_MODEL, model_class
from engine.models.deepspeed_chat import deepspeed_chat_names, is_deepspeed_chat_scorer
from engine.models.fingerprint import check_base
from engine.models.fit import check_headers, check_weights
from engine.models.openrlhf import ARCHITECTURE, gain_and_offset, head_name, names_for_transformers
from engine.models.places import base_of
from engine.models.reading import has_tokenizer, read_config, read_tokenizer, vocabulary_size
from engine.models.weight_files import Header, headers, weights_folder


def check_policy(path: str, what: str, trust_remote_code: bool = False):
    """The configuration of the language model at `path`, looked at before anything large is loaded.

    trust_remote_code: as for `read_config`.

    Raises: UserError, naming `what` (a flag), if something else stands there, or other weights.
    """
    config, adapter = read_config(path, what, trust_remote_code), read_adapter(path, what)
    base = path if adapter is None else adapter.base
    kind = model_class(config, LANGUAGE_MODEL, base, what, trust_remote_code)
    heads = _scorers(config)
    if is_deepspeed_chat_scorer(base, what):
        heads = ["a reward model of DeepSpeed-Chat"]
    if heads:  # it would load, with random numbers for weights
        raise UserError(f"{what}: {base} is no language model but {heads[0]}. Give the SFT model or a base model.")
    check_weights(base, config, kind, what)
    if adapter is not None:
        if adapter.has_head:
            raise UserError(f"{adapter.told} is a reward model's. Give the SFT model, or an adapter of one.")
        _check_fit(adapter, config, kind)
    return config


def check_trunk(path: str, what: str, trust_remote_code: bool = False):
    """The configuration of the model at `path`, which is to get a new score head.

    Its weights have to be those of the model that it says it is, a language model or another one of the same trunk.

    Raises: UserError, naming `what` (a flag), if transformers has no scorer of its family, or the weights are others.
    """
    config, adapter = read_config(path, what, trust_remote_code), read_adapter(path, what)
    base = path if adapter is None else adapter.base
    kind = classifier = model_class(config, CLASSIFIER, base, what, trust_remote_code)
    if not _scorers(config):
        kind = model_class(config, LANGUAGE_MODEL, base, what, trust_remote_code)
    trunk = MODEL_MAPPING.get(type(config), None)
    if trunk is not None and trunk.__name__ in _heads(config, "Model"):
        kind = trunk  # without any head
    if kind is classifier:
        _check_classifier(base, config, kind, what)
    else:
        check_weights(base, config, kind, what)
    if adapter is not None:
        head = adapter.adapted_head(config, kind) if kind not in (classifier, trunk) else None
        if head is not None:
            raise UserError(
                f"{adapter.told} changes the output head too ({head}), of which a model with a new score head has "
                "none. Give the model that the adapter is merged into (step 1 writes it around the adapter's folder; "
                "peft's merge_and_unload makes it), or an adapter without the head."
            )
        _check_fit(adapter, config, classifier)
    return config


def check_scorer(path: str, what: str, trust_remote_code: bool = False) -> str:
    """Whether a reward model stands at `path`, looked at before anything large is loaded.

    Returns: "sequence_classification" or "deepspeed_chat"; of an adapter that brings the head, "language_model".
    Raises: UserError that says what stands there instead.
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
            f"{adapter.told} is a language model's: neither it nor its base {adapter.base} has a score head. Give a "
            "reward model, or an adapter of one (task_type SEQ_CLS)."
        )
    else:
        check_trunk(adapter.base, what, trust_remote_code)
    pad, rows = adapter.settings().get("pad_token_id"), getattr(config.get_text_config(), "vocab_size", None)
    if pad is not None and rows is not None and pad >= rows:
        raise UserError(f"{adapter.told} has the pad token {pad} in its {SCORE}, and its model knows {rows}. Mend it.")
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
    if is_deepspeed_chat_scorer(path, what):
        config.num_labels = 1
        found = headers(Path(path), what)
        names = deepspeed_chat_names(found, kind.base_model_prefix)
        check_headers({names[name]: header for name, header in found.items()}, path, config, kind, what)
        return "deepspeed_chat"
    if not _scorers(config) and _score_head(path, config, kind, what) is None:
        raise UserError(
            f"{what}: {path} is no reward model but {', '.join(_heads(config, '')) or 'of no named architecture'}. "
            "Give a folder written by training/step2_reward.py or a ForSequenceClassification model with "
            "num_labels = 1."
        )
    _check_classifier(path, config, kind, what)
    gain_and_offset(config, path, what)
    return "sequence_classification"


def _check_classifier(path: str, config, kind, what: str) -> None:
    """Whether the weights are those of a classifier with one label, by its head's rows: config.json may not say."""
    head, is_here = _score_head(path, config, kind, what), weights_folder(path) is not None
    if is_here:
        config.num_labels = 1 if head is None else head.shape[0]
    if config.num_labels != 1:
        way_out = "" if is_here else " If its head has one row all the same, download it, and give its folder."
        raise UserError(
            f"{what}: {path} has num_labels = {config.num_labels}. Give a reward model, which has 1.{way_out}"
        )
    check_weights(path, config, kind, what, names_for_transformers(config))


def _score_head(path: str, config, kind, what: str) -> Header | None:
    """The weight of the score head in the files at `path`; None where there is no head, or no file on this machine yet.

    Raises: UserError where one stands there by another name than config.json gives, or with a bias that the model's
    class has no place for.
    """
    folder, head = weights_folder(path), head_name(config)
    found = headers(folder, what) if folder is not None else {}
    if f"{head}.weight" not in found:
        rows = (name for name, header in found.items() if len(header.shape) == 2 and header.shape[0] == 1)
        other = next((name.removesuffix(".weight") for name in rows if not re.search(r"\.\d+\.", name)), None)
        if other is not None:  # layers have gates of one row
            raise UserError(
                f"{what}: {path} has no {head}.weight, but a head of one row that is called {other}. If its output at "
                "the last token is the score, as OpenRLHF has it, add "
                f'"value_head_prefix": "{other}" to config.json. A value head (v_head.summary of TRL, for one) gives '
                "no scores: then give a reward model."
            )
        return None
    if f"{head}.bias" in found:
        with torch.device("meta"):
            score = kind._from_config(config).score
        if score.bias is None:
            raise UserError(
                f"{what}: the head in {path} has a bias ({head}.bias), for which {kind.__name__} has no place. Add its "
                "number to score_offset in config.json, which scores get here, and take it out of the weights."
            )
    return found[f"{head}.weight"]


def check_rows(tokenizer: PreTrainedTokenizerBase, config, path: str, what: str) -> None:
    """Raise UserError, naming `what` (a flag), if the tokenizer knows tokens for which the model has no embedding."""
    rows, needed = getattr(config.get_text_config(), "vocab_size", None), vocabulary_size(tokenizer)
    if rows is not None and rows < needed:
        raise UserError(
            f"{what}: the tokenizer in {path} has ids up to {needed - 1}, the model's embedding {rows} rows. Take the "
            "added tokens out of the tokenizer, or give the model their rows (resize_token_embeddings)."
        )


def check_vocabularies(
    actor_tokenizer: PreTrainedTokenizerBase, path: str, what: str, trust_remote_code: bool = False
) -> None:
    """Refuse a reward model that would read the actor's tokens as other words.

    Raises: UserError if its embedding has fewer rows than the tokenizer has tokens, or its own tokenizer differs.
    """
    rows = getattr(read_config(path, what, trust_remote_code), "vocab_size", None)
    needed = vocabulary_size(actor_tokenizer)
    if rows is not None and rows < needed:
        raise UserError(
            f"{what}: {path} knows {rows} tokens, the actor's tokenizer has {needed}. The reward model "
            "must be trained with the actor's tokenizer."
        )
    if not any(has_tokenizer(folder) for folder in (path, base_of(path, what))):
        return
    own = read_tokenizer(path, what, trust_remote_code=trust_remote_code)
    differing = own.get_vocab().items() ^ actor_tokenizer.get_vocab().items()
    if differing - {(actor_tokenizer.pad_token, actor_tokenizer.pad_token_id)}:  # which the run may have added
        raise UserError(
            f"{what}: the tokenizer in {path} gives other ids than the actor's. The reward model must be "
            "trained with the actor's tokenizer."
        )


def _scorers(config) -> list[str]:
    """The classes of reward models that the configuration says its weights are of."""
    return [name for name in _heads(config, "") if name.endswith("ForSequenceClassification") or name == ARCHITECTURE]


def _heads(config, ending: str) -> list[str]:
    """The classes of this ending that the configuration says its weights are of."""
    return [name for name in config.architectures or [] if name.endswith(ending)]
