"""Which weights are gathered together."""

import torch
from torch import nn

from engine.zero import gathering
from engine.zero.gathering import parameter_buckets


def test_a_bucket_is_never_exceeded_but_by_one_weight(monkeypatch):
    monkeypatch.setattr(gathering, "GATHER_BUCKET", 10)
    sizes = {"a": 4, "b": 6, "c": 3, "d": 25, "e": 9, "f": 2}
    module = nn.ParameterDict({name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()})

    def names(*chosen: str) -> list[str]:
        return ["".join(name for name, _ in bucket) for bucket in parameter_buckets(module, chosen or None)]

    assert names() == ["ab", "c", "d", "e", "f"]
    assert names("a", "c", "f") == ["acf"]
    assert names("d", "f") == ["d", "f"]
