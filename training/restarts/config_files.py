"""What a restart point holds so that its weights can be made a Hugging Face folder: configurations and tokenizer."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine.models.saving import adapter_files, save_model
from engine.zero.engines import TrainedModel


def config_files(models: Mapping[str, TrainedModel], tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What stands beside the weights of a saved model, whole or an adapter, by "MODEL/FILE"."""
    found = {}
    for name, model in models.items():
        found |= {f"{name}/{file}": text.encode() for file, text in adapter_files(model.module).items()}
        with tempfile.TemporaryDirectory() as folder:
            save_model(model.module, {}, tokenizer, folder)
            for path in sorted(Path(folder).iterdir()):
                if path.suffix != ".safetensors":  # that of no weights
                    found[f"{name}/{path.name}"] = path.read_bytes()
    return found
