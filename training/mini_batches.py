"""Which responses of a rollout go into which optimizer step of an epoch."""

import numpy as np
import torch
from torch import Tensor

from engine import distributed


def mini_batch_rows(rows: int, mini_batches: int, key: tuple[int, ...]) -> list[Tensor]:
    """Which of this rank's rows go into which mini-batch: a list of (rows / mini_batches,) int64, on its device.

    Of each run of `mini_batches` neighbouring rows every mini-batch gets one, drawn at random. The draw is over all
    ranks' rows at once, from `key` alone, so each rank has equally many in each mini-batch and they do not depend on
    how many ranks there are. `rows` is the same on all ranks and a multiple of `mini_batches`. Within a mini-batch a
    rank's rows are shuffled, for dialects in which it matters which of them form a micro-batch.
    """
    assert rows % mini_batches == 0, f"{rows} rows do not divide into {mini_batches} mini-batches"
    groups = rows // mini_batches
    everywhere = np.tile(np.arange(mini_batches), (groups * distributed.world_size(), 1))
    drawn = np.random.default_rng(key).permuted(everywhere, axis=1)
    own = torch.from_numpy(drawn[distributed.rank_share(len(drawn))].reshape(-1))
    shuffled = torch.from_numpy(np.random.default_rng((*key, distributed.rank())).permutation(rows))
    return [shuffled[own[shuffled] == index].to(distributed.device()) for index in range(mini_batches)]
