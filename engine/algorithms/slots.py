"""What of a response counts: the text that is scored, and which slots each number stands on.

Slot t holds response token t, and the log-prob and value read where that token is predicted. The rules are a dialect's,
looked up once; the math is in engine/algo/rewards.py and truncation.py.
"""

from dataclasses import replace

import torch
from torch import Tensor

from engine.algo.rewards import counted_tokens, first_slots, score_slots, slots_after_tokens, slots_up_to
from engine.algo.truncation import has_end, kept_slots
from engine.algorithms.dialect import Dialect
from engine.experience import Masks, Rollout, Slots


class ResponseRules:
    """A dialect's rules for what of a response is scored, learned and counted.

    Args:
        pad_token_id: what fills the slots after a response.
        end_token_id: the token that `truncate_token` names; without one that of EOS, or None if there is no EOS.
    """

    def __init__(self, dialect: Dialect, pad_token_id: int, end_token_id: int | None):
        assert not dialect.truncate_token or end_token_id is not None, (
            f"truncate_token {dialect.truncate_token!r} without its id"
        )
        self.dialect, self.pad_token_id, self.end_token_id = dialect, pad_token_id, end_token_id
        self.learns_all_sampled = dialect.length_rule == "row"
        self.hides_pads = dialect.length_rule == "not_pad"
        self._kl_slots = {"after_tokens": self._after_tokens}.get(dialect.reward_slots, self._up_to)
        self._value_mask = {
            "response": lambda counted, lengths: counted,
            "one_past": lambda counted, lengths: first_slots(lengths + 1, counted.shape[1]),
        }[dialect.value_loss_slots]
        if dialect.truncate_token:
            self.scored_text = self._up_to_the_end_token
        elif dialect.sampling == "until_eos" or end_token_id is None:
            self.scored_text = self._as_sampled
        else:
            self.scored_text = self._whole_row

    def _up_to_the_end_token(self, responses: Tensor, mask: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        """(what of each response is scored, (B, T) bool; whether it has the end it should have, (B,) bool).

        Args:
            responses: (B, T) int64. mask: (B, T) bool, every sampled token. ended: (B,) bool, by the sampler.
        """
        assert self.end_token_id is not None
        sampled, after = torch.where(mask, responses, -1), self.dialect.truncate_after
        return mask & kept_slots(sampled, self.end_token_id, after), has_end(sampled, self.end_token_id, after)

    def _as_sampled(self, responses: Tensor, mask: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        return mask, ended

    def _whole_row(self, responses: Tensor, mask: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
        assert self.end_token_id is not None
        return mask, has_end(torch.where(mask, responses, -1), self.end_token_id)

    def texts(self, rollout: Rollout) -> tuple[Rollout, Rollout]:
        """(what is learned, what is scored).

        They are the same, unless a dialect learns all that was sampled, or reads the score before the first pad token.
        A system whose attention mask is `ids != pad` attends to no pad token, in prompts and responses.
        """
        kept, ended = self.scored_text(rollout.responses, rollout.response_mask, rollout.ended)
        if self.hides_pads:
            rollout = rollout.without_attention_to(self.pad_token_id)
        learned = (
            replace(rollout, ended=ended) if self.learns_all_sampled else rollout.cut(kept, ended, self.pad_token_id)
        )
        if self.dialect.score_before_pad:
            kept = counted_tokens(rollout.responses, kept, self.pad_token_id, "before_pad")
        return learned, rollout.cut(kept, ended, self.pad_token_id)

    def slots(self, responses: Tensor, response_mask: Tensor) -> Slots:
        """Lengths, score slots and masks.

        Args:
            responses: (B, T) int64, as wide as the system's own would be: its rows end with the longest response of
                the batch that was generated together, or after a fixed length. Wider rows move the score of some.
            response_mask: (B, T) bool, of what is learned.
        """
        dialect, width = self.dialect, responses.shape[1]
        counted = counted_tokens(responses, response_mask, self.pad_token_id, dialect.length_rule)
        lengths = counted.sum(-1)
        learned = (lengths >= dialect.min_response_tokens).unsqueeze(-1)
        value = self._value_mask(counted, lengths)
        return Slots(
            lengths=lengths,
            score_slot=score_slots(lengths, width, dialect.score_slot),
            kl_mask=self._kl_slots(counted, lengths),
            masks=Masks(counted & learned, value & learned, slots_up_to(lengths, width, dialect.value_slots)),
        )

    def learned(self, masks: Masks, ended: Tensor) -> Masks:
        """The masks without responses that are not learned from: with `mask_truncated` those without end.

        It is for masks that advantages have been made with: a response that is left out is one that others are compared
        with all the same. ended: (B,) bool.

        Source: huggingface/trl v1.16.0, trl/trainer/grpo_trainer.py, `mask_truncated_completions`, by which advantages
        are those of all responses; Yu et al. 2025, "DAPO", section 3.4, overlong filtering.
        """
        if not self.dialect.mask_truncated:
            return masks
        kept = ended.unsqueeze(-1)
        return replace(masks, policy=masks.policy & kept, value=masks.value & kept)

    def _up_to(self, counted: Tensor, lengths: Tensor) -> Tensor:
        return slots_up_to(lengths, counted.shape[1], self.dialect.reward_slots)

    def _after_tokens(self, counted: Tensor, lengths: Tensor) -> Tensor:
        return slots_up_to(lengths, counted.shape[1], "two_past") & slots_after_tokens(counted)
