"""Models, adapters and a tokenizer small enough for a test, saved as Hugging Face folders.

    actor = make_causal_lm(tmp_path / "actor", "llama", tied=True)
    reward = make_scorer(tmp_path / "reward", "llama", offset=-0.3)
    adapter = make_adapter(tmp_path / "adapter", actor)
    make_family("gemma2", tmp_path)                           # actor and reward of many more families

Weights are random but large (and vectors are not left at 0 and 1), so that logits differ widely between tokens and a
wrong position, mask or bias shows. Every id below VOCABULARY is a token: pad, BOS, EOS and unknown are 0 to 3, the rest
are the words w04 ... w63. A model that a process has made before is written again, not made again.
"""

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Tokenizer,
)

PAD = 0
BOS = 1
EOS = 2
UNK = 3
VOCABULARY = 64
WIDTH = 32
POSITIONS = 64
_SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def make_tokenizer(pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """A word a token, without anything put around a text; `pad_is_eos`: the pad token is </s>, as in many models."""
    vocabulary = {token: index for index, token in enumerate(_SPECIAL.values())}
    vocabulary |= {f"w{index:02d}": index for index in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = _SPECIAL | ({"pad_token": "</s>"} if pad_is_eos else {})
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)


def make_config(family: str, *, tied: bool = False, layers: int = 2, pad_is_eos: bool = False):
    """The configuration of a model of this family, WIDTH wide, with 4 heads."""
    common = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS if pad_is_eos else PAD,
    }
    grouped = {
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    if family in ("llama", "mistral", "qwen2"):
        config = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}[family]
        return config(**common, **grouped, num_key_value_heads=2)
    if family == "gpt_neox":
        return GPTNeoXConfig(**common, **grouped)
    if family == "opt":
        return OPTConfig(
            **common,
            hidden_size=WIDTH,
            ffn_dim=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=POSITIONS,
            word_embed_proj_dim=WIDTH,
        )
    if family == "gpt2":
        return GPT2Config(**common, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=POSITIONS)
    if family == "bloom":
        return BloomConfig(**common, hidden_size=WIDTH, n_layer=layers, n_head=4)
    raise ValueError(f"family {family!r}: known are llama, mistral, qwen2, gpt_neox, opt, gpt2, bloom")


def make_causal_lm(
    folder: Path | str,
    family: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    pad_is_eos: bool = False,
) -> str:
    """Save a language model and its tokenizer; returns the folder."""
    return _written(_causal_lm(family, tied, seed, layers, pad_is_eos), folder)


def make_scorer(
    folder: Path | str,
    family: str = "llama",
    *,
    seed: int = 1,
    layers: int = 2,
    offset: float = 0.0,
    score_position: str = "last",
    pad_is_eos: bool = False,
) -> str:
    """Save a reward model with this `score_offset`, and its tokenizer; returns the folder."""
    return _written(_scorer(family, seed, layers, offset, score_position, pad_is_eos), folder)


def make_process_scorer(folder: Path | str, family: str = "llama", *, seed: int = 3) -> str:
    """Save a token classifier with two labels, and its tokenizer, as TRL's PRMTrainer does; returns the folder."""
    config = make_config(family)
    config.num_labels = 2
    return _written(_files(AutoModelForTokenClassification, config, seed, pad_is_eos=False), folder)


@functools.cache
def _causal_lm(family: str, tied: bool, seed: int, layers: int, pad_is_eos: bool) -> dict[str, bytes]:
    config = make_config(family, tied=tied, layers=layers, pad_is_eos=pad_is_eos)
    return _files(AutoModelForCausalLM, config, seed, pad_is_eos)


@functools.cache
def _scorer(
    family: str, seed: int, layers: int, offset: float, score_position: str, pad_is_eos: bool
) -> dict[str, bytes]:
    config = make_config(family, layers=layers, pad_is_eos=pad_is_eos)
    config.num_labels = 1
    config.score_offset = offset
    config.score_position = score_position
    return _files(AutoModelForSequenceClassification, config, seed, pad_is_eos)


def _files(kind: type, config: PreTrainedConfig, seed: int, pad_is_eos: bool) -> dict[str, bytes]:
    """The files of a model with random weights and of its tokenizer, by name."""
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        save_random(kind.from_config(config, dtype=torch.float32), folder, seed=seed, pad_is_eos=pad_is_eos)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _written(files: dict[str, bytes], folder: Path | str) -> str:
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (Path(folder) / name).write_bytes(content)
    return str(folder)


def save_random(model, folder: Path | str, *, seed: int = 0, pad_is_eos: bool = False) -> str:
    """Give a model of any kind random weights and save it with the tokenizer; returns the folder."""
    return _saved(_randomised(model, seed), folder, pad_is_eos)


@torch.no_grad()
def _randomised(model, seed: int):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():  # tied ones come once
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:
            parameter.copy_(1 + 0.1 * noise)
    return model.eval()


