"""Whether a critic that predicts a distribution (two-hot, HL-Gauss) says better what a response is worth than a number.

    python scripts/trial_two_hot.py SFT_DIR REWARD_DIR PROMPTS.jsonl --max_answer_seq_len 48

Responses of the SFT model, at temperature 1 until EOS, are scored by the reward model; from a part of them critics
learn what each token's response is worth in the end, as `--critic_pretrain_steps` has it (what follows with lambda 1,
no KL), and of the others it is measured which part of the variance their values explain. All start from the reward
model's trunk, take the same responses in the same order with the same Adam, and choose their rate from the same list
with a seed of their own. Values are expectations over bins between the lowest and the highest score that is learned
from:

    number     the squared error, with the reward model's own head
    number, new head     the same with a head of zeros, as the others begin
    two-hot    cross entropy to the two bins beside the outcome; Farebrother et al. 2024, "Stop regressing" (arXiv
               2403.03950), section 3.1
    HL-Gauss   cross entropy to a normal distribution around it, of 0.75 bins' deviation; section 3.1, there the best
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import torch
import torch.nn.functional as F
from datasets import load_dataset
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from engine.models.loading import load_scorer
from scripts.trial_critic import mean_and_error

SEARCH_SEED = 1000  # of the rates; no seed that is compared
SIGMA = 0.75  # bins, of HL-Gauss


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts and responses, left- and right-padded: (N, S) int64, the mask (N, S), and (N,) float32 scores.

    states: (N, S) bool, the positions from which response tokens are predicted.
    """

    sequences: Tensor
    mask: Tensor
    states: Tensor
    scores: Tensor

    def rows(self, chosen: Tensor | slice) -> "Texts":
        return Texts(self.sequences[chosen], self.mask[chosen], self.states[chosen], self.scores[chosen])


class Number(nn.Module):
    """One number a token, learned by its squared error."""

    def __init__(self, head: nn.Linear, offset: float):
        super().__init__()
        self.head, self.offset = head, offset

    def forward(self, hidden: Tensor) -> Tensor:
        """The values (N,) of hidden states (N, d)."""
        return self.head(hidden).squeeze(-1) + self.offset

    def losses(self, hidden: Tensor, outcomes: Tensor) -> Tensor:
        """Of each, (N,)."""
        return 0.5 * (self(hidden) - outcomes) ** 2


