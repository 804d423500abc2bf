"""Turns the score of a response into the reward of each token: changes the score, selects the positions that count, and
adds the score to the KL penalties.

Position t holds response token t, and the log-prob and the value that were computed where token t is predicted. The
position after the last token of a response therefore holds the value of the state in which the response is complete.
Systems differ in whether they count the position after the last token, and in which token they take for the last.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algo.masked import masked_sum, mean_and_variance

# {rule: the number of positions after the response that count}
POSITIONS_PAST = {"response": 0, "one_past": 1, "two_past": 2}
SCORE_PAST = {"last": -1, "after_last": 0, "two_after": 1}


def counted_tokens(responses: Tensor, response_mask: Tensor, pad_token_id: int, rule: str) -> Tensor:
    """Whether each response token counts as a real token under a system's rule: (B, T) bool.

    Args:
        responses: (B, T) int64.
        response_mask: (B, T) bool, set on every sampled token, or on the tokens that remain after truncation.
        rule: "sampled" counts the tokens in the mask, EOS included. "before_pad" counts the tokens before the first pad
            token, thus not EOS if EOS is also the pad token. "not_pad" counts all tokens other than the pad token, also
            those after a pad token. "row" counts every position, whatever token it holds.

    Source: "before_pad" huggingface/trl f2cd5771, `first_true_indices`; "not_pad" DeepSpeedExamples 83757d9c,
    DeepSpeed-Chat's `action_mask`; "row" openai/lm-human-preferences cbfd210b, whose responses all have one length.
    """
    if rule == "sampled":
        return response_mask
    if rule == "row":
        return torch.ones_like(response_mask)
    real = (responses != pad_token_id) & response_mask
    if rule == "not_pad":
        return real
    if rule == "before_pad":
        return real.long().cumprod(-1).bool()
    raise ValueError(f"length rule {rule!r}: known are sampled, before_pad, not_pad, row")


def valid_responses(policy_mask: Tensor, min_tokens: int) -> Tensor:
    """Whether each response counts in statistics that take one number from each response: (B,) bool. A response counts
    if it has at least one position in policy_mask, (B, T) bool.

    With min_tokens 0 a response without tokens counts too: the other responses are compared with its score, and its
    ratio is 1.
    """
    return policy_mask.any(-1) | (min_tokens == 0)


def score_positions(lengths: Tensor, width: int, rule: str) -> Tensor:
    """The position at which each response receives its score: (B,) int64.

    Args:
        lengths: (B,) int64, the lengths L of the responses.
        width: T, the number of response positions. If the rule gives a position beyond the width, the score goes to
            position T - 1.
        rule: "last" is position L - 1, the last real token; "after_last" position L; "two_after" position L + 1.
    """
    if rule not in SCORE_PAST:
        raise ValueError(f"score position {rule!r}: known are {', '.join(SCORE_PAST)}")
    return (lengths + SCORE_PAST[rule]).clamp(0, width - 1)


def last_positions(mask: Tensor) -> Tensor:
    """The last position of each row in a mask, (B, T) bool: (B,) int64, 0 in a row without one."""
    return torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).amax(-1)


def at_drawn_tokens(numbers: Tensor, drawn: Tensor) -> Tensor:
    """The numbers of tokens, (B, T) float32, with those of inserted tokens moved to drawn ones: each to the last drawn
    token before it, or to the first one if there is none before it. drawn: (B, T) bool."""
    first = drawn.long().argmax(-1, keepdim=True)
    latest = torch.where(drawn, torch.arange(drawn.shape[1], device=drawn.device), first).cummax(-1).values
    return torch.zeros_like(numbers).scatter_add(1, latest, numbers)


def marked_first(mask: Tensor) -> Tensor:
    """An order of each row's positions, (B, T) int64: first those in the mask, (B, T) bool, then the others. In this
    order, `numbers.gather(1, order)`, drawn tokens stand side by side."""
    return mask.long().argsort(dim=1, descending=True, stable=True)


def in_place(ordered: Tensor, order: Tensor) -> Tensor:
    """Numbers of tokens, (B, T), which `gather(1, order)` has moved, back at their own positions."""
    return torch.zeros_like(ordered).scatter(1, order, ordered)


def first_positions(lengths: Tensor, width: int) -> Tensor:
    """A mask of the first `lengths` positions of each row: (B, T) bool."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def positions_up_to(lengths: Tensor, width: int, rule: str) -> Tensor:
    """A mask of the positions that a rule counts, (B, T) bool. "response" counts the positions of the response,
    "one_past" and "two_past" also the next one or two positions, "all" all positions of the row."""
    if rule == "all":
        return torch.ones(len(lengths), width, dtype=torch.bool, device=lengths.device)
    if rule not in POSITIONS_PAST:
        raise ValueError(f"positions {rule!r}: known are {', '.join(POSITIONS_PAST)}, all")
    return first_positions(lengths + POSITIONS_PAST[rule], width)


