"""Classifiers of those families of which transformers has a language model and no classifier, such as LFM2 and Gemma 4.

    from engine.models.classifiers import Lfm2ForSequenceClassification

The class is made when its name is first asked for. It has the layers of the language model of that name
(Lfm2ForCausalLM), and transformers' generic head. A copy of this file is saved with each such model, so that
transformers loads the folder without this program:

    AutoModelForSequenceClassification.from_pretrained("critic", trust_remote_code=True)
"""

import inspect
from typing import Any

import transformers
from transformers.modeling_layers import GenericForSequenceClassification

_ENDING = "ForSequenceClassification"


def __getattr__(name: str) -> Any:
    language_model = getattr(transformers, name.removesuffix(_ENDING) + "ForCausalLM", None)
    config = getattr(language_model, "config_class", None)
    layers = transformers.MODEL_MAPPING.get(config, None) if name.endswith(_ENDING) and config is not None else None
    # The generic class gives its layers a cache under this name. Mamba's take none.
    if layers is None or "past_key_values" not in inspect.signature(layers.forward).parameters:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = next(kind for kind in layers.__mro__ if kind.__name__.endswith("PreTrainedModel"))
    about = {
        "__module__": __name__,  # the module whose file is saved with the model
        "config_class": config,
        "base_model_prefix": family.base_model_prefix or "model",  # Llama 4 gives no name
    }
    made: Any = type(name, (GenericForSequenceClassification, family), about)
    made.register_for_auto_class("AutoModelForSequenceClassification")
    globals()[name] = made
    return made
