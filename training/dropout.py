"""Which numbers dropout leaves out, drawn from the seed and from nothing else."""

import numpy as np
import torch

from engine import distributed


def seed_dropout(seed: int, step: int) -> None:
    """Seed torch for an optimizer step on this rank, so that dropout is the same in a run that goes on."""
    key = np.random.SeedSequence((seed, step, distributed.rank()))
    torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))