def positions_after_tokens(counted: Tensor) -> Tensor:
    """A mask, (B, T) bool, of the first position and of each position that follows a counted token. It leaves out the
    position after a pad token inside a response.

    Args: counted: (B, T) bool.

    Source: CarperAI/trlx 3340c2f3, accelerate_ppo_trainer.py, `make_experience`: `log_ratio * attention_mask[:, :-1]`.
    """
    return F.pad(counted[:, :-1], (1, 0), value=True)


def token_rewards(kl: Tensor, kl_coef: float, kl_mask: Tensor, scores: Tensor, positions: Tensor) -> Tensor:
    """r_t = -kl_coef * KL_t where `kl_mask` is set, plus the score on one position.

    Args:
        kl: (B, T) float32, the KL estimate of each token.
        kl_coef: the KL coefficient from its controller; 0 if the KL penalty is part of the loss instead.
        kl_mask: (B, T) bool.
        scores: (B,) float32, already clipped and scaled.
        positions: (B,) int64, from `score_positions`.

    Returns: (B, T) float32. Source: Ziegler et al. 2019, "Fine-tuning language models from human preferences", eq. 2.
    """
    rewards = torch.where(kl_mask, -kl_coef * kl, torch.zeros_like(kl))
    return rewards.scatter_add(1, positions.unsqueeze(-1), scores.unsqueeze(-1))


def apply_missing_end(scores: Tensor, ended: Tensor, rule: str, value: float) -> Tensor:
    """Returns the scores. The score of a response that did not end is replaced by `value` or reduced by it.

    Args:
        scores: (B,) float32.
        ended: (B,) bool.
        rule: "none", "replace" or "subtract".

    Source: "replace" openai/lm-human-preferences cbfd210b, train_policy.py, `make_score_fn`; "subtract"
    huggingface/trl f2cd5771, `missing_eos_penalty`.
    """
    if rule == "none":
        return scores
    if rule == "replace":
        return torch.where(ended, scores, torch.full_like(scores, value))
    if rule == "subtract":
        return torch.where(ended, scores, scores - value)
    raise ValueError(f"rule for missing ends {rule!r}: known are none, replace, subtract")


def overlong_penalties(lengths: Tensor, longest: int, buffer: float, most: float) -> Tensor:
    """The penalties for long responses. A penalty is 0 up to a certain length, and then grows with each token up to
    `most`.

        R(y) = 0                                        where |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache      up to L_max, where it is -1; times `most`

    Args:
        lengths: (B,) int64, |y|, tokens of each response, EOS included.
        longest: L_max, the most tokens that a response may have.
        buffer: L_cache / L_max, the share of L_max in which the penalty grows; over 0.
        most: the penalty of a response of L_max tokens; 1 in the paper.

    Returns: (B,) float32, between -most and 0, to be added to the scores.
    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", eq. 13, where L_max is
    20480 and L_cache 4096; volcengine/verl 003364bc, verl/workers/reward_manager/dapo.py (`overlong_buffer`), whose
    `penalty_factor` is `most`.
    """
    cache = buffer * longest
    return most * ((longest - cache - lengths) / cache).clamp(-1, 0).float()


