"""Run by a process of its own: steps, samplers and engines on the second device."""

from dataclasses import replace
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from engine import distributed
from engine.algorithms import Dialect, get_dialect
from engine.experience import PromptBatch
from engine.models.loading import load_policy
from engine.rollout import SamplingConfig
from engine.rollout.decode import Sampler
from engine.rollout.passes import GraphedPasses
from scripts.harness.models import EOS, PAD, VOCABULARY, make_tokenizer
from tests.distributed.tiny_run import build_trainer, engine_spec, timeless
from tests.engine.zero.second_device import DEVICE, Seen, second_device
from training.data.examples import collate_prompts
from training.reporting.evaluation import Evaluator

ROWS, PROMPT, TOKENS, MICRO_BATCH = 8, 5, 12, 4  # responses of this rank, and tokens of each of them


class Prompts:
    """As many prompts of one length as give ROWS responses."""

    def __init__(self, samples: int):
        self.count = ROWS // samples

    def prompts(self, batch: int) -> PromptBatch:
        """A batch of prompts, counted from 0."""
        indices = torch.arange(self.count) + self.count * batch
        tokens = [[4 + (7 * index + place) % 50 for place in range(PROMPT)] for index in indices.tolist()]
        return collate_prompts(tokens, indices, torch.zeros_like(indices), PAD)


def as_one_of_two() -> None:
    """From now on this process is rank 0 of two; what the other one sends is what this one has."""
    distributed.shutdown()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def tiny(name: str) -> Dialect:
    """A dialect as two responses to a prompt have it, where it has groups; its texts are tokens of the tiny models."""
    dialect = get_dialect(name)
    sizes = ("samples_per_prompt", "mini_batches", "ppo_epochs")
    changes = {size: min(getattr(dialect, size), 2) for size in sizes}
    if dialect.truncate_token is not None:
        changes["truncate_token"] = "w63"
    return dialect.override(**changes)


def sampling_of(dialect: Dialect) -> SamplingConfig:
    """All responses have TOKENS tokens: none ends one, and none is padding."""
    made = SamplingConfig.of(dialect, [], dtype="fp32", max_new_tokens=TOKENS, pad_token_id=PAD)
    return replace(made, never_drawn=(PAD, EOS, VOCABULARY - 1))


def steps(runs: list[tuple[str, str]]) -> list[dict]:
    """For each folder of models and name of a dialect: what the second step asks of the device, and what was at fault
    in building and in the first; the second step's metrics there and `on_cpu`."""
    as_one_of_two()
    return [one_dialect(folder, tiny(name)) for folder, name in runs]


def one_dialect(folder: str, dialect: Dialect) -> dict:
    with second_device() as seen:
        found = two_steps(folder, dialect, seen)
    return found | {"on_cpu": two_steps(folder, dialect, Seen())["metrics"]}


def two_steps(folder: str, dialect: Dialect, seen: Seen) -> dict:
    critic = {} if dialect.has_critic else {"with_critic": False, "critic_path": None}
    spec = engine_spec(folder, 0, **critic, reward_paths=(f"{folder}/reward",))
    trainer = build_trainer(spec, dialect=dialect, sampling=sampling_of(dialect), micro_batch_size=MICRO_BATCH)
    feed = Prompts(dialect.samples_per_prompt)
    trainer.step(feed.prompts(0), feed)
    seen.forget()
    report = trainer.step(feed.prompts(1), feed)
    return vars(seen) | {"metrics": timeless(report.metrics)}


def variants(folder: str, runs: dict[str, dict]) -> dict[str, dict]:
    """What each way to build engines asks of the device: fields of EngineSpec, and its stage."""
    as_one_of_two()
    return {name: one_variant(folder, **fields) for name, fields in runs.items()}


def one_variant(folder: str, stage: int = 0, **fields) -> dict:
    """Faults in loading, a step and an evaluation; what the latter two ask."""
    with second_device() as seen:
        spec = engine_spec(folder, stage, config=f"stage{stage}.json", **fields)
        trainer = build_trainer(spec, sampling=sampling_of(Dialect()))
        seen.forget()
        trainer.step(Prompts(1).prompts(0))
        evaluator = Evaluator(
            [[5, 6], [7, 8, 9], [10]],
            rollouts=trainer.rollouts,
            experience_maker=trainer.experience_maker,
            sampling=trainer.sampling,
            tokenizer=trainer.models.tokenizer,
        )
        evaluator.run(1)
    return vars(seen)


def samplers(folders: dict[str, str], lengths: list[int]) -> dict[tuple[str, str], list[dict]]:
    """By family and decoding: what the second call of a sampler asks of the device, for each length of 8 responses. A
    graph runs its step."""
    return {
        (family, decoding): [one_sampler(folder, decoding, length) for length in lengths]
        for family, folder in folders.items()
        for decoding in ("plain", "graphs")
    }


def one_sampler(folder: str, decoding: str, length: int) -> dict:
    graphs = partial(GraphedPasses, capture=lambda step: step)
    with second_device() as seen, mock.patch("engine.rollout.passes.GraphedPasses", graphs):
        model = load_policy(f"{folder}/actor", torch.float32).to(DEVICE).model.eval().requires_grad_(False)
        sampler = Sampler(make_tokenizer(), decoding=decoding)
        sampling = replace(sampling_of(Dialect()), max_new_tokens=length)
        prompts = Prompts(1).prompts(0).to(DEVICE)
        sampler.responses(model, prompts, sampling)
        seen.forget()
        sampler.responses(model, prompts, sampling)
    return vars(seen) | {"ran": sampler.decoding_ran}
