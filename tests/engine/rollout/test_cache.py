"""How rows lie in the cache, slot by slot, by hand."""

import torch

from engine.rollout.cache import Batch, SlotCache

CPU = torch.device("cpu")


def filled(rows: int, slots: int) -> SlotCache:
    """A cache of one layer whose keys are row * 100 + slot."""
    cache = SlotCache()
    cache.reserve(rows, slots)
    cache.window.put(slice(0, rows), 0, 0)
    numbers = (torch.arange(rows).unsqueeze(1) * 100.0 + torch.arange(slots)).view(rows, 1, slots, 1)
    cache.update(numbers, -numbers, 0)
    return cache


def keys(cache: SlotCache) -> list[list[float]]:
    return cache.parts(slice(None), slice(8))[0][:, 0, :, 0].tolist()


def mask(text: str) -> list[list[bool]]:
    return [[letter == "x" for letter in row] for row in text.split()]


def three_rows() -> Batch:
    """Prompts of 3, 2 and 1 tokens before slot 3, of 4 rows with 8 slots."""
    batch = Batch(filled(4, 8), 4, 8, slot=3, device=CPU)
    batch.join(torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 1]]), torch.tensor([[5], [6], [7]]))
    return batch


def test_prompts_end_at_the_slot_of_all():
    batch = three_rows()
    assert batch.mask.tolist() == mask("xxx..... .xx..... ..x..... ........")
    batch.slot = 5
    batch.join(torch.tensor([[1, 1]]), torch.tensor([[8]]))
    assert batch.mask.tolist() == mask("xxx..... .xx..... ..x..... ...xx...")
    assert batch.pending.tolist() == [[5], [6], [7], [8]]


def test_a_row_that_joins_sees_nothing_of_the_one_before_it():
    batch = three_rows()
    batch.move([], [], kept=2, longest=3)
    batch.slot = 4
    batch.join(torch.tensor([[0, 1]]), torch.tensor([[9]]))
    assert batch.mask.tolist()[2] == mask("...x....")[0] and batch.pending.tolist() == [[5], [6], [9]]


def test_a_row_moves_with_all_that_it_has():
    batch = three_rows()
    batch.move([2], [0], kept=2, longest=2)
    assert batch.mask.tolist()[:2] == mask("..x..... .xx.....") and batch.pending.tolist() == [[7], [6]]
    assert keys(batch.cache)[0] == [0, 201, 202, 3, 4, 5, 6, 7]  # slots of the longest living row alone


def test_rows_move_to_the_left_when_slots_run_out():
    batch = three_rows()
    batch.mask[:3, 3:6] = True
    batch.slot = 6
    batch.move([2], [0], kept=2, longest=5)
    batch.make_room(2, longest=5)
    assert batch.slot == 6  # there was room for two
    batch.make_room(3, longest=5)
    assert batch.slot == 5
    assert batch.mask.tolist()[:2] == mask(".xxxx... xxxxx...")
    assert keys(batch.cache)[0][1:5] == [202, 203, 204, 205]
    assert keys(batch.cache)[1][:5] == [101, 102, 103, 104, 105]