class Distribution(nn.Module):
    """Probabilities of bins, learned by cross entropy to `target(outcomes, centres)`, (N, K)."""

    def __init__(self, width: int, centres: Tensor, target: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.head, self.centres, self.target = zeros(width, len(centres)), centres, target

    def forward(self, hidden: Tensor) -> Tensor:
        """Their means, (N,)."""
        return self.head(hidden).softmax(-1) @ self.centres

    def losses(self, hidden: Tensor, outcomes: Tensor) -> Tensor:
        """Of each, (N,)."""
        return -(self.target(outcomes, self.centres) * self.head(hidden).log_softmax(-1)).sum(-1)


def zeros(width: int, outputs: int) -> nn.Linear:
    """A head of zeros: all bins alike, and the number 0."""
    head = nn.Linear(width, outputs)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def two_hot(outcomes: Tensor, centres: Tensor) -> Tensor:
    """The weights of the two centres beside each outcome whose mean is the outcome: (N,) -> (N, K)."""
    places = (outcomes.clamp(centres[0], centres[-1]) - centres[0]) / (centres[1] - centres[0])
    return (1 - (places[:, None] - torch.arange(len(centres))).abs()).clamp(min=0)


def hl_gauss(outcomes: Tensor, centres: Tensor) -> Tensor:
    """The normal distribution's share of each bin, of what lies within all of them: (N,) -> (N, K)."""
    width = centres[1] - centres[0]
    edges = torch.cat([centres - width / 2, centres[-1:] + width / 2])
    below = torch.special.ndtr((edges - outcomes.clamp(centres[0], centres[-1])[:, None]) / (SIGMA * width))
    return below.diff(dim=-1) / (below[:, -1:] - below[:, :1])


def drawn(options: argparse.Namespace) -> Texts:
    """The SFT model's responses to as many prompts, with the reward model's scores."""
    tokenizer = AutoTokenizer.from_pretrained(options.sft, padding_side="left")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    tokenizer.pad_token_id = pad
    model = AutoModelForCausalLM.from_pretrained(options.sft, dtype=torch.float32).eval()
    reward = load_scorer(options.reward, torch.float32).eval()
    rows = load_dataset("json", data_files=str(options.prompts), split="train")
    prompts = rows.shuffle(seed=0)["prompt"][: options.train + options.held_out]
    slots, total = options.max_prompt_seq_len, options.max_prompt_seq_len + options.max_answer_seq_len
    parts = []
    for first in range(0, len(prompts), 64):
        given = tokenizer(prompts[first : first + 64], add_special_tokens=True)["input_ids"]
        padded = tokenizer.pad({"input_ids": [ids[-slots:] for ids in given]}, padding="max_length", max_length=slots)
        ids, mask = (torch.tensor(padded[name]) for name in ("input_ids", "attention_mask"))
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": pad}
        with torch.no_grad():
            found = model.generate(ids, attention_mask=mask, max_length=total, **settings)
        found = F.pad(found, (0, total - found.shape[1]), value=pad)
        ended = (found[:, slots:] == tokenizer.eos_token_id).cumsum(-1)
        response = (ended - (found[:, slots:] == tokenizer.eos_token_id).long()) == 0
        mask = torch.cat([mask, response.long()], -1)
        with torch.no_grad():
            tokens = reward(found, mask, positions(mask))
        scores = reward.sequence_scores(tokens, found, mask)
        states = torch.cat([torch.zeros(len(found), slots - 1), response, torch.zeros(len(found), 1)], -1).bool()
        parts.append(Texts(found, mask, states, scores))
    return Texts(*(torch.cat([getattr(part, name) for part in parts]) for name in Texts.__slots__))


def positions(mask: Tensor) -> Tensor:
    """Left padding shifts nothing: (N, S) int64."""
    return (mask.cumsum(-1) - mask).clamp(min=0)


KINDS = ("number", "number, new head", "two-hot", "HL-Gauss")


def explained(
    kind: str, rate: float, seed: int, texts: tuple[Texts, Texts], options: argparse.Namespace
) -> list[float]:
    """1 - Var(outcome - value) / Var(outcome) over all tokens held out, after each of `options.measured` steps."""
    learned, held_out = texts
    torch.manual_seed(seed)
    scorer = load_scorer(options.reward, torch.float32).eval()
    width = scorer.model.score.in_features
    centres = torch.linspace(learned.scores.min().item(), learned.scores.max().item(), options.bins)
    values: Number | Distribution
    if kind.startswith("number"):
        values = Number(*(scorer.model.score, scorer.offset) if kind == "number" else (zeros(width, 1), 0.0))
    else:
        values = Distribution(width, centres, two_hot if kind == "two-hot" else hl_gauss)
    weights = [*scorer.model.base_model.parameters(), *values.head.parameters()]
    adam, found = torch.optim.Adam(weights, lr=rate), []

    def states(rows: Texts) -> tuple[Tensor, Tensor]:
        hidden = scorer.hidden_states(rows.sequences, rows.mask, positions(rows.mask))[rows.states]
        return hidden, rows.scores[:, None].expand_as(rows.states)[rows.states]

    order = torch.randperm(len(learned.scores)).split(64)
    for step, chosen in enumerate(order[: max(options.measured)], start=1):
        values.losses(*states(learned.rows(chosen))).mean().backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad()
        if step in options.measured:
            with torch.no_grad():
                hidden, outcomes = states(held_out)
                found.append(1 - ((outcomes - values(hidden)).var() / outcomes.var()).item())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sft", metavar="SFT_DIR")
    parser.add_argument("reward", metavar="REWARD_DIR")
    parser.add_argument("prompts", type=Path, metavar="PROMPTS.jsonl")
    parser.add_argument("--max_prompt_seq_len", type=int, default=32)
    parser.add_argument("--max_answer_seq_len", type=int, default=48)
    parser.add_argument("--train", type=int, default=2560, help="responses, 64 of which are a step (2560)")
    parser.add_argument("--held_out", type=int, default=512, help="responses (512)")
    parser.add_argument("--bins", type=int, default=51)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--measured", type=int, nargs="+", default=[10, 20, 40], help="steps (10 20 40)")
    options = parser.parse_args(arguments)
    disable_progress_bar()  # one for each critic
    torch.manual_seed(0)
    texts = drawn(options)
    parts = texts.rows(slice(options.train)), texts.rows(slice(options.train, None))
    print(f"|  | rate | {' | '.join(f'{step} steps' for step in options.measured)} |")
    print("| --- | --- |" + " --- |" * len(options.measured), flush=True)
    for kind in KINDS:
        # By the last measurement alone, whose length the runs that are compared have.
        tried = {rate: explained(kind, rate, SEARCH_SEED, parts, options)[-1] for rate in options.rates}
        rate = max(tried, key=tried.__getitem__)
        runs = [explained(kind, rate, seed, parts, options) for seed in options.seeds]
        cells = [mean_and_error(column) for column in zip(*runs, strict=True)]
        print(f"| {kind} | {rate:g} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
