"""Rows that two ranks split, on one GPU; and what long rows alone need: prompts that are read in pieces, and advantages
of many positions.
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, LlamaForSequenceClassification, PretrainedConfig

from engine import distributed
from engine.algo.advantages import gae, returns_to_go
from engine.distributed import ALONE, RankGroup
from engine.experience import position_ids
from engine.models.attention import BY_ROW, Attention, has_kernel
from engine.models.config_and_tokenizer import LANGUAGE_MODEL
from engine.models.loading import DTYPES, load_policy
from engine.models.policy import Backbone, Policy, Scorer
from engine.rollout.cache import SlotCache
from engine.rollout.passes import READ_AT_ONCE, Passes
from scripts.benchmark_models import SPREAD, save_models
from scripts.gpu_checks.attention import distance
from scripts.gpu_checks.check import Trial
from scripts.gpu_checks.copies import figures_of
from scripts.gpu_checks.decoding import sixteen_bits
from scripts.gpu_checks.machine import device
from scripts.gpu_checks.models import (
    LOGITS,
    config_of,
    metrics_of,
    new_trainer,
    program,
    prompts,
    random_models,
    write_prompts,
)
from scripts.harness.ranks import run_ranks
from training.tools.memory.meta_model import built
from training.tools.memory.passes import training_pass

RANKS = 2
APART = {"fp32": 1e-5, "bf16": 0.03}  # of their length: tensors whose sums have another order
ALIKE = 1e-3  # of a number, or of 0.1 if it is smaller: metrics of a step in fp32
WITHIN = 0.1  # of what is planned
# {name: the tokens of the rows that each rank brings}
ROWS: dict[str, tuple[list[int], list[int]]] = {
    "many rows": ([700, 33, 1500], [2048, 5, 1, 300]),
    "one rank's rows": ([], [999, 2]),
    "one token": ([1], []),
}
LONG = (8192, 32768)  # tokens of a row


def split(trial: Trial) -> None:
    """What two ranks find together is what one finds alone, and takes the memory that is planned."""
    config_here(trial).save_pretrained(trial.folder)
    random_models(trial, "gqa")
    lengths = (64, 128) if trial.dry else LONG
    cases = [(length, checkpointing) for length in lengths for checkpointing in (False, True)]
    given = {
        numbers: {"folder": str(trial.folder)},
        peaks: {"folder": str(trial.folder), "cases": cases},
        steps: {"trial": dataclasses.asdict(trial)},
    }
    told = {numbers: tell_numbers, peaks: tell_peaks, steps: tell_steps}
    with ThreadPoolExecutor(1 if trial.dry else len(given)) as pool:  # two processes take seconds to start
        ranks = {
            function: pool.submit(run_ranks, f"scripts.gpu_checks.sequences:{function.__name__}", RANKS, **kwargs)
            for function, kwargs in given.items()
        }
        for function, found in ranks.items():
            with trial.part(function.__name__):
                told[function](trial, found.result()[0])


def config_here(trial: Trial) -> PretrainedConfig:
    """Of a Llama whose heads share keys and values, with positions for long rows."""
    config = config_of("gqa", trial.dry)
    config.num_hidden_layers = min(8, config.num_hidden_layers)
    config.max_position_embeddings = 2 * max(LONG)
    return config


def tell_numbers(trial: Trial, of_rank: dict[tuple[str, str], dict[str, float] | str]) -> None:
    """What `numbers` found."""
    for (dtype, name), found in of_rank.items():
        if isinstance(found, str):
            trial.tell({f"{dtype}, {name}": found})
            continue
        trial.tell({f"{dtype}, {name}, off": ", ".join(f"{what} {off:.2g}" for what, off in found.items())})
        wrong = {what: off for what, off in found.items() if not off < APART[dtype]}
        trial.expect(not wrong, f"{dtype}, {name}: two ranks are off one by {wrong}", "Do not split rows here.")
    has_one = trial.dry or of_rank["bf16", "kernel"] == "True"
    trial.expect(has_one, "no kernel computes rows of various lengths in bf16", "See `attention`.")


def tell_peaks(trial: Trial, of_rank: dict[tuple[int, bool, int], tuple[int, float]]) -> None:
    """What `peaks` found, beside what is planned."""
    if not trial.needs_gpu("bytes of activations"):
        return
    for (length, checkpointing, ranks), (size, seconds) in of_rank.items():
        name = f"{length} tokens, {'checkpointing, ' if checkpointing else ''}N = {ranks}"
        attention = Attention(packing="packed", ranks=ranks)
        how = {"dtype": "bf16", "trust_remote_code": False, "checkpointing": checkpointing, "attention": attention}
        model = built("actor", str(trial.folder), LANGUAGE_MODEL, True, **how)
        planned = training_pass(model, 1, length, length - 1)
        sizes = f"{size / 1e9:.3f} measured, {planned / 1e9:.3f} planned, {planned / size - 1:+.1%}"
        trial.tell({f"{name}, GB": sizes, f"{name}, s": round(seconds, 2)})
        trial.expect(abs(planned / size - 1) < WITHIN, f"{name}: {sizes}", "training/tools/memory/passes.py")


def tell_steps(trial: Trial, of_rank: dict[int, list[dict[str, float]]]) -> None:
    """What `steps` found."""
    for stage, (whole, parts) in of_rank.items():
        off = {name: abs(parts[name] - value) / max(abs(value), 0.1) for name, value in whole.items()}
        trial.tell({f"steps at stage {stage}, off": ", ".join(f"{name} {each:.2g}" for name, each in off.items())})
        wrong = {name: each for name, each in off.items() if not each < ALIKE}
        trial.expect(not wrong, f"steps at stage {stage}: off by {wrong}", "Do not split rows here.")


def models_of(folder: str, dtype: str, checkpointing: bool = False) -> list[Backbone]:
    """A policy, whose logits are as wide as a trained one's, and a scorer of this configuration, with the same weights
    in all ranks."""
    config, modules = AutoConfig.from_pretrained(folder), []
    config.num_labels = 1
    for family, kind in ((LlamaForCausalLM, Policy), (LlamaForSequenceClassification, Scorer)):
        how = Attention(packing="packed").prepare(family, config, DTYPES[dtype])
        assert how["attn_implementation"] == BY_ROW
        torch.manual_seed(0)
        with device():
            model = family._from_config(config, dtype=DTYPES[dtype], **how)
        with torch.no_grad():
            model.model.norm.weight.mul_(LOGITS / SPREAD)
        modules.append(kind(model))
        modules[-1].pack(True)
        modules[-1].train()
        if checkpointing:
            modules[-1].checkpoint_activations()
    return modules


def batch(config: PretrainedConfig, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Left-padded rows of so many tokens: ids, mask and positions, (B, S) int64 each."""
    width = max(2, *lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths).unsqueeze(1)).long()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, config.vocab_size, mask.shape, generator=generator) * mask
    return tuple(tensor.to(device()) for tensor in (ids, mask, position_ids(mask)))  # type: ignore[return-value]


