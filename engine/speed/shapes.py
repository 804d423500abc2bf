"""Published models by name: what their config.json says of shapes, and the decoder that follows from it."""

from engine.speed.decoding import Decoder

_LLAMA = {  # meta-llama/Llama-2-*: width, feed-forward width, layers, heads, heads of keys and values
    "llama-2-7b": (4096, 11008, 32, 32, 32),
    "llama-2-13b": (5120, 13824, 40, 40, 40),
    "llama-2-70b": (8192, 28672, 80, 64, 8),
}
_OPT = {  # facebook/opt-*: width, feed-forward width, layers, heads
    "opt-350m": (1024, 4096, 24, 16),
    "opt-1.3b": (2048, 8192, 24, 32),
    "opt-6.7b": (4096, 16384, 32, 32),
    "opt-13b": (5120, 20480, 40, 40),
    "opt-30b": (7168, 28672, 48, 56),
    "opt-66b": (9216, 36864, 64, 72),
}
SHAPES = (*_LLAMA, *_OPT)


def configuration(name: str) -> dict:
    """config.json of a model in SHAPES, as far as shapes follow from it."""
    if name in _LLAMA:
        width, middle, layers, heads, kept = _LLAMA[name]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": middle,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kept,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
        }
    width, middle, layers, heads = _OPT[name]
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": width,
        "ffn_dim": middle,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512 if name == "opt-350m" else width,
        "do_layer_norm_before": name != "opt-350m",
    }


def decoder(name: str, scorer: bool = False, number: int = 2) -> Decoder:
    """The shape of a model in SHAPES; scorer: with a head of one number in place of the vocabulary's."""
    config = configuration(name)
    width, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    if name in _LLAMA:
        kept = 2 * width // config["num_attention_heads"] * config["num_key_value_heads"]
        layer = 2 * width**2 + width * kept + 3 * width * config["intermediate_size"] + 2 * width
        others = vocabulary * width + width + (width if scorer else vocabulary * width)
    else:
        kept, middle, narrow = 2 * width, config["ffn_dim"], config["word_embed_proj_dim"]
        layer = 4 * width**2 + 2 * width * middle + 9 * width + middle  # matrices; biases and norms
        projections = 2 * narrow * width if narrow < width else 0  # in and out
        positions, norm = (config["max_position_embeddings"] + 2) * width, 2 * width
        others = vocabulary * narrow + positions + projections + (norm if config["do_layer_norm_before"] else 0)
        others += narrow if scorer else 0  # the output head is the embedding
    return Decoder(
        parameters=layers * layer + others,
        layers=layers,
        width=width,
        kept=kept,
        vocabulary=vocabulary,
        number=number,
    )
