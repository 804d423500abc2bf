"""What a run takes from a model's folder beside its weights: how many positions it has, which tokens end a response."""

from collections.abc import Iterable
from pathlib import Path

from transformers import GenerationConfig

from engine.errors import UserError
from engine.models.places import base_of, one_line
from engine.models.reading import read_config
from training.config.flags import RunFlags
from training.data.tokens import stop_token_ids


def generation_stops(path: str, tokenizer, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The tokens that end a response of the model at `path`: the one thing taken from its generation_config.

    Raises: UserError where that is broken.
    """
    path = base_of(path, "model")
    try:
        generation = GenerationConfig.from_pretrained(path)
    except Exception as error:  # whatever wrong values lead transformers to
        if isinstance(error, OSError) and not (Path(path) / "generation_config.json").is_file():
            generation = None
        else:
            raise UserError(
                f"{path}/generation_config.json is broken ({type(error).__name__}: {one_line(error)}). Mend or remove "
                "it."
            ) from None
    return tuple(stop_token_ids(tokenizer, generation, read_config(path, "model", trust_remote_code)))


def check_positions(config, model: str, **lengths: int) -> None:
    """Raise UserError where sequences of these flags' lengths, added up, have more tokens than a model has positions.

    model: how the message names it.
    """
    longest, total = _positions(config), sum(lengths.values())
    if longest is not None and total > longest:
        given = " and ".join(f"--{name} {value}" for name, value in lengths.items())
        raise UserError(
            f"{given}: sequences may have {total} tokens, but {model} has {longest} positions. Lower "
            f"{'them' if len(lengths) > 1 else 'it'}."
        )


def most_tokens(args: RunFlags, models: Iterable[str | None], beside: int = 0) -> int | None:
    """How many tokens there are positions for, in all of the models that are here, beside `beside` others.

    None where there is no model, or none has a number of positions. Raises UserError for a model that is none.
    """
    here = [path for path in models if path is not None and args.looks_at(path)]
    counts = [_positions(read_config(path, "model", args.trust_remote_code)) for path in here]
    known = [count for count in counts if count is not None]
    return min(known) - beside if known else None


def _positions(config) -> int | None:
    return getattr(config, "max_position_embeddings", None)


def model_notes(args: RunFlags, *flags: str) -> list[str]:
    """What a run makes of settings in a config.json that change training or scores elsewhere: a line of each, with the
    flags, of these, that give such models."""
    notes: dict[str, list[str]] = {}
    for flag in flags:
        path = getattr(args, flag)
        if path is None or not args.looks_at(path):
            continue
        config = read_config(path, f"--{flag}", args.trust_remote_code)
        if getattr(config, "output_router_logits", False):
            note = "no balancing loss is trained with, which config.json asks for (output_router_logits)"
            notes.setdefault(note, []).append(f"--{flag}")
        if hasattr(config, "mean") and hasattr(config, "std"):
            used = getattr(config, "normalize_reward", False)
            note = "scores are (score - mean) / std" if used else "scores stay without mean and std"
            note += f" of config.json (OpenRLHF's normalize_reward is {str(used).lower()})"
            notes.setdefault(note, []).append(f"--{flag}")
    return [f"{', '.join(names)}: {note}" for note, names in notes.items()]


PRETRAINING_RECORD = "critic_pretraining.json"
"""In the folder of a critic that was pretrained: how. It tells such a folder from a reward model's."""


def is_pretrained_critic(path: str) -> bool:
    """Whether a critic stands at `path` that a run has pretrained and saved."""
    return (Path(path) / PRETRAINING_RECORD).is_file()
