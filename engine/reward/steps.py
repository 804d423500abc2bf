"""A process reward model: a number for each step of a response, at the token that ends the step.

ends = StepEnds(tokenizer, "\n", at_end=True)
reward = ProcessRewardModel(models.rewards[0], ends)
reward.score(rollout)        # (B, T): the probability that a step is good, at the step's last token
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.errors import UserError
from engine.experience import Rollout
from engine.reward.base import RewardModel
from engine.trace import traced


class StepEnds:
    """Finds the tokens with which the steps of a response end. Training and step 3 find them by the same ids.

    A step ends with the token that completes `text`; spaces around it do not count, because some tokenizers write them
    in no token of their own. What is blank, as an empty line, is no step. at_end: whether the end of a response ends
    its last step, if that step has no `text` behind it.

    Raises: UserError, with `what` in its message, if the tokenizer cannot write `text`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str, at_end: bool, what: str = "a step's end"):
        self.tokenizer, self.text, self.at_end = tokenizer, text.strip(" "), at_end
        added = tokenizer.added_tokens_decoder.items()
        self.special = {*tokenizer.all_special_ids, *(token for token, about in added if about.special)}
        self._pieces: dict[int, str] = {}
        tried = tokenizer([text, f"a{text}b"], add_special_tokens=False)["input_ids"]
        if not self.text or not any(self.text in "".join(map(self._piece, ids)) for ids in tried):
            raise UserError(
                f"{what}: no step can end with {text!r}, because the tokenizer in {tokenizer.name_or_path} does not "
                "write it. Give a text, or a token, that responses can have."
            )

    def of(self, ids: Sequence[int], ended: bool) -> list[int]:
        """The positions of the tokens that end a step. ids: a response, with the token that ended it. ended: whether
        the response came to its end."""
        pieces = list(map(self._piece, ids))
        behind = list(accumulate(map(len, pieces)))  # characters up to the end of each token
        whole, begin, found = "".join(pieces), 0, list[int]()
        while (end := whole.find(self.text, begin)) >= 0:
            before, begin = whole[begin:end], end + len(self.text)
            if before.strip() and (place := bisect_left(behind, begin)) not in found[-1:]:
                found.append(place)
        if ended and self.at_end and whole[begin:].strip():
            found.append(len(ids) - 1)
        return found

    def _piece(self, token: int) -> str:
        """What a token writes. A special token writes nothing, unless steps end with it."""
        if token not in self._pieces:
            piece = self.tokenizer.decode([token])
            self._pieces[token] = "" if token in self.special and piece not in self.text else piece
        return self._pieces[token]


class ProcessRewardModel(RewardModel):
    """The frozen process reward model. The number of a step is the probability that it is good, between 0 and 1: the
    sigmoid of the model's log-odds (`engine/models/reward_formats.py` names the sources)."""

    normalised = True  # probabilities are comparable as they are

    def __init__(self, model, ends: StepEnds):
        super().__init__(model)
        self.ends = ends

    @traced("process reward model")
    def score(self, rollout: Rollout) -> Tensor:
        """(B, T) float32: the number of each step at the token that ends it, elsewhere 0. A step that ends in a token
        that the policy did not draw has none."""
        log_odds = self.model(rollout.sequences, rollout.attention_mask, rollout.position_ids)
        marks = torch.zeros_like(rollout.response_mask)
        lengths, ended = rollout.response_mask.sum(-1).tolist(), rollout.ended.tolist()
        for row, (ids, length) in enumerate(zip(rollout.responses.tolist(), lengths, strict=True)):
            marks[row, self.ends.of(ids[:length], ended[row])] = True
        numbers = torch.sigmoid(log_odds[:, rollout.prompt_length :])
        return torch.where(marks & rollout.actions, numbers, torch.zeros_like(numbers))
