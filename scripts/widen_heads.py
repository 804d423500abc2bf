"""Writes a Llama model with wider attention heads that computes the same function: vLLM's CPU kernels want heads of 32
and more numbers, tiny models have fewer.

    python scripts/widen_heads.py MODEL OUTPUT [WIDTH]

Rotary positions turn numbers i and i + d/2 of a head of width d by an angle that falls with i / d. Numbers i of the old
heads go to i * f in heads that are f times as wide, so that each is turned as before; the others are 0. Scores are
divided by the root of the width, so queries are multiplied by the root of f.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def widened(state: dict[str, torch.Tensor], old: int, new: int) -> dict[str, torch.Tensor]:
    """A Llama's weights with heads of `new` numbers in place of `old`, of which it is a multiple."""
    factor = new // old
    half = torch.arange(old // 2) * factor
    places = torch.cat([half, new // 2 + half])

    def wide(name: str, weight: torch.Tensor) -> torch.Tensor:
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj"):
            heads = weight.shape[0] // old
            rows = weight.new_zeros(heads, new, weight.shape[1])
            rows[:, places] = weight.view(heads, old, -1) * (factor**0.5 if kind == "q_proj" else 1.0)
            return rows.view(heads * new, -1)
        if kind == "o_proj":
            heads = weight.shape[1] // old
            columns = weight.new_zeros(weight.shape[0], heads, new)
            columns[:, :, places] = weight.view(-1, heads, old)
            return columns.view(weight.shape[0], -1)
        return weight

    return {name: wide(name, weight) for name, weight in state.items()}


def main(source: str, target: str, width: str = "32") -> int:
    """Write the wide model to `target`; returns the exit status."""
    if Path(target).exists():
        print(f"error: {target} is there already. Name another folder.", file=sys.stderr)
        return 2
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    config = AutoConfig.from_pretrained(source)
    heads, old, new = config.num_attention_heads, config.head_dim, int(width)
    if config.model_type != "llama" or new % old:
        print(
            f"error: {source}: a {config.model_type} model with heads of {old}. Give a Llama, and a multiple of {old}."
        )
        return 2
    config.head_dim = new
    wide = AutoModelForCausalLM.from_config(config).float().eval()
    wide.load_state_dict(widened(model.state_dict(), old, new))
    ids = torch.randint(3, config.vocab_size, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        gap = (model(ids).logits - wide(ids).logits).abs().max().item()
    print(f"{heads} heads of {old} -> {new}; logits of both differ by {gap:.1e} at most")
    assert gap < 1e-4, "not the same function"
    wide.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