def _saved(model, folder: Path | str, pad_is_eos: bool) -> str:
    model.save_pretrained(folder)
    tokenizer = make_tokenizer(pad_is_eos)
    if model.config.model_type in ("qwen2", "qwen3_5"):
        tokenizer = _qwen2_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _qwen2_tokenizer(known: PreTrainedTokenizerFast) -> Qwen2Tokenizer:
    """A character a token, with the other's special tokens: transformers loads any tokenizer of this family as
    Qwen2Tokenizer, which splits the words of `make_tokenizer`."""
    token_of = {number: token for token, number in known.get_vocab().items()}
    token_of |= dict(enumerate("w0123456789Ġ", start=len(_SPECIAL)))
    vocabulary = {token: number for number, token in token_of.items()}
    return Qwen2Tokenizer(vocabulary, merges=[], padding_side="left", **known.special_tokens_map)


@torch.no_grad()
def make_adapter(folder: Path | str, base: str, *, scorer: bool = False, dim: int = 4, seed: int = 1, **lora) -> str:
    """Save an adapter of a model's folder, of a reward model with its head and an offset if `scorer`; returns it.

    lora: further fields of LoraSpec.
    """
    from engine.models.loading import load_policy, new_scorer  # here, because most tests want no engine
    from engine.models.lora import LoraSpec, adapt
    from training.runtime import model_folders

    module = new_scorer(base, torch.float32, PAD, seed) if scorer else load_policy(base, torch.float32)
    if scorer:
        module.model.config.score_offset = -0.3
    adapt(module, LoraSpec(dim=dim, alpha=6.0, only=True, seed=seed, **lora), "made")
    generator = torch.Generator().manual_seed(seed)
    for _, b in module.adapters.factors().values():
        b.copy_(0.1 * torch.randn(b.shape, generator=generator))
    folder = Path(folder)
    model_folders.save_forms(SimpleNamespace(module=module), make_tokenizer(), folder.parent, folder.name, merged=False)
    return str(folder.with_name(model_folders.adapter_name(folder.name)))


# Of many families, with transformers' own choices but for sizes, and for windows that are shorter than rows: 2 layers,
# WIDTH wide, 4 heads. Every choice of those above is set by hand.
_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_NEOX = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
_LLAMA = _NEOX | {"num_key_value_heads": 2}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_GEMMA = _LLAMA | {"head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# By transformers' name for the family (`model_type`).
FAMILIES: dict[str, dict] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 8},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _LLAMA,
    "qwen3": _GEMMA,
    "gemma": _GEMMA,
    "gemma2": _GEMMA | _WINDOWS | {"query_pre_attn_scalar": 8},
    "gemma3_text": _GEMMA | _WINDOWS | {"query_pre_attn_scalar": 8},
    "phi": _NEOX,
    "phi3": _LLAMA | {"original_max_position_embeddings": POSITIONS},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": {
        "hidden_size": WIDTH,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
        "max_position_embeddings": POSITIONS,
    },
    "gpt_neox": _NEOX,
    "gptj": _GPT2 | {"rotary_dim": 4},
    "opt": {
        "hidden_size": WIDTH,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": WIDTH,
    },
    "bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4},
    "olmo2": _LLAMA,
    "olmo3": _LLAMA | _WINDOWS,
    "smollm3": _LLAMA,
    "glm4": _GEMMA,
    "ministral": _GEMMA | _WINDOWS,
    "qwen3_moe": _GEMMA | _EXPERTS | {"num_experts": 4},
    "gpt_oss": _GEMMA | _WINDOWS | _EXPERTS | {"num_local_experts": 4},
    "deepseek_v3": _NEOX
    | _EXPERTS
    | {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gemma4_text": _GEMMA
    | _WINDOWS
    | {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "llama4_text": _GEMMA
    | _EXPERTS
    | {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
    },
    "qwen3_5_text": _GEMMA | _LINEAR,
    "qwen3_next": _GEMMA | _LINEAR | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "lfm2": _LLAMA | {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": _GEMMA
    | _EXPERTS
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
    },
    "granitemoehybrid": _LLAMA
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 16,
        "logits_scaling": 2.0,
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
    },
}


def family_config(family: str, **changes) -> PreTrainedConfig:
    """The configuration of a tiny model of one of FAMILIES, with these fields changed."""
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    return AutoConfig.for_model(family, **tokens, **FAMILIES[family] | changes)


def make_family(family: str, folder: Path, offset: float = -0.3, **changes) -> None:
    """Save `actor` and `reward`, a reward model with this `score_offset`, of a family, with their tokenizers. changes:
    fields of its configuration."""
    from engine.models.config_and_tokenizer import CLASSIFIER, model_class  # here, because most tests want no engine

    config = family_config(family, **changes)
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder / "actor", seed=0)
    config = family_config(family, **changes)
    config.num_labels = 1
    config.score_offset = offset
    config.score_position = "last"
    kind = model_class(config, CLASSIFIER, family, "reward")
    save_random(kind._from_config(config, dtype=torch.float32), folder / "reward", seed=1)
