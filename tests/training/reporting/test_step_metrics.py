"""What a step's experience tells beside its means."""

import math
from types import SimpleNamespace

import pytest
import torch

from training.reporting import step_metrics
from training.reporting.metrics import Accumulator


def test_distributions_hold_all_ranks(monkeypatch):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = SimpleNamespace(scores=torch.tensor([0.5, -1.0]), rollout=SimpleNamespace(response_mask=mask))
    other = {"objective/scores_histogram": torch.tensor([2.0]), "rollout/length_histogram": torch.tensor([3.0])}
    monkeypatch.setattr(step_metrics.distributed, "all_gather_objects", lambda own: [own, other])
    found = step_metrics.distributions(batch)
    assert {tag: values.tolist() for tag, values in found.items()} == {
        "objective/scores_histogram": [0.5, -1.0, 2.0],
        "rollout/length_histogram": [2.0, 1.0, 3.0],
    }


def test_the_samplers_distance_by_hand():
    # Of the actor over the sampler: ratios 4, 0.6, 1, and one that float32 cannot hold.
    metrics = Accumulator()
    step_metrics.add_sampler_distance(metrics, torch.tensor([math.log(4), math.log(0.6), 0.0, -200.0]))
    log4, log06 = math.log(4), math.log(0.6)
    assert metrics.reduce() == pytest.approx(
        {
            "rollout/logprob_gap": (log4 - log06 + 200) / 4,
            "rollout/sampler_kl": (-log4 - log06 + 200) / 4,
            "rollout/sampler_kl_k3": ((3 - log4) + (-0.4 - log06) + (math.exp(-20) - 1 + 20)) / 4,
            "rollout/ratio_min": math.exp(-20),
            "rollout/ratio_max": 4.0,
            "rollout/ratio_far": 0.5,  # 4 and e^-20
        },
        rel=1e-5,
    )
