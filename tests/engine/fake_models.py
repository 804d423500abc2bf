"""Stand-ins for the four models, for tests of what a step makes of their answers.

    models = TableModels({901: Row(logprobs=[-1, -2], ref_logprobs=[-1, -1], values=[0, 1], score=2)})
    maker = ExperienceMaker(**models.roles(), algorithm=Algorithm(dialect, pad_token_id=0), micro_batch_size=2)

TableModels answers from a table, by the token that ends a row's prompt; PrefixModels computes each answer from the real
tokens that stand before it, as a causal language model does, so that no answer depends on padding.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.experience import Rollout
from engine.reward.base import RewardSource

UNREAD = float("nan")  # stands at every position whose value nobody should read


@dataclass(frozen=True, slots=True)
class Row:
    """What the models say of one row; slot by slot, for at least as many slots as are asked for."""

    logprobs: list[float]
    ref_logprobs: list[float]
    values: list[float]
    score: float


class Resident(RewardSource):
    """A model that must only be asked within its `on_device` context."""

    def __init__(self, answer):
        self.answer, self.present, self.prepared = answer, False, False

    @contextlib.contextmanager
    def on_device(self):
        """Context in which the model may be asked."""
        self.present = True
        yield
        self.present = False

    def ref_logprobs(self, rollout: Rollout, temperature: float) -> Tensor:
        """As engine.reference.Reference."""
        assert self.present, "the reference was asked outside its on_device context"
        return self.answer(rollout, temperature)

    def after_step(self, steps: int) -> None:
        """As engine.reference.Reference."""

    def moves(self, steps: int) -> None:
        """As engine.reference.Reference."""

    def is_actor(self, steps: int) -> bool:
        """As engine.reference.Reference."""
        return steps == 0

    def prepare(self, rollout: Rollout) -> None:
        """As engine.reward.base.RewardSource."""
        self.prepared = True

    def score(self, rollout: Rollout) -> Tensor:
        """As engine.reward.base.RewardSource."""
        assert self.prepared, "the reward model was not told of all responses before it was asked"
        assert self.present, "the reward model was asked outside its on_device context"
        return self.answer(rollout)


class Asked:
    """A function that stands for a trained model."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)

    def inferring(self) -> contextlib.AbstractContextManager:
        """As engine.zero.engines.TrainedModel."""
        return contextlib.nullcontext()


class _Models:
    """The four roles; subclasses say what they answer. `sizes` and `temperatures` tell what was asked of them."""

    def __init__(self):
        self.sizes: list[int] = []
        self.temperatures: list[float] = []

    def roles(self) -> dict:
        """The arguments actor, critic, reference and reward of ExperienceMaker."""
        return {
            "actor": Asked(self.actor),
            "critic": Asked(self.critic),
            "reference": Resident(self.reference),
            "reward": Resident(self.reward),
        }


