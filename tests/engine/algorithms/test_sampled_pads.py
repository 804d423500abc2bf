"""A pad token that was sampled, with others behind it: what each system counts, from its own formula.

deepspeed_chat: microsoft/DeepSpeedExamples 83757d9c, dschat/rlhf/ppo_trainer.py: attention_mask = seq != pad,
action_mask = attention_mask[:, 1:], ends = start + action_mask[:, start:].sum(1) + 1.
deepspeed_chat_2023: 1d17cf7c, the same without the + 1. trlx: CarperAI/trlx 3340c2f3, `make_experience` and `loss`:
attention_mask = tokens != pad, ends = start + attention_mask[:, start:].sum(1) + 1 from the last prompt token on.
trl_ppo, summarize: `first_true_indices(response == pad) - 1` is the last token that counts.
"""

import pytest
import torch

from engine.algorithms import Algorithm, get_dialect

PAD, EOS, P, WIDTH = 9, 2, 2, 7
ROW = [5, PAD, 6, EOS, PAD, PAD, PAD]  # four tokens sampled, one of them a pad


def by_counting(offset: int) -> tuple[list[int], int]:
    """The loss mask, and where the score goes: the last of the slots before `ends`."""
    sequence = torch.tensor([[11, 12, *ROW]])
    action_mask = (sequence != PAD).long()[:, 1:]
    start = P - 1
    ends = int(start + action_mask[0, start:].sum() + offset)
    return action_mask[0, start:].tolist(), list(range(start, len(action_mask[0])))[: ends - start][-1] - start


def of_trlx() -> tuple[list[int], int]:
    mask = (torch.tensor([11, 12, *ROW]) != PAD).long()
    start = P - 1
    ends = int(start + mask[start:].sum() + 1)
    slots = list(range(start, len(mask) - 1))[: ends - start]
    return mask[start + 1 :].tolist(), slots[-1] - start


def before_the_first(score_slot: int) -> tuple[list[int], int]:
    length = ROW.index(PAD)
    return [1] * length + [0] * (WIDTH - length), length + score_slot


EXPECTED = {
    "deepspeed_chat": by_counting(1),
    "deepspeed_chat_2023": by_counting(0),
    "trlx": of_trlx(),
    "trl_ppo": before_the_first(0),
    "summarize": before_the_first(0),
    "openai": ([1] * WIDTH, WIDTH - 1),
    "default": ([1, 1, 1, 1, 0, 0, 0], 3),
}


def test_the_formulas_by_hand():
    assert EXPECTED["deepspeed_chat"] == ([1, 0, 1, 1, 0, 0, 0], 3)
    assert EXPECTED["deepspeed_chat_2023"] == ([1, 0, 1, 1, 0, 0, 0], 2)
    assert EXPECTED["trlx"] == ([1, 0, 1, 1, 0, 0, 0], 4)
    assert EXPECTED["trl_ppo"] == ([1, 0, 0, 0, 0, 0, 0], 1)


@pytest.mark.parametrize("system", EXPECTED)
def test_masks_and_score_slot(system):
    mask, place = EXPECTED[system]
    algorithm = Algorithm(get_dialect(system), pad_token_id=PAD, end_token_id=EOS)
    positions = algorithm.positions(torch.tensor([ROW]), torch.arange(WIDTH).unsqueeze(0) < 4)
    assert positions.masks.policy.int().tolist() == [mask]
    assert positions.score.tolist() == [place]
    same = torch.zeros(1, WIDTH)
    rewards = algorithm.compute_rewards(same, same, torch.tensor([2.0]), positions, 0.1)
    assert rewards.nonzero().tolist() == [[0, place]]
