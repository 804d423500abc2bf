"""Models that are configurations alone, and how many numbers they have, by hand."""

from pathlib import Path

from transformers import LlamaConfig

from training.config.parsing import parse_flags
from training.tools.memory.flags import MemoryFlags

WIDTH, MIDDLE, LAYERS, HEADS, VOCABULARY = 64, 176, 3, 4, 1000
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE + 2 * WIDTH  # projections, MLP, and two norms
TRUNK = VOCABULARY * WIDTH + LAYERS * LAYER + WIDTH
POLICY, SCORER = TRUNK + VOCABULARY * WIDTH, TRUNK + WIDTH  # an untied output head; a score head
# 16 rows of 24 tokens, decoded all at once: with 8 slots for what is drawn between two looks.
CACHE_NUMBERS = 16 * (24 + 8) * 2 * LAYERS * WIDTH
SIZES = """--max_prompt_seq_len 16 --max_answer_seq_len 8 --per_device_generation_batch_size 16
    --per_device_training_batch_size 4 --gradient_accumulation_steps 4 --ppo_epochs 2 --num_eval_prompts 0"""


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


def flags_of(path: str, stage: int, more: str = "", critic: str | None = None, dtype: str = "bf16") -> MemoryFlags:
    """The flags of four engines of the same trunk. more: further flags."""
    models = ["--actor_model_name_or_path", path, "--critic_model_name_or_path", critic or path, "--dtype", dtype]
    stages = ["--actor_zero_stage", str(stage), "--critic_zero_stage", str(stage)]
    return parse_flags(MemoryFlags, [*models, *stages, *SIZES.split(), *more.split()], "")
