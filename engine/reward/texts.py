"""A reward model that reads texts: it gets the ids of its own tokenizer and chat template, not the policy's ids."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.experience import Rollout, position_ids
from engine.packing import passes
from engine.reward.base import RewardModel, at_once, keys_of, stop_all_ranks
from engine.trace import traced
from engine.zero.engines import FrozenModel


class TextRewardModel(RewardModel):
    """A frozen reward model that scores the ids which `read` makes of each response and its prompt.

    read: a function from a rollout to the ids of each row; it may raise anything. tell: called on all ranks after each
    call of `read`. tokens: the largest number of tokens in a forward pass. name: the model's name in messages.
    """

    def __init__(
        self,
        model: FrozenModel,
        read: Callable[[Rollout], list[list[int]]],
        tell: Callable[[], None],
        tokens: int,
        name: str,
    ):
        super().__init__(model)
        self.read, self.tell = read, tell
        self.tokens, self.name = tokens, name
        self._ids: dict[tuple[int, int], list[int]] = {}

    def prepare(self, rollout: Rollout) -> None:
        """Tokenise all responses of this rank. Raises: RunStopped on all ranks if one rank's template or tokenizer
        fails."""
        found: list[list[int]] = []
        problem = None
        try:
            found = self.read(rollout)
        except Exception as error:  # a template may raise anything
            problem = f"cannot read a response: {error}".rstrip(".")
        stop_all_ranks(problem, self.name, "It reads texts by its own chat template and tokenizer. Correct these.")
        self._ids = dict(zip(keys_of(rollout), found, strict=True))
        self.tell()

    def in_pieces(self, call, rollout: Rollout, passes: Sequence[Tensor]) -> dict[str, Tensor]:
        """As in RewardSource, in one call: its texts have other lengths, so `score` deals them to passes itself."""
        return super().in_pieces(call, rollout, at_once(passes))

    @traced("reward model")
    def score(self, rollout: Rollout) -> Tensor:
        """The scores, (B,) float32, in as many passes as the rank needs that needs the most."""
        device, padded = rollout.sequences.device, not self.model.module.packs
        ids = [self._ids[key] for key in keys_of(rollout)]
        group = self.model.module.group
        pieces = passes([0] * len(ids), list(map(len, ids)), self.tokens, equally_many=True, padded=padded, group=group)
        scores = torch.empty(len(ids), device=device)
        for rows in pieces:
            scores[rows] = self._pass([ids[row] for row in rows], device)
        return scores

    def _pass(self, rows: list[list[int]], device: torch.device) -> Tensor:
        """The scores of one forward pass, (N,) float32. The rows are padded on the right: the mask and the positions
        make that right for any model, and the pad token is never looked at."""
        width = max(map(len, rows), default=1)
        ids = [row + [row[-1]] * (width - len(row)) for row in rows]
        sequences = torch.tensor(ids, dtype=torch.int64, device=device).view(-1, width)
        lengths = torch.tensor([len(row) for row in rows], device=device).view(-1, 1)
        mask = (torch.arange(width, device=device) < lengths).long()
        token_scores = self.model(sequences, mask, position_ids(mask))
        return self.model.module.sequence_scores(token_scores, sequences, mask)
