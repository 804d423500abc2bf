"""Token ids to scores, by a reward model."""

from collections.abc import Sequence

import torch

from engine.experience import position_ids
from engine.models.scorer import Scorer
from training.data.tokens import padded


@torch.inference_mode()
def scores_of(scorer: Scorer, sequences: Sequence[Sequence[int]], pad_id: int) -> list[float]:
    """The score of each sequence of token ids, a prompt and its response, in one forward pass: as step 3 has it, at the
    token that the model was trained to be read at, with the stored normalisation."""
    device = next(scorer.parameters()).device
    ids, mask = (tensor.to(device) for tensor in padded([list(ids) for ids in sequences], pad_id))
    return scorer.sequence_scores(scorer(ids, mask, position_ids(mask)), ids, mask).tolist()