def numbers(folder: str) -> dict[tuple[str, str], dict[str, float] | str]:
    """{(dtype, rows): {what: how far two ranks together are off one}}, on the first rank."""
    group, place, found = RankGroup(RANKS), distributed.rank(), {}
    for dtype in APART:
        modules = models_of(folder, dtype)
        config = modules[0].model.config
        heads = config.num_attention_heads // RANKS, config.num_key_value_heads // RANKS, config.head_dim
        found[dtype, "kernel"] = str(has_kernel(DTYPES[dtype], *heads))
        for name, lengths in ROWS.items():
            rows = batch(config, lengths[0] + lengths[1])
            own = slice(len(lengths[0])) if place == 0 else slice(len(lengths[0]), None)
            parts = computed(modules, [tensor[own] for tensor in rows], group)
            gradients = [distributed.all_reduce_sum(each) for each in parts.pop("gradients")]
            whole = computed(modules, rows, ALONE)
            off = {"gradients": distance([joined(gradients)], [joined(whole.pop("gradients"))])}
            for what, tensor in whole.items():
                expected = tensor[own]
                square = torch.stack([(parts[what] - expected).square().sum(), expected.square().sum()])
                square = distributed.all_reduce_sum(square).sqrt()
                if square[1] > 0:
                    off[what] = (square[0] / square[1]).item()
            found[dtype, name] = off
    return found


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All their numbers."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def computed(modules: Sequence[Backbone], rows: Sequence[Tensor], group: RankGroup) -> dict:
    """Log-probs, entropies and values of the rows' tokens, and the gradients of a loss of them, in float32."""
    for module in modules:
        module.split(group)
        module.zero_grad()
    ids, mask, positions = rows
    policy, scorer = modules
    real = mask[:, :-1] * mask[:, 1:]
    logprobs, entropies = policy(ids, mask, positions, response_length=ids.shape[1] - 1, with_entropy=True)
    outputs = {
        "log-probs": logprobs * real,
        "entropies": entropies * real,
        "values": scorer(ids, mask, positions) * mask,
    }
    sum((each**2).sum() for each in outputs.values()).backward()
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return {name: each.detach().float() for name, each in outputs.items()} | {
        "gradients": [g.float() for g in gradients]
    }


