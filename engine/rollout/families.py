"""What families of models take in a forward pass, found out by asking."""

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.errors import UserError
from engine.experience import position_ids
from engine.models.attention import BY_ROW
from engine.models.reading import LANGUAGE_MODEL, model_class, read_config
from engine.rollout.cache import SlotCache

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers that keep keys and values


def check_attention(path: str, what: str, trust_remote_code: bool = False) -> None:
    """Raise UserError, naming `what` (a flag), if the language model at `path` keeps a state where others keep keys and
    values: the decoding loop has rows come and go, and a state cannot be cut out of its batch."""
    config = read_config(path, what, trust_remote_code)
    family = model_class(config, LANGUAGE_MODEL, path, what, trust_remote_code)
    other = set(getattr(config.get_text_config(), "layer_types", None) or []) - ATTENTION
    if other or getattr(family, "_is_stateful", False):
        raise UserError(
            f"{what}: {path} is a {config.model_type} model, some layers of which keep a state in place of "
            "keys and values. Responses cannot be drawn from such models here. Give one of attention "
            "alone."
        )


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the model takes positions; some families take them from the mask."""
    return "position_ids" in inspect.signature(model.forward).parameters


def takes_slot_masks(model: PreTrainedModel) -> bool:
    """Whether a model understands, for a single token, a ready-made mask (B, 1, 1, slots) of booleans.

    Then Hugging Face's own mask, which is built anew for each token and asks the device for its content, is saved.
    Found out by asking: the same token behind two prompts of different lengths, with either mask. Models of which some
    layers see a part of the slots only are left out, as so few slots would not show it, and attention other than
    torch's own (sdpa), as some adds what it is given to the scores, which a small model would hardly show.
    """
    config = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", BY_ROW):
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "sliding_window", None) is not None:
        return False
    device = next(model.parameters()).device
    ids = (torch.arange(8, device=device).view(2, 4) * 7919) % config.vocab_size
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device=device)
    positions = position_ids(mask)
    named = [{"position_ids": part} if takes_positions(model) else {} for part in (positions[:, :3], positions[:, 3:])]

    def ask(last_mask: Tensor) -> Tensor:
        cache = SlotCache()
        cache.reserve(2, 4)
        cache.window.put(slice(0, 2), 0, 0)
        model(input_ids=ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache, use_cache=True, **named[0])
        cache.window.put(slice(0, 2), 0, 3)
        return model(
            input_ids=ids[:, 3:], attention_mask=last_mask, past_key_values=cache, use_cache=True, **named[1]
        ).logits

    usual = ask(mask)
    try:
        ready = ask(mask.bool()[:, None, None])
    except Exception:  # whatever a family that expects two dimensions trips over
        return False
    return ready.shape == usual.shape and torch.allclose(ready, usual, rtol=1e-3, atol=1e-3)
