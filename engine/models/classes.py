"""Which class a model is built as: transformers' own, or one that its folder brings along where that is allowed."""

from typing import Any

from transformers import PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from engine.errors import UserError
from engine.models.places import base_of

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
