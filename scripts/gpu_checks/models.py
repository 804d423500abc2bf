"""Models with random weights, prompts and trainers for checks; and the three programs, run in a check's own process."""

import contextlib
import functools
import importlib
import io
import json
import random
import shutil
import sys
from pathlib import Path
from typing import TextIO
from unittest import mock

import torch
from transformers import OPTConfig, PretrainedConfig

from engine.algorithms import get_dialect
from engine.experience import PromptBatch
from engine.models.attention import Attention
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.benchmark_models import SPREAD, llama_config, save_models
from scripts.gpu_checks.check import Trial
from training.data.tokens import padded
from training.ppo_trainer import PPOConfig, PPOTrainer

LARGE = 60e9  # bytes of a GPU that an actor of 1.3 billion numbers trains on, with a critic of 350 million
TINY = "260k"  # what every Llama becomes in a dry run, and OPT something as small
OPT = {
    "opt-1.3b": dict(hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32),
    "opt-350m": dict(
        hidden_size=1024,
        num_hidden_layers=24,
        ffn_dim=4096,
        num_attention_heads=16,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
}
TINY_OPT = dict(hidden_size=64, num_hidden_layers=2, ffn_dim=128, num_attention_heads=4, vocab_size=512)
LOGITS = 3.0  # their standard deviation, 2 to 4 in trained models: rounding in 16 bits is as large as there
MICRO_BATCH = 8
DIALECT = get_dialect("default").override(ppo_epochs=1, warmup_steps=0, actor_lr=1e-5, critic_lr=1e-5)


def sizes_here(trial: Trial) -> tuple[str, str]:
    """The sizes of actor and critic that train on this GPU, the larger ones if it has memory for them."""
    much = trial.dry or torch.cuda.mem_get_info()[1] >= LARGE
    return ("opt-1.3b", "opt-350m") if much else ("350m", "350m")


def random_models(trial: Trial, size: str, critic_size: str | None = None) -> tuple[str, str]:
    """The folders of an actor, whose logits are as wide as a trained one's, and a reward model, in float32 up to 136m
    and in bf16 beyond; made where they are not there, on the GPU if there is one. Sizes as in `config_of`."""
    folder = trial.models / f"{size}_{critic_size or size}"
    if not folder.exists():
        actor, critic = (config_of(name, trial.dry) for name in (size, critic_size or size))
        critic.vocab_size = actor.vocab_size
        part = Path(f"{folder}.part")  # whole or not there, whenever the check is ended
        shutil.rmtree(part, ignore_errors=True)
        with torch.device("cpu" if trial.dry else "cuda"):
            save_models(part, actor, critic, torch.bfloat16 if actor.hidden_size >= 1024 else torch.float32, LOGITS)
        part.rename(folder)
    return str(folder / "actor"), str(folder / "critic")


def config_of(size: str, dry: bool) -> PretrainedConfig:
    """Of a Llama of scripts/benchmark_models.py's sizes, of "gqa", the 136m one whose heads share keys and values by
    threes, or of an OPT of DeepSpeed-Chat's; in a dry run of a tiny one of its kind."""
    if size in OPT:
        shape = {"word_embed_proj_dim": OPT[size]["hidden_size"]} | OPT[size]
        shape = TINY_OPT | {"word_embed_proj_dim": 64} if dry else shape
        spread = {"init_std": SPREAD * shape["word_embed_proj_dim"] ** -0.5}
        return OPTConfig(**shape, **spread, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = llama_config(TINY if dry else "136m" if size == "gqa" else size)
    if size == "gqa":
        config.num_key_value_heads = 4
    return config


def prompts(rows: int, length: int, vocabulary: int, first: int = 0, ragged: bool = True) -> PromptBatch:
    """Left-padded prompts of `length` / 2 to `length` tokens, or all of `length`, the same whenever these are asked
    for."""
    generator = torch.Generator().manual_seed(first)
    least = max(1, length // 2) if ragged else length
    lengths = torch.randint(least, length + 1, (rows,), generator=generator).tolist()
    lengths[0] = length
    tokens = [torch.randint(4, vocabulary, (count,), generator=generator).tolist() for count in lengths]
    indices = torch.arange(first, first + rows)
    return PromptBatch(*padded(tokens, 0, left=True), indices=indices, samples=torch.zeros_like(indices))


def sampling(tokens: int, recorded: bool = False, ends: tuple[int, ...] = ()) -> SamplingConfig:
    """Responses of so many tokens, or fewer where they meet one of `ends`; with their log-probs if `recorded`."""
    return SamplingConfig(
        max_new_tokens=tokens, pad_token_id=0, stop_token_ids=ends, logprob_temperature=1.0 if recorded else None
    )


def new_trainer(
    trial: Trial,
    *,
    size: str = "136m",
    critic_size: str | None = None,
    stage: int,
    dtype: str,
    tokens: int = 64,
    count: int | None = None,
    ragged: bool = False,
    offload: bool = False,
    backend: str = "auto",
    between_steps: str = "keep",
    packing: str = "auto",
    micro_batch: int = MICRO_BATCH,
    **spec,
) -> PPOTrainer:
    """Four engines at this stage, and a trainer that draws `count` responses of `tokens` tokens, in a dry run 4 of 8.

    ragged: whether responses end sooner, each token with one chance in `tokens`, so that each step has other shapes.
    packing: as in Attention. spec: fields of EngineSpec.
    """
    tokens = 8 if trial.dry else tokens
    count = rows(trial) if trial.dry or count is None else count
    actor, critic = random_models(trial, size, critic_size)
    engine_spec = EngineSpec(
        dtype=dtype,
        actor=EngineConfig("actor", stage, offload),
        critic=EngineConfig("critic", stage, offload),
        **{"actor_path": actor, "critic_path": critic, "attention": Attention(packing=packing)} | spec,
    )
    engine = RLHFEngine.from_pretrained(engine_spec)
    rollouts = build_rollouts(
        backend,
        engine.actor,
        engine.tokenizer,
        others=engine.engines,
        rows_at_once=count,
        row_length=2 * tokens,
        between_steps=between_steps,
        decoding="auto",
    )
    ends = tuple(range(4, 4 + engine.actor.module.model.config.vocab_size // tokens)) if ragged else ()
    return PPOTrainer(
        models=engine,
        rollouts=rollouts,
        dialect=DIALECT,
        config=PPOConfig(
            total_steps=1000,
            micro_batch_size=micro_batch,
            first_kl_bound=None,
            padded=not engine.packs,
        ),
        sampling=sampling(tokens, ends=ends),
    )


def rows(trial: Trial) -> int:
    """How many responses a step has."""
    return 4 if trial.dry else 16


PROGRAMS = {
    1: ("training.step1_sft", "SFTFlags"),
    2: ("training.step2_reward", "RewardFlags"),
    3: ("training.step3_rlhf", "RLHFFlags"),
}


def program(step: int, **flags: object) -> str:
    """Run the program of this step with these flags; returns what it printed, errors included.

    A flag that is True stands alone, a list gives several values. Nothing is written for TensorBoard, for which a
    machine that fetches nothing may lack packages. The process group is kept, because DeepSpeed cannot go on with a
    second one. Raises: RuntimeError for an exit code that is not 0.
    """
    from training import tools
    from training.runtime.launch import run  # needs pyarrow, which most checks do without

    module_name, flags_name = PROGRAMS[step]
    module = importlib.import_module(module_name)
    printed = _Copied(sys.stdout)
    with (
        mock.patch("engine.distributed.shutdown"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        words = words_of({"enable_tensorboard": "false", **flags})
        main = functools.partial(module.main, callbacks=tools.callbacks())
        code = run(main, getattr(module, flags_name), module.__doc__ or "", words)
    if code:
        lines = printed.getvalue().strip().splitlines()[-1:]
        raise RuntimeError(f"{module_name} ended with exit code {code}: {' '.join(lines)}")
    return printed.getvalue()


class _Copied(io.StringIO):
    """Keeps what is printed, and prints it at once: a check that is ended leaves it in its log."""

    def __init__(self, stream: TextIO):
        super().__init__()
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(text)
        self.stream.flush()
        return super().write(text)


def words_of(flags: dict[str, object]) -> list[str]:
    """A command line's words."""
    words = []
    for name, value in flags.items():
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def write_prompts(path: Path, count: int, length: int, vocabulary: int) -> Path:
    """Save so many prompts of `length` words that scripts/benchmark_models.py's tokenizer knows."""
    rng = random.Random(0)
    rows = [" ".join(f"w{rng.randrange(4, vocabulary)}" for _ in range(length)) for _ in range(count)]
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    return path


def metrics_of(trial: Trial, output: Path) -> dict[int, dict[str, float]]:
    """The lines of metrics.jsonl by their step; a failure where decoding fell back to the model's own code."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    fell_back = [line["step"] for line in lines if line.get("speed/decoding_fallback")]
    trial.expect(not fell_back, f"{output.name}: in steps {fell_back} the model's own code read single tokens")
    return {line["step"]: line for line in lines}
