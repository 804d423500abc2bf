"""Whether what stands at a model's path is what its role needs, looked at before anything large is loaded."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from engine.errors import UserError
from engine.models.deepspeed_chat import is_deepspeed_chat_scorer
from engine.models.reading import read_config, read_tokenizer, vocabulary_size
from engine.models.weight_files import check_weights


def check_policy(path: str, what: str):
    """The configuration of the language model at `path`, looked at before anything large is loaded.

    Raises: UserError, naming `what` (a flag), if something else stands there.
    """
    config = read_config(path, what)
    _require_family(config, MODEL_FOR_CAUSAL_LM_MAPPING, what, path)
    heads = [name for name in config.architectures or [] if name.endswith("ForSequenceClassification")]
    if is_deepspeed_chat_scorer(path):
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
    if is_deepspeed_chat_scorer(path):
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
    differing = read_tokenizer(path, what).get_vocab().items() ^ actor_tokenizer.get_vocab().items()
    if differing - {(actor_tokenizer.pad_token, actor_tokenizer.pad_token_id)}:  # which the run may have added
        raise UserError(
            f"{what}: the tokenizer in {path} gives other ids than the actor's. The reward model must be "
            "trained with the actor's tokenizer."
        )


def _require_family(config, mapping, what: str, path: str) -> None:
    kind = type(config)
    # BERT and its like are offered as causal models too, but they were trained on masked words.
    decoder = kind in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_MASKED_LM_MAPPING
    if kind not in mapping or not decoder or config.is_encoder_decoder:
        raise UserError(
            f"{what}: {path} is of type {config.model_type!r}, which is not a decoder-only model that "
            "transformers offers for this role. Give one, such as Llama, Qwen, OPT or GPT-2."
        )
