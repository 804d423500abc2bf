"""The models and a batch of the distributed tests, and DeepSpeed configurations that partition tiny parameters."""

import json

import pytest
import torch

from engine.experience import Rollout, TrainingBatch
from engine.zero.config import CONFIG_DIR
from scripts.harness.models import PAD, VOCABULARY, make_causal_lm, make_scorer
from tests.distributed import plain
from tests.distributed.work_gradients import TEMPERATURE

ALWAYS_PARTITIONED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}
VECTORS_PERSIST = ALWAYS_PARTITIONED | {"stage3_param_persistence_threshold": 40}
STEADY_FP16 = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}
BF16_MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
GROWING_FP16 = STEADY_FP16 | {"loss_scale_window": 2}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A folder with actor, tied (an actor with tied embeddings), reward, and DeepSpeed JSON files.

    stage0.json to stage3.json; stage3_persistent.json, in which matrices are partitioned and vectors are not;
    stage0_growing.json to stage3_growing.json, whose fp16 loss scale doubles every other step; stage0_bf16.json to
    stage3_bf16.json, with master weights in bfloat16.
    """
    folder = tmp_path_factory.mktemp("tiny")
    make_causal_lm(folder / "actor", "llama", seed=0)
    make_causal_lm(folder / "tied", "llama", seed=2, tied=True)
    make_scorer(folder / "reward", "llama", seed=1, offset=-0.3)
    write_stage_files(folder)
    return str(folder)


def write_stage_files(folder) -> None:
    """The DeepSpeed JSON files of `folder`."""
    for stage in range(4):
        shipped = json.loads((CONFIG_DIR / f"zero{stage}.json").read_text())
        thresholds = ALWAYS_PARTITIONED if stage == 3 else {}
        _write(folder / f"stage{stage}.json", shipped, thresholds, STEADY_FP16)
        _write(folder / f"stage{stage}_growing.json", shipped, thresholds, GROWING_FP16)
        _write(folder / f"stage{stage}_bf16.json", shipped | {"bf16": BF16_MASTERS}, thresholds, STEADY_FP16)
    _write(folder / "stage3_persistent.json", shipped, VECTORS_PERSIST, STEADY_FP16)


def _write(path, shipped: dict, zero: dict, fp16: dict) -> None:
    """A shipped configuration with other ZeRO-3 thresholds and another fp16 loss scale."""
    path.write_text(json.dumps(shipped | {"zero_optimization": shipped["zero_optimization"] | zero, "fp16": fp16}))


@pytest.fixture(scope="session")
def batch(folder) -> TrainingBatch:
    """7 rows of any length up to 9 + 12, one of them without influence on the policy; many tokens are clipped."""
    generator = torch.Generator().manual_seed(11)
    prompts, lengths = torch.tensor([9, 2, 5, 1, 7, 3, 8]), torch.tensor([12, 1, 3, 9, 2, 1, 2])
    columns, ahead = torch.arange(21), (9 - prompts).unsqueeze(1)
    mask = (columns >= ahead) & (columns < 9 + lengths.unsqueeze(1))
    sequences = torch.randint(4, VOCABULARY, mask.shape, generator=generator).masked_fill(~mask, PAD)
    response_mask = mask[:, 9:].clone()
    rollout = Rollout(
        sequences,
        mask.long(),
        response_mask,
        torch.ones(7, dtype=torch.bool),
        torch.arange(7),
        torch.zeros(7, dtype=torch.int64),
    )

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(response_mask.shape, generator=generator)

    with torch.no_grad():
        logprobs = plain.logprobs(plain.policy(folder), rollout, TEMPERATURE).float() + noise(0.3)
        values = plain.values(plain.critic(folder), rollout).float() + noise(0.3)
    zeros, learned = torch.zeros_like(values), response_mask.clone()
    learned[3] = False
    return TrainingBatch(
        rollout=rollout,
        logprobs=logprobs,
        entropy=zeros,
        ref_logprobs=zeros,
        values=values,
        scores=torch.zeros(7),
        processed_scores=torch.zeros(7),
        kl=zeros,
        measured_kl=torch.zeros(7),
        kl_coef=0.1,
        rewards=zeros,
        advantages=noise(1.0),
        returns=values + noise(0.5),
        policy_mask=learned,
        value_mask=response_mask,
        state_mask=response_mask,
    )


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """A folder that the ranks write into."""
    return str(tmp_path_factory.mktemp("output"))
