"""What a step's experience tells beside its means."""

from types import SimpleNamespace

import torch

from training.reporting import step_metrics


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
