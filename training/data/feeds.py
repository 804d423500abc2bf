"""What each rank is given in each step: its share of prompts and blocks of text, in orders drawn from the seed."""

from torch import Tensor

from engine.distributed import rank_share, world_size
from engine.experience import PromptBatch
from training.data.blocks import TextBlocks, collate_blocks
from training.data.order import PromptOrder
from training.data.prompts import Prompts, collate_prompts


class ShuffledPrompts:
    """This rank's prompts, in batches of per_rank."""

    def __init__(self, prompts: Prompts, *, per_rank: int, seed: int, pad_token_id: int):
        self.data, self.pad_token_id = prompts, pad_token_id
        self.order = PromptOrder(len(prompts), per_rank * world_size(), seed)

    def prompts(self, batch: int) -> PromptBatch:
        """A batch of prompts, counted from 0."""
        own = rank_share(self.order.batch_size)
        indices, visits = (column[own] for column in self.order.batch(batch))
        return collate_prompts([self.data[index] for index in indices.tolist()], indices, visits, self.pad_token_id)


class ShuffledTexts:
    """This rank's blocks of text, per_rank of them in each optimizer step."""

    def __init__(self, blocks: TextBlocks, *, per_rank: int, seed: int):
        self.blocks, self.order = blocks, PromptOrder(len(blocks), per_rank * world_size(), seed)

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64, for an optimizer step counted from 0."""
        indices, _ = self.order.batch(optimizer_step)
        own = rank_share(self.order.batch_size)
        return collate_blocks([self.blocks[index] for index in indices[own].tolist()])
