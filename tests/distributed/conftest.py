"""The models of the distributed tests, and DeepSpeed configurations in which tiny parameters are partitioned."""
import json

import pytest

from engine.ds_config import CONFIG_DIR
from tests.tiny_models import make_causal_lm, make_scorer

ALWAYS_PARTITIONED = {"stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
                      "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
VECTORS_PERSIST = ALWAYS_PARTITIONED | {"stage3_param_persistence_threshold": 40}
STEADY_FP16 = {"initial_scale_power": 8, "loss_scale_window": 1000, "hysteresis": 1, "min_loss_scale": 1}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A folder with actor, tied (an actor with tied embeddings), reward, and the JSON files stage*.json."""
    folder = tmp_path_factory.mktemp("tiny")
    make_causal_lm(folder / "actor", "llama", seed=0)
    make_causal_lm(folder / "tied", "llama", seed=2, tied=True)
    make_scorer(folder / "reward", "llama", seed=1, offset=-0.3)
    for stage in range(4):
        shipped = json.loads((CONFIG_DIR / f"zero{stage}.json").read_text())
        _write(folder / f"stage{stage}.json", shipped, ALWAYS_PARTITIONED if stage == 3 else {})
    _write(folder / "stage3_persistent.json", shipped, VECTORS_PERSIST)
    return str(folder)


def _write(path, shipped: dict, zero: dict) -> None:
    """A shipped configuration with other ZeRO-3 thresholds, and an fp16 loss scale that is low from the start."""
    merged = shipped | {"zero_optimization": shipped["zero_optimization"] | zero, "fp16": STEADY_FP16}
    path.write_text(json.dumps(merged))
