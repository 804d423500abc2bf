"""Models that are configurations alone, and how many numbers they have, by hand."""

from pathlib import Path

from transformers import LlamaConfig

from engine.engine_spec import EngineSpec
from engine.memory.workload import Workload
from engine.zero.config import EngineConfig

WIDTH, MIDDLE, LAYERS, HEADS, VOCABULARY = 64, 176, 3, 4, 1000
LAYER_MATRICES = 4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE  # projections, MLP
LAYER = LAYER_MATRICES + 2 * WIDTH  # and two norms
TRUNK = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH
POLICY, SCORER = TRUNK + VOCABULARY * WIDTH, TRUNK + WIDTH  # an untied output head; a score head
# 16 rows of 24 tokens, decoded all at once: with 8 slots for what is drawn between two looks.
WORKLOAD = Workload(prompt=16, response=8, generated=16, responses=16, micro_batch=4)
CACHE_NUMBERS = 16 * (24 + 8) * 2 * LAYERS * WIDTH


def llama(folder: Path) -> str:
    """A folder with a config.json and nothing else."""
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        pad_token_id=0,
    ).save_pretrained(folder)
    return str(folder)


def spec_of(path: str, stage: int, dtype: str = "bf16", offload: bool = False, **fields) -> EngineSpec:
    """Four engines of the same trunk."""
    return EngineSpec(
        actor_path=path,
        critic_path=path,
        dtype=dtype,
        actor=EngineConfig("actor", stage, offload),
        critic=EngineConfig("critic", stage, offload),
        **fields,
    )
