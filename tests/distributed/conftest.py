"""The models of the distributed tests, and DeepSpeed configurations in which tiny parameters are partitioned."""

import json

import pytest

from engine.zero.config import CONFIG_DIR
from tests.tiny_models import make_causal_lm, make_scorer

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
    for stage in range(4):
        shipped = json.loads((CONFIG_DIR / f"zero{stage}.json").read_text())
        thresholds = ALWAYS_PARTITIONED if stage == 3 else {}
        _write(folder / f"stage{stage}.json", shipped, thresholds, STEADY_FP16)
        _write(folder / f"stage{stage}_growing.json", shipped, thresholds, GROWING_FP16)
        _write(folder / f"stage{stage}_bf16.json", shipped | {"bf16": BF16_MASTERS}, thresholds, STEADY_FP16)
    _write(folder / "stage3_persistent.json", shipped, VECTORS_PERSIST, STEADY_FP16)
    return str(folder)


def _write(path, shipped: dict, zero: dict, fp16: dict) -> None:
    """A shipped configuration with other ZeRO-3 thresholds and another fp16 loss scale."""
    path.write_text(json.dumps(shipped | {"zero_optimization": shipped["zero_optimization"] | zero, "fp16": fp16}))


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """A folder that the ranks write into."""
    return str(tmp_path_factory.mktemp("output"))
