"""What each rank is given in each step: its share of prompts and texts, in orders drawn from the seed alone."""

from torch import Tensor

from engine import distributed
from engine.experience import PromptBatch
from training.data.blocks import TextBlocks, collate_blocks
from training.data.examples import Prompts, collate_prompts
from training.data.order import PromptOrder
from training.flags.rlhf_arguments import RLHFFlags


class ShuffledPrompts:
    """This rank's share of the prompts, in an order drawn from the seed alone."""

    def __init__(self, args: RLHFFlags, prompts: Prompts, pad_token_id: int):
        self.data = prompts
        self.share = args.per_device_generation_batch_size * args.generation_batches
        self.order = PromptOrder(len(prompts), self.share * distributed.world_size(), args.seed)
        self.pad_token_id = pad_token_id

    def prompts(self, step: int) -> PromptBatch:
        """The prompts of a step, counted from 0."""
        own = distributed.rank_share(self.order.batch_size)
        indices, visits = (column[own] for column in self.order.batch(step))
        return collate_prompts([self.data[index] for index in indices.tolist()], indices, visits, self.pad_token_id)


class ShuffledTexts:
    """This rank's blocks of text, as many in an optimizer step as it has responses there, in an order drawn from the
    seed."""

    def __init__(self, args: RLHFFlags, blocks: TextBlocks):
        self.blocks, self.share = blocks, args.rows_per_rank // args.mini_batches
        self.order = PromptOrder(len(blocks), self.share * distributed.world_size(), args.seed)

    def texts(self, optimizer_step: int) -> Tensor:
        """(B, L) int64, for an optimizer step counted from 0."""
        indices, _ = self.order.batch(optimizer_step)
        own = distributed.rank_share(self.order.batch_size)
        return collate_blocks([self.blocks[index] for index in indices[own].tolist()])
