"""Whether a language model's output head is a matrix of its own: its weight files decide, as in transformers' own load.

Where config.json says that head and embedding are one (`tie_word_embeddings`), and the files hold two matrices that
differ, transformers loads both; peft's merge_and_unload leaves such folders where one of the two was trained. Under
ZeRO-3 it cannot compare them, as both are partitioned, and drops the head. Hence this is decided before anything is
built, and whatever is built by the configuration, from engines and copies to memory plans, has that head too.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.errors import UserError
from engine.models.classes import LANGUAGE_MODEL, model_class
from engine.models.weight_files import file_names, mapped_tensors, weight_files, weights_folder

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
    return _any_differ(folder, tuple((file, file.stat()[6:9]) for file in files if file.is_file()), pairs)


@lru_cache(maxsize=32)
def _any_differ(folder: Path, _files: tuple, pairs: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]) -> bool:
    """Whether both of a pair are in the files, with other numbers. _files: and their sizes and times, which make the
    answer another one."""
    try:
        stored = mapped_tensors(folder, str(folder))
    except UserError:
        return False
    found = [[next((stored[name] for name in names if name in stored), None) for names in pair] for pair in pairs]
    return any(one is not None and two is not None and not _equal(one, two) for one, two in found)


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    rows = zip(one.split(ROWS), two.split(ROWS))
    return one.shape == two.shape and all(torch.equal(some.float(), others.float()) for some, others in rows)
