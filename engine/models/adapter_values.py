"""Whether what an adapter's JSON files say can be used: ranks, scalings, layers, and how scores are read."""

import math
from collections.abc import Mapping

from peft import LoraConfig

POSITIONS = ("last", "last_non_pad")  # that a score is read at


def check_config(config: LoraConfig) -> None:
    """Raises: ValueError where a rank is no whole number, names are no texts, or a scaling is no number, or 0, with
    which an adapter changes nothing and cannot learn."""
    for name in ("target_modules", "modules_to_save"):
        value = getattr(config, name)
        if not isinstance(value, str | None) and not _are_texts(value):
            raise ValueError(f"{name} is no list of names: {value!r}")
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(getattr(config, name) or {}, Mapping):
            raise ValueError(f"{name} is no table: {getattr(config, name)!r}")
    for rank in (config.r, *(config.rank_pattern or {}).values()):
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise ValueError(f"a rank is no whole number: {rank!r}")
    for alpha in (config.lora_alpha, *(config.alpha_pattern or {}).values()):
        if not _is_number(alpha) or alpha == 0:
            raise ValueError(f"a scaling (alpha) is 0 or no number: {alpha!r}")


def check_score(settings: Mapping) -> None:
    """Raises: ValueError where a scorer's offset is no number, its position unknown, or its pad token no id."""
    offset, position, pad = (settings[name] for name in ("score_offset", "score_position", "pad_token_id"))
    if not _is_number(offset):
        raise ValueError(f"score_offset is no number: {offset!r}")
    if position not in POSITIONS:
        raise ValueError(f"score_position is none of {', '.join(POSITIONS)}: {position!r}")
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int) or pad < 0):
        raise ValueError(f"pad_token_id is no id: {pad!r}")


def _are_texts(value: object) -> bool:
    return isinstance(value, list | set | tuple) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
