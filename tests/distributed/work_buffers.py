"""Run by one rank: the buffers of models that ZeRO-3 has partitioned, and of the same models as they are."""

import json

from engine.models.loading import DTYPES, load_policy, load_scorer
from engine.zero.config import CONFIG_DIR


def both(folders: list[str], dtype: str) -> dict[str, dict[str, tuple[dict, dict]]]:
    """By folder and kind of model: its buffers by name, partitioned and not."""
    stage3 = json.loads((CONFIG_DIR / "zero3.json").read_text()) | {dtype: {"enabled": True}}
    stage3 |= {"train_micro_batch_size_per_gpu": 1}
    found: dict[str, dict[str, tuple[dict, dict]]] = {}
    for folder in folders:
        found[folder] = {}
        for name, load in (("actor", load_policy), ("reward", load_scorer)):
            path = f"{folder}/{name}"
            models = [load(path, DTYPES[dtype], config) for config in (stage3, None)]
            found[folder][name] = tuple(dict(model.named_buffers()) for model in models)
    return found
