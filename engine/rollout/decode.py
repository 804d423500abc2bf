"""The decoding loop. It reads each prompt once, then draws one token at a time for every row of the batch. Waiting
prompts take the rows of responses that have ended."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.distributed import ALONE, RankGroup
from engine.experience import PromptBatch, Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.cache import Batch, SlotCache
from engine.rollout.passes import Passes, make_passes, takes_slot_masks
from engine.rollout.request import Draws, Ends, Request, Schedule, make_requests, prompts_of_group, rollout_of

Finished = Callable[[Rollout], None] | None
CHECK_EVERY = 8  # the host reads drawn tokens once per this number of tokens


class Sampler:
    """Draws responses from models of one architecture, and keeps the cache's memory from call to call.

    Args:
        rows_at_once: the number of responses decoded at the same time; None for all.
        row_length: the largest number of tokens of a prompt and its response together; 0 if it is not known. If it is
            known, passes whose tensors must not move in memory allocate them once.
        agree: a function that returns the largest of all ranks' numbers. It is needed if forward passes are collective,
            because all ranks then have to make equally many passes. None if forward passes are not collective.
        decoding: how single tokens go through the model, one of engine.rollout.passes.DECODING. All but "plain" need a
            model without hooks whose weights do not move.
        group: the ranks that hold the model together. The rows of all ranks of the group are decoded together, and each
            rank keeps its own rows.
    """

    def __init__(
        self,
        tokenizer,
        rows_at_once: int | None = None,
        agree: Callable[[int], int] | None = None,
        decoding: str = "plain",
        group: RankGroup = ALONE,
        row_length: int = 0,
    ):
        self.row_length = row_length
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.group = group
        self.rows_at_once = rows_at_once and rows_at_once * self.group.size
        self.agree = agree or (lambda number: number)
        # In inference mode small models take a tenth less time per token, but ZeRO's hooks do not work in it.
        self.context = torch.no_grad if agree else torch.inference_mode
        self.cache = SlotCache()
        self.row_steps = 0  # rows times decoding steps in the last call; to be compared with the number of drawn tokens
        self._slot_masks: bool | None = None
        self._passes: Passes | None = None

    def responses(
        self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig, finished: Finished = None
    ) -> Rollout:
        """One response for each row of the prompts, in the order of the rows.

        model: a Hugging Face causal language model, with or without ZeRO's hooks. It is in eval mode during the call.
        finished: a function that is called with responses of this rank once the host has seen that they are finished.
        These responses have no log-probs yet.
        """
        training = model.training
        model.eval()
        try:
            return self._responses(model, prompts, sampling, finished)
        finally:
            model.train(training)

    def _responses(
        self, model: nn.Module, prompts: PromptBatch, sampling: SamplingConfig, finished: Finished
    ) -> Rollout:
        with self.context():
            if self._slot_masks is None:
                self._slot_masks = takes_slot_masks(model)
            if self._passes is None or self._passes.model is not model:
                self._passes = make_passes(model, self.cache, self._slot_masks, self.decoding)
            whole, own = prompts_of_group(prompts, self.group)
            requests = make_requests(whole, sampling.max_new_tokens)
            loop = _Loop(self, self._passes, whole, requests, sampling)

            def tell(done: list[Request]) -> None:
                mine = [request for request in done if own.start <= request.row < own.stop]
                if finished is not None and mine:
                    finished(rollout_of(whole.select([request.row for request in mine]), mine, sampling.pad_token_id))

            loop.run(tell)
        self.row_steps = loop.row_steps
        recorded = {name: column[own] for name, column in loop.draws.recorded.items()}
        return rollout_of(prompts, requests[own], sampling.pad_token_id, recorded)

    @property
    def decoding_ran(self) -> str:
        """How single tokens went through the model: one of DECODING, but not "auto"."""
        return "plain" if self._passes is None or self.fallback else self._passes.decoding

    @property
    def fallback(self) -> str | None:
        """The reason why single tokens went through the model's own code although another way was asked for; "" if the
        other way was used, None if the model's own code was asked for."""
        if self.decoding == "plain":
            return None
        return "" if self._passes is None else self._passes.fallback

    def release_memory(self) -> None:
        """Free the memory of keys and values, and drop the reference to the model."""
        self.cache.free()
        self._passes = None