class TableModels(_Models):
    """Fixed answers by the token that ends a row's prompt, which occurs nowhere else."""

    def __init__(self, table: dict[int, Row]):
        super().__init__()
        self.table = table

    def rows(self, sequences: Tensor) -> list[tuple[Row, int]]:
        """Each row's answers and the number of its prompt slots."""
        found = []
        for tokens in sequences.tolist():
            mark = next(token for token in tokens if token in self.table)
            found.append((self.table[mark], tokens.index(mark) + 1))
        return found

    def actor(self, sequences, attention_mask, position_ids, *, response_length, temperature, with_entropy):
        """As Policy.forward: log-probs, and an entropy of 1 + slot."""
        assert with_entropy and sequences.shape == attention_mask.shape == position_ids.shape
        self.sizes.append(len(sequences))
        self.temperatures.append(temperature)
        logprobs = torch.tensor([row.logprobs[:response_length] for row, _ in self.rows(sequences)])
        return logprobs, 1.0 + torch.arange(response_length).expand(logprobs.shape)

    def critic(self, sequences, attention_mask, position_ids):
        """As Scorer.forward: the value of slot t stands at position P - 1 + t; NaN where nobody should look."""
        values = torch.full(sequences.shape, UNREAD)
        for index, (row, prompt) in enumerate(self.rows(sequences)):
            slots = sequences.shape[1] - prompt
            values[index, prompt - 1 : -1] = torch.tensor(row.values[:slots])
        return values

    def reference(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T)."""
        self.temperatures.append(temperature)
        return torch.tensor([row.ref_logprobs[: rollout.response_length] for row, _ in self.rows(rollout.sequences)])

    def reward(self, rollout: Rollout) -> Tensor:
        """(B,)."""
        return torch.tensor([row.score for row, _ in self.rows(rollout.sequences)])


class PrefixModels(_Models):
    """Answers computed from the real tokens up to where they stand."""

    @staticmethod
    def states(sequences: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S) float64: for each position a number made of the real tokens up to it and their places."""
        real = sequences * attention_mask
        return (real * (1.0 + 0.1 * attention_mask.cumsum(-1).double())).cumsum(-1)

    def logprobs(self, sequences, attention_mask, position_ids, response_length, pitch: float) -> Tensor:
        """(B, T) between -2 and 0, of the last tokens given what stands before them."""
        states = self.states(sequences, attention_mask)[:, -response_length - 1 : -1]
        positions = position_ids[:, -response_length - 1 : -1]
        return (torch.sin(pitch * states + 0.7 * sequences[:, -response_length:] + 0.2 * positions) - 1).float()

    def actor(self, sequences, attention_mask, position_ids, *, response_length, temperature, with_entropy):
        """As Policy.forward."""
        self.sizes.append(len(sequences))
        logprobs = self.logprobs(sequences, attention_mask, position_ids, response_length, 0.31)
        return logprobs, 2 + torch.cos(logprobs)

    def critic(self, sequences, attention_mask, position_ids):
        """As Scorer.forward."""
        return torch.sin(0.17 * self.states(sequences, attention_mask) + 0.3 * position_ids).float()

    def reference(self, rollout: Rollout, temperature: float) -> Tensor:
        """(B, T)."""
        return self.logprobs(
            rollout.sequences, rollout.attention_mask, rollout.position_ids, rollout.response_length, 0.23
        )

    def reward(self, rollout: Rollout) -> Tensor:
        """(B,) between -8 and 8, so that some scores are clipped."""
        return 8 * torch.cos(0.05 * self.states(rollout.sequences, rollout.attention_mask)[:, -1]).float()


def rollout_of(
    prompts: list[list[int]], responses: list[list[int]], pad: int, *, width: int = 0, prompt_width: int = 0
) -> Rollout:
    """Left-padded prompts and right-padded responses, as wide as needed or wider."""
    left, right = max(prompt_width, *map(len, prompts)), max(width, *map(len, responses))
    rows, masks = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        rows.append([pad] * (left - len(prompt)) + prompt + response + [pad] * (right - len(response)))
        masks.append([0] * (left - len(prompt)) + [1] * (len(prompt) + len(response)) + [0] * (right - len(response)))
    mask = torch.tensor(masks)
    numbers = torch.arange(len(rows))
    return Rollout(torch.tensor(rows), mask, mask[:, left:].bool(), numbers >= 0, numbers, 0 * numbers)


def conversation_of(
    prompts: list[list[int]], turns: list[list[list[int]]], pad: int, *, width: int = 0, prompt_width: int = 0
) -> Rollout:
    """As `rollout_of`, of conversations: a response is a list of what the policy drew, what was inserted, what the
    policy drew, and so on. Each turn brings a reward: its number, counted from 1."""
    texts = [sum(parts, []) for parts in turns]
    rollout = rollout_of(prompts, texts, pad, width=width, prompt_width=prompt_width)
    drawn = torch.zeros_like(rollout.response_mask)
    rewards = torch.zeros(drawn.shape)
    for row, parts in enumerate(turns):
        end = 0
        for place, part in enumerate(parts):
            start, end = end, end + len(part)
            if place % 2 == 0:
                drawn[row, start:end] = True
                rewards[row, end - 1] = 1.0 + place // 2
    return replace(rollout, action_mask=drawn, turn_rewards=rewards)
