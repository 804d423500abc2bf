"""Tiny models saved as DeepSpeed-Chat saves them."""

import json

import torch
from transformers import AutoModel, AutoModelForCausalLM

from scripts.harness.models import make_causal_lm


def deepspeed_chat_reward(folder, family, pad_is_eos=False, **config):
    """A reward model as DeepSpeed-Chat's step 2 leaves it: (folder, trunk, head); config: what config.json says."""
    make_causal_lm(folder, family, pad_is_eos=pad_is_eos)
    trunk = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(4))
    state = {f"rwtransformer.{name}": tensor for name, tensor in trunk.state_dict().items()} | {"v_head.weight": head}
    if family == "llama":  # which the transformers of its day kept in the weights
        state["rwtransformer.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    saved = json.loads((folder / "config.json").read_text())
    assert saved["architectures"][0].endswith("ForCausalLM")
    (folder / "config.json").write_text(
        json.dumps(saved | {"pad_token_id": 1} | config)
    )  # the tokenizer's is what counts
    return str(folder), trunk, head[0]


def deepspeed_chat_actor(folder, **format):
    """An OPT as DeepSpeed-Chat's step 1 leaves it: (folder, model)."""
    model = AutoModelForCausalLM.from_pretrained(make_causal_lm(folder, "opt", tied=True), dtype=torch.float32).eval()
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin", **format)
    return str(folder), model
