"""A merged model as a Hugging Face folder with its tokenizer and a note of where it comes from."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from engine.errors import UserError
from engine.models.places import base_of
from engine.models.reading import read_config
from engine.models.saving import save_tokenizer
from engine.models.weight_files import weights_folder
from engine.whole_files import PARTIAL, sync_tree
from training.merge.same_kind import SFT
from training.merge.weights import MergedWeights
from training.reporting.model_card import add_merge_card
from training.restarts.export import write_weights

MODEL, NOTE = "model", "merged_from.json"
BESIDE = ("config.json", "generation_config.json", "*.py")
"""What a folder needs beside weights and tokenizer: the SFT model's."""


def save_merged(
    weights: MergedWeights,
    sft: str,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    source: Mapping[str, object],
    max_shard_size: str,
    trust_remote_code: bool = False,
) -> Path:
    """Write the model to `folder`, which must not be there; it is there whole or not at all. Returns the folder.

    sft: the SFT model's path, whose configuration it gets. tokenizer: that model's. source: what stands in the note.
    Raises: UserError where the folder is there, or cannot be written.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already. Move it away, or give another --output_dir.")
    stored = weights_folder(base_of(sft, SFT))
    assert stored is not None, "stored_weights has looked"
    partial = folder.with_name(f"{folder.name}.{os.getpid()}{PARTIAL}")
    try:
        partial.mkdir(parents=True)
        write_weights(weights, max_shard_size, partial)
        for pattern in BESIDE:
            for file in stored.glob(pattern):
                shutil.copyfile(file, partial / file.name)
        if not getattr(read_config(sft, SFT, trust_remote_code), "tie_word_embeddings", False):
            config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
            if config.get("tie_word_embeddings", True):  # whatever was copied: the weights have a head of their own
                text = json.dumps(config | {"tie_word_embeddings": False}, indent=2) + "\n"
                (partial / "config.json").write_text(text, encoding="utf-8")
        save_tokenizer(tokenizer, partial)
        (partial / NOTE).write_text(json.dumps(dict(source), indent=2) + "\n", encoding="utf-8")
        add_merge_card(partial, source)
        sync_tree(partial)
        partial.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}). Make room, or give another folder.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
