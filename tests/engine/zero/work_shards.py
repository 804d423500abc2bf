"""Run by ranks: where ZeRO-3 leaves the numbers of a weight."""

import torch
from torch import nn

from engine.zero.config import EngineConfig, build_ds_config
from engine.zero.engines import TrainedModel
from engine.zero.gathering import gathered_params, whole_weights


class Weights(nn.Module):
    """A matrix of 0, 1, ... 14 and a single number."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.number = nn.Parameter(torch.tensor([7.0]))


def shards(folder: str) -> dict:
    """This rank's shards, how its masters lie, and the matrix and a copy of it after all masters have been doubled."""
    config = build_ds_config(EngineConfig("actor", 3), dtype="fp32", micro_batch_size=1)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    module = Weights()
    model = TrainedModel(module, config, torch.optim.AdamW(module.parameters()))
    found = {name: getattr(module, name).ds_tensor.detach().clone() for name in ("matrix", "number")}
    masters = model.master_shards()
    found["masters"] = [(str(master.dtype).removeprefix("torch."), master.numel()) for master in masters]
    with model.swapped([2 * master for master in masters]):
        whole = dict(whole_weights(module))["matrix"].flatten().tolist()
        with gathered_params([module.matrix]):
            found["refreshed"] = [module.matrix.flatten().tolist(), whole]
    return found