class _Loop:
    """One call of `Sampler.responses`.

    The next tokens of all rows are written into the same slot of the cache (see SlotCache). After every CHECK_EVERY
    tokens the host reads the drawn tokens. Responses that have ended leave the batch, and waiting prompts, longest
    first, take their rows. Tokens that were drawn after the end of a response are cut off. Cutting them changes no
    other token, because each token is drawn with a random number of its own.
    """

    def __init__(
        self,
        sampler: Sampler,
        passes: Passes,
        prompts: PromptBatch,
        requests: Sequence[Request],
        sampling: SamplingConfig,
    ):
        self.passes = passes
        self.prompts = prompts
        self.agree = sampler.agree
        self.device = prompts.input_ids.device
        self.schedule = Schedule(requests, sampler.rows_at_once or len(prompts))
        self.draws = Draws(prompts, sampling, max(request.most for request in requests) + CHECK_EVERY)
        self.ends = Ends(sampler.tokenizer, sampling.stop_token_ids, sampling.stop_strings)
        rows, longest = self.schedule.rows, max(request.prompt_length for request in requests)
        length = max(request.prompt_length + request.most for request in requests)
        length = max(length, sampler.row_length if passes.sees_all_slots else 0)
        slots = slots_of_a_row(length, waiting=rows < len(prompts))
        if passes.sees_all_slots:
            sampler.cache.reserve(max(rows, sampler.rows_at_once or 0), slots)
            slots = sampler.cache.room.slots  # equal in all calls
        else:
            sampler.cache.reserve(rows, slots)
        self.batch = Batch(sampler.cache, rows, slots, longest, self.device)
        self.row_steps = 0

    def run(self, tell: Callable[[list[Request]], None]) -> None:
        """Draw all responses. tell: a function that is called with finished requests."""
        schedule = self.schedule
        while self.agree(schedule.open):
            joining = schedule.join()
            passes = self.passes.prompt_passes([request.prompt_length for request in joining])
            more = self.agree(passes) - passes
            if joining:
                self._join(joining)
            self._keep_pace(more)
            left = max((request.most - request.drawn for request in schedule.living), default=0)
            self._draw(self.agree(min(CHECK_EVERY, left)))
            if done := [request for request in schedule.living if request.finished]:
                tell(done)
            sources, targets = schedule.leave()
            self.batch.move(sources, targets, len(schedule.living), self._longest())

    def _join(self, joining: list[Request]) -> None:
        """Read the prompts of new rows and draw their first tokens."""
        width = joining[0].prompt_length
        rows = torch.tensor([request.row for request in joining], device=self.device)
        ids, mask = (tensor[rows, -width:] for tensor in (self.prompts.input_ids, self.prompts.attention_mask))
        logits = self.passes.prompts(ids, mask, len(self.batch.pending), self.batch.slot)
        self.batch.join(mask, self.draws.draw(logits, rows, torch.zeros_like(rows)))
        for request in joining:
            request.drawn = 1

    def _draw(self, count: int) -> None:
        """Draw `count` tokens for each row in use; after that the host reads all new tokens."""
        living, batch = self.schedule.living, self.batch
        if not living:
            self._keep_pace(count)
            return
        batch.make_room(count, self._longest())
        start = batch.slot - self._longest()  # no row in use has a token before this slot
        rows, lengths, drawn, most = torch.tensor(
            [(request.row, request.prompt_length, request.drawn, request.most) for request in living],
            device=self.device,
        ).unbind(1)
        # Position ids stop growing after a row's last possible token, since the model may support no larger position
        # ids.
        places = drawn.unsqueeze(1) + torch.arange(count, device=self.device)
        positions = lengths.unsqueeze(1) + torch.minimum(places, most.unsqueeze(1) - 1) - 1
        tokens = [batch.pending]
        for step in range(count):
            batch.mask[:, batch.slot] = True
            logits = self.passes.tokens(batch.pending, positions[:, step : step + 1], batch.mask, start, batch.slot)
            batch.slot += 1
            batch.pending = self.draws.draw(logits, rows, places[:, step])
            tokens.append(batch.pending)
        self.row_steps += len(living) * count
        for request, seen in zip(living, torch.cat(tokens, 1).tolist(), strict=True):
            request.drawn += count
            request.look(seen[len(seen) - (request.drawn - len(request.tokens)) :], self.ends)

    def _longest(self) -> int:
        """The largest number of tokens that the model has read in one of the rows in use."""
        return max((request.read for request in self.schedule.living), default=0)

    def _keep_pace(self, passes: int) -> None:
        """Make forward passes whose results are not used, because other ranks' passes wait for this rank's."""
        for _ in range(passes):
            self.passes.for_nothing(self.prompts.input_ids[:1, -1:])


def slots_of_a_row(tokens: int, waiting: bool) -> int:
    """The number of slots that a row of the cache needs. tokens: the largest number of tokens of a prompt and its
    response together. waiting: whether there are more prompts than rows.

    Without waiting prompts, decoding ends at the last slot, if all responses may have equally many tokens. Otherwise it
    may go on: before the last slot is passed, all rows are moved to the left (`Batch.make_room`). Further slots make
    that rare where prompts wait.
    """
    return tokens + CHECK_EVERY + (max(8 * CHECK_EVERY, tokens // 4) if waiting else 0)