def peaks(folder: str, cases: list[tuple[int, bool]]) -> dict[tuple[int, bool, int], tuple[int, float]]:
    """{(tokens, checkpointing, ranks): (the most bytes of a forward and backward pass beside the weights, its seconds)}
    of one row, on its rank."""
    group, found = RankGroup(RANKS), {}
    for length, checkpointing in cases:
        policy, _ = models_of(folder, "bf16", checkpointing)
        for parameter in policy.parameters():  # as planned: a gradient is added up as soon as it is there
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
        row = batch(policy.model.config, [length])
        own = row if distributed.is_main() else [tensor[:0] for tensor in row]
        for ranks, ranks_of, rows in ((1, ALONE, row), (RANKS, group, own)):
            policy.split(ranks_of)
            if ranks > 1 or distributed.is_main():
                for _ in range(2):  # the first one's kernels may take workspaces
                    found[length, checkpointing, ranks] = peak(policy, rows)
            distributed.barrier()
        del policy
    return found


def peak(policy: Policy, rows: Sequence[Tensor]) -> tuple[int, float]:
    """The most bytes that a forward and backward pass takes beside what is there, 0 on a CPU, and its seconds."""
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    there = torch.cuda.memory_allocated() if on_gpu else 0
    begun = time.perf_counter()
    policy(*rows, response_length=rows[0].shape[1] - 1)[0].sum().backward()
    if on_gpu:
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - there if on_gpu else 0), time.perf_counter() - begun


METRICS = ("policy/loss", "value/loss", "objective/kl", "objective/entropy", "policy/grad_norm", "value/grad_norm")


def steps(trial: dict) -> dict[int, list[dict[str, float]]]:
    """{stage: metrics of a second step without and with groups}."""
    given, found = Trial(**trial), {}
    for stage in (0, 1, 3):
        found[stage] = []
        for ranks in (1, RANKS):
            attention = Attention(packing="packed", ranks=ranks)
            trainer = new_trainer(given, size="gqa", stage=stage, dtype="fp32", ragged=True, attention=attention)
            vocabulary = trainer.models.actor.module.model.config.vocab_size
            for number in range(2):
                first = 100 * number + 10 * distributed.rank()
                metrics = trainer.step(
                    prompts(8, trainer.sampling.max_new_tokens, vocabulary, first).to(device())
                ).metrics
            found[stage].append({name: metrics[name] for name in METRICS})
            trainer.models.destroy()
            del trainer
    return found


PROMPTS = (20_000, 9_000)  # tokens


def alone(trial: Trial) -> None:
    """Prompts that are read in pieces have the logits of one pass; advantages of many positions take seconds; a step of
    step 3 takes the memory that is planned."""
    with trial.part("prompts in pieces"):
        in_pieces(trial)
    with trial.part("advantages"):
        of_many_positions(trial)
    with trial.part("a step"):
        in_a_step(trial)