def mean_logprobs(logprobs: Tensor, drawn: Tensor) -> Tensor:
    """The mean log-prob of each response's drawn tokens, nats a token: (B,) float32. logprobs: (B, T) float32. drawn:
    (B, T) bool."""
    return masked_sum(logprobs, drawn, -1) / drawn.sum(-1).clamp(min=1)


def likelihood_part(likelihoods: Tensor, mean: float, deviation: float, coef: float, cap: float) -> Tensor:
    """What the likelihood of a response adds to its score: coef * min((likelihood - mean) / deviation, cap).

    The cap keeps the policy from the texts that a language model finds most likely, which repeat themselves. There is
    no floor.

    Args: likelihoods: (B,) float32, from `mean_logprobs`. mean, deviation: of the likelihoods of the SFT model's
        responses. Returns: (B,) float32.
    """
    return coef * ((likelihoods.double() - mean) / deviation).clamp(max=cap).float()


def groups_alike(scores: Tensor, group_size: int) -> Tensor:
    """Whether all scores of a group are equal, for each group: (B / group_size,) bool. In such a group all responses
    have the advantage 0.

    A group with a NaN or infinite score is never marked; other code refuses these scores.

    Args:
        scores: (B,) float32; the responses to one prompt are adjacent.

    Source: volcengine/verl 53971be5, recipe/dapo/dapo_ray_trainer.py, `fit`: the deviation of a prompt's scores is 0.
    """
    groups = scores.view(-1, group_size)
    return (groups == groups[:, :1]).all(-1) & groups.isfinite().all(-1)


def clip_scores(scores: Tensor, limit: float | None) -> Tensor:
    """Clips the scores to plus and minus `limit`; if it is None, returns them unchanged."""
    return scores if limit is None else scores.clamp(-limit, limit)


class ScoreScale:
    """The standard deviation that numbers of responses are divided by: scores, whose mean is not subtracted, or
    likelihoods.

    kind: "none" divides by 1; "running" divides by the standard deviation of all scores so far, the present ones
    included; "first_batch" divides by the standard deviation of the first batch of scores. Standard deviations are
    computed with n - 1.

        scale.update(distributed.data_parallel_sum(moments(scores, everywhere)))
        scores = scores / scale.value

    `update` takes sums (`masked.moments`), so that a caller can first add them up over ranks. All ranks then divide by
    the same number. Source: CarperAI/trlx 3340c2f3, trlx/utils/modeling.py, `RunningMoments` (its standard deviation
    after any number of updates is that of all scores together), and `make_experience` (its standard deviation of the
    first batch is computed on each rank alone).
    """

    def __init__(self, kind: str = "none"):
        if kind not in ("none", "running", "first_batch"):
            raise ValueError(f"score scaling {kind!r}: known are none, running, first_batch")
        self.kind = kind
        self._totals = torch.zeros(3, dtype=torch.float64)

    def update(self, totals: Tensor) -> None:
        """Add a batch of scores to the statistics. totals: (3,) float64, count, sum and sum of squares of the scores of
        all ranks."""
        if self.kind == "running" or (self.kind == "first_batch" and not self._totals[0]):
            self._totals = self._totals + totals.double().cpu()

    @property
    def value(self) -> float:
        """The divisor; 1 until two different scores have been seen, beyond the rounding of the sums."""
        mean, variance = mean_and_variance(self._totals, unbiased=True)
        return variance.sqrt().item() if variance > (1e-7 * mean) ** 2 else 1.0

    @property
    def mean(self) -> float:
        """The mean of the numbers whose deviation `value` is."""
        return mean_and_variance(self._totals)[0].item()

    def state_dict(self) -> dict:
        """The sums, for a checkpoint."""
        return {"totals": self._totals.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Restore the sums that `state_dict` returned."""
        self._totals = torch.tensor(state["totals"], dtype=torch.float64)
