"""A few rows of tokens, padded either way, and their scores by a Scorer and by Hugging Face."""

import torch
from transformers import AutoModelForSequenceClassification

from engine.experience import position_ids
from engine.models.saving import save_model
from scripts.harness.models import EOS, PAD, make_tokenizer
from scripts.harness.weights import full_state

ROWS = ([5, 9, 33, 7, EOS], [41, 7, EOS], [60])


def batch(pad=PAD, left=False):
    """ROWS padded to one width, and their mask."""
    width = max(len(row) for row in ROWS)
    padding = [[pad] * (width - len(row)) for row in ROWS]
    rows = [
        (before + row, [0] * len(before) + [1] * len(row))
        if left
        else (row + before, [1] * len(row) + [0] * len(before))
        for row, before in zip(ROWS, padding)
    ]
    sequences, mask = zip(*rows)
    return torch.tensor(sequences), torch.tensor(mask)


@torch.no_grad()
def scores(scorer, sequences, mask):
    return scorer.sequence_scores(scorer(sequences, mask, position_ids(mask)), sequences, mask)


@torch.no_grad()
def pooled(folder, sequences, mask=None):
    """Hugging Face's own score of each row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return model(sequences, attention_mask=mask).logits[:, 0]


def saved(module, folder, edit=None, tokenizer=None):
    state = full_state(module.model)
    if edit is not None:
        edit(state)
    save_model(module, state, tokenizer or make_tokenizer(), folder)
    return str(folder)