def in_pieces(trial: Trial) -> None:
    """Logits behind long prompts, and the memory of reading them."""
    lengths = (40, 17) if trial.dry else PROMPTS
    path, _ = random_models(trial, "gqa")
    exact = torch.empty(0)
    for dtype in APART:
        model = load_policy(path, DTYPES[dtype]).to(device()).requires_grad_(False).eval().model
        ids, mask, _ = batch(model.config, lengths)
        whole = [model(row[seen > 0][None], logits_to_keep=1).logits[0, -1] for row, seen in zip(ids, mask)]
        cache = SlotCache()
        cache.reserve(len(ids), ids.shape[1])
        passes = Passes(model, cache, False)
        begun = time.perf_counter()
        at_once = 16 if trial.dry else READ_AT_ONCE
        with torch.no_grad(), mock.patch("engine.rollout.passes.READ_AT_ONCE", at_once):
            logits = passes.prompts(ids, mask, 0, ids.shape[1])
            count = passes.prompt_passes(lengths)
        exact = torch.stack(whole) if dtype == "fp32" else exact
        off, rounding = distance([logits], [exact]), distance([torch.stack(whole)], [exact])
        trial.tell({f"{dtype}, prompts of {lengths} tokens, passes": count})
        trial.tell({f"{dtype}, s": round(time.perf_counter() - begun, 2)})
        trial.tell({f"{dtype}, pieces and one pass, off fp32": f"{off:.2g}, {rounding:.2g}"})
        trial.expect(
            off < 1e-4 + 1.5 * rounding,
            f"{dtype}: logits behind prompts that are read in pieces are {off:.2g} off those of one pass",
            f"Numbers of prompts over {READ_AT_ONCE} tokens are wrong (engine/rollout/passes.py).",
        )


def of_many_positions(trial: Trial) -> None:
    """Time of advantages and returns of 8 rows of 131,072 positions; their sums are known."""
    rows, positions = (2, 1000) if trial.dry else (8, 131_072)
    rewards, values = torch.ones(rows, positions, device=device()), torch.zeros(rows, positions, device=device())
    for name, call in {
        "gae": lambda: gae(rewards, values, 1.0, 0.5)[0],
        "gae, a lambda for each row": lambda: gae(rewards, values, 1.0, torch.full((rows,), 0.5, device=device()))[0],
        "returns_to_go": lambda: returns_to_go(rewards, 0.5),
    }.items():
        seconds = []
        for _ in range(2):
            begun = time.perf_counter()
            found = call()
            seconds.append(time.perf_counter() - begun)
        trial.tell({f"{name}, {rows} x {positions} positions, s": f"{seconds[0]:.2f}, again {seconds[1]:.2f}"})
        expected = 2 - 0.5 ** (positions - torch.arange(positions, device=device()) - 1.0)
        trial.expect(bool((found - expected).abs().max() < 1e-5), f"{name}: not the sums 1, 1.5, 1.75 and so on")
        trial.find(fmean(seconds) > 2.0, f"{name} takes {fmean(seconds):.1f} s", "See engine/algo/advantages.py.")


def in_a_step(trial: Trial) -> None:
    """Two steps of step 3 with prompts of nearly 32k tokens."""
    length, response = (96, 8) if trial.dry else (LONG[1] - 256, 256)
    models = trial.folder / "models"
    save_models(models, config_here(trial), config_here(trial), torch.float32, LOGITS)
    flags = dict(
        actor_model_name_or_path=models / "actor",
        critic_model_name_or_path=models / "critic",
        data_path=write_prompts(trial.folder / "prompts.jsonl", 16, length, vocabulary=500),
        data_output_path=trial.folder / "cache",
        output_dir=trial.folder / "out",
        max_prompt_seq_len=length,
        max_answer_seq_len=response,
        per_device_generation_batch_size=2,
        per_device_training_batch_size=1,
        num_eval_prompts=0,
        max_steps=2,
        ppo_epochs=1,
        dtype=sixteen_bits(trial),
        print_answers_interval=0,
    )
    measured = figures_of(program(3, **flags))
    last = metrics_of(trial, trial.folder / "out")[2]
    odd = [name for name in METRICS if not math.isfinite(last[name])]
    trial.expect(not odd, f"a step of rows of {length + response} tokens: {', '.join(odd)} are no numbers")
    for phase in ("generate", "make_experience", "train"):
        trial.tell({f"two rows of {length + response} tokens, {phase}, s": round(last[f"time/{phase}"], 2)})
    for phase, (size, planned) in measured.items():
        trial.tell({f"{phase}, GB measured / planned": f"{size} / {planned}"})
        right = planned > (1 - WITHIN) * size and (phase != "train" or planned < (1 + WITHIN) * size)
        trial.expect(right, f"{phase}: planned {planned} GB, measured {size}")
