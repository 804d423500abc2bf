"""Evaluates a policy on held-out prompts: the scores of its responses, their KL to the reference, and their variety.

Variety is measured by distinct words and by the compressed size of the responses, without a word list. Each number is
compared with an earlier one on the same prompts. Words are separated by spaces; in a language without spaces a whole
response counts as one word. In a conversation only the policy's own turns are measured: what an environment says is not
the policy's variety.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from engine import distributed
from engine.algo.rewards import mean_logprobs
from engine.atomic_files import write_whole
from engine.errors import RunStopped
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.reference import EMA
from engine.reward.base import decoded, text_behind
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.checkpoints.conditions import BEFORE, FIRST
from training.config.models import SCORE
from training.data.examples import Prompts, collate_prompts
from training.reporting.metrics import Accumulator
from training.reporting.standard_errors import ENDINGS, Estimate, Units, comparable_scores, paired, with_errors
from training.reporting.step_metrics import add_counts
from training.reporting.variety import compressed_bytes, distinct_bigrams, new_words
from training.runtime.processes import phase
from training.runtime.stopping import unwritten_noted

EVAL_SEED = 0x5EED  # changes the run's seed, so that evaluation and training share no random numbers
POLICY, ENVIRONMENT = "policy", "environment"  # who said a turn


@dataclass(frozen=True, slots=True)
class Answers:
    """A policy's responses to the held-out prompts.

    rows: a dict for each response: a row of `sample_rows`, with the parts of the score. They are sorted by prompt, and
        within a prompt by sample.
    ended: for each response, whether it ended by itself. likelihood: for each response, the mean log-prob of its drawn
        tokens under the reference, in nats. score_parts: names of the columns of `rows` whose sum is the
        score, if the score has several parts. rewards: names of the columns with the unweighted scores of each source,
        if there are several sources.
    """

    rows: list[dict]
    ended: list[bool]
    likelihood: list[float]
    score_parts: list[str]
    rewards: list[str]


class Evaluator:
    """Evaluates a policy on the same prompts with the same random numbers each time, so that differences between scores
    come from the policy only.

    first_index: number of training rows. In a reward function's `rows`, the row of held-out prompt i is
        rows[first_index + i].
    before: what was measured on each response before the first step; changes are computed against it. `run(0)` sets it.
        If it has no scores, or its scores have other parts than now, the reward has changed, and no change of the score
        is reported.
    first: the policy's texts before the first step, from which `new_words` tells which words are new. `run(0)` sets it.
    samples: number of responses to each prompt; `run` needs 1.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        rollouts: RolloutBackend,
        experience_maker: ExperienceMaker,
        sampling: SamplingConfig,
        tokenizer,
        first_index: int = 0,
        before: Units | None = None,
        first: Sequence[str] | None = None,
        samples: int = 1,
    ):
        self.prompts = prompts
        self.rollouts = rollouts
        self.experience_maker = experience_maker
        self.sampling = dataclasses.replace(sampling, seed=sampling.seed ^ EVAL_SEED)
        self.tokenizer = tokenizer
        self.first_index = first_index
        self.before = before
        self.first = first
        self.samples = samples

    def run(self, step: int) -> tuple[dict[str, float], list[dict]]:
        """Evaluate the policy; returns (metrics, a row for each prompt). A row has the keys of `Answers.rows`. The
        result is the same on all ranks (all ranks call this).

        step: the number of the step that made the current weights.
        Raises: RunStopped on all ranks for a score or KL that is NaN or infinite.
        """
        assert self.samples == 1, "several samples of a prompt are not independent: `answers` has them"
        answers = self.answers(step)
        rows, parts = answers.rows, [*answers.score_parts, *answers.rewards]
        columns = {"score": "score", "kl": "kl", "response_length": "tokens"}
        columns |= {name: name for name in (*parts, "likelihood") if name in rows[0]}
        units = {name: [float(row[column]) for row in rows] for name, column in columns.items()}
        texts = [text_by(POLICY, row) for row in rows]
        if step == 0:
            self.first = texts
        if self.first is not None:
            read = [f"{row['prompt']}\n{text_by(ENVIRONMENT, row)}" for row in rows]
            units["new_words"] = new_words(texts, self.first, read)
        self.before = units if step == 0 else paired(self.before, parts)
        metrics = with_errors(_estimates(units), self.before and _estimates(self.before))
        metrics["eval/score_std"] = statistics.pstdev(row["score"] for row in rows)
        metrics["eval/distinct_responses"] = float(len(set(texts)))
        metrics["eval/distinct_bigrams"] = float(distinct_bigrams(texts))
        metrics["eval/compressed_bytes"] = compressed_bytes(texts) / max(sum(row["tokens"] for row in rows), 1)
        return metrics | self.counted(), rows

    def counted(self) -> dict[str, float]:
        """The metrics of what the backend has counted since the last call of this method (all ranks call this)."""
        metrics = Accumulator()
        add_counts(metrics, self.rollouts.counts(), "eval")
        return metrics.reduce()

    def answers(self, step: int) -> Answers:
        """Draw and score the responses of all ranks; the result is the same on all ranks (all ranks call this).

        step: the number of the step that made the current weights, for messages.
        Raises: RunStopped on all ranks for a score or KL that is NaN or infinite.
        """
        # All ranks need equally many prompts; if the prompts do not divide evenly, the first ones are used twice.
        ranks = distributed.data_parallel_size()
        filled = -(-len(self.prompts) // ranks) * ranks
        indices = [number % len(self.prompts) for number in range(filled)[distributed.rank_share(filled)]]
        keys = torch.tensor(indices)
        own_prompts = [self.prompts[index] for index in indices]
        batch = collate_prompts(own_prompts, keys, torch.zeros_like(keys), self.sampling.pad_token_id)
        batch = dataclasses.replace(batch, first_row=self.first_index)
        finished = self.rollouts.finished
        if finished is not None:  # the callback gets the same prompt indices as the reward source gets later
            self.rollouts.finished = lambda rollout: finished(self._shifted(rollout))
        try:
            answered = self.rollouts.generate(batch.repeat(self.samples).to(distributed.device()), self.sampling)
        finally:
            self.rollouts.finished = finished
        experience = self.experience_maker.make_experience(self._shifted(answered))
        self.rollouts.release_memory()
        rollout = experience.rollout  # here responses end where the dialect ends them; the sampler may have gone on
        rewards = {f"reward_{name}": reward for name, reward in experience.rewards.items()}
        parts = {name: part.tolist() for name, part in (experience.score_parts | rewards).items()}
        likelihood = mean_logprobs(experience.ref_logprobs, rollout.actions).tolist()
        if self.experience_maker.algorithm.dialect.likelihood_coef:
            parts["likelihood"] = likelihood
        own = {}
        for place, row in enumerate(sample_rows(rollout, experience.scores, experience.kl.sum(-1), self.tokenizer)):
            key = answered.indices[place].item(), answered.samples[place].item()
            row |= {name: part[place] for name, part in parts.items()}
            own[key] = row, rollout.ended[place].item(), likelihood[place]
        found = {key: each for rank in distributed.all_gather_objects(own) for key, each in rank.items()}
        rows, ended, likelihood = map(list, zip(*(found[key] for key in sorted(found)), strict=True))
        _stop_if_not_finite(rows, rewards, step)
        return Answers(rows, ended, likelihood, list(experience.score_parts), list(rewards))

    def _shifted(self, rollout: Rollout) -> Rollout:
        """The rollout, with prompt indices that point into a reward function's `rows`. The indices are changed only
        after the responses are drawn, because the index among the held-out prompts is part of the random key of a
        draw."""
        return dataclasses.replace(rollout, indices=rollout.indices + self.first_index)


def held_out_number(metrics: Mapping[str, float], name: str) -> float:
    """The metric of this name, by which models are chosen. Raises: RunStopped if the evaluation does not have it."""
    if name not in metrics:
        found = ", ".join(key for key in metrics if key.startswith("eval/") and not key.endswith(ENDINGS))
        raise RunStopped(f"there is no held-out number {name}. The evaluation has {found}.")
    return metrics[name]


class PromptEvaluations:
    """The evaluations of a run of step 3: of the actor, and of its moving average. Samples are written into the folder
    samples/ of the output folder.

    evaluator: None if no prompts are held out. ema: the moving average, or None. last_step: the run's last step. every:
    number of steps between evaluations; 0 for none between the first and the last. best_by: the metric by which
    checkpoints are compared. best_max_kl: the largest KL of a checkpoint that counts as the best, in nats a response.
    """

    def __init__(
        self,
        evaluator: Evaluator | None,
        ema: EMA | None,
        output_dir: Path,
        last_step: int,
        every: int,
        best_by: str = SCORE,
        best_max_kl: float | None = None,
    ):
        self.evaluator = evaluator
        self.ema = ema
        self.output_dir = output_dir
        self.last_step, self.every = last_step, every
        self.best_by, self.best_max_kl = best_by, best_max_kl

    def due(self, step: int) -> bool:
        """Whether an evaluation is due after this step: before the first one, after the last one, and in between."""
        asked = step in (0, self.last_step) or (step > 0 and self.every > 0 and step % self.every == 0)
        return self.evaluator is not None and asked

    @phase("evaluating")
    def evaluate(self, step: int) -> dict[str, float]:
        """The metrics after this step (all ranks call this). Before the first step the average is the actor itself."""
        assert self.evaluator is not None, "without held-out prompts nothing is due"
        name = "before" if step == 0 else "after" if step == self.last_step else f"step_{step:06d}"
        metrics, rows = self.evaluator.run(step)
        self._write_samples(name, rows)
        averaged = metrics
        if self.ema is not None and step > 0:
            with self.ema.swapped():
                averaged, rows = self.evaluator.run(step)
            self._write_samples(f"{name}_ema", rows)
        found = metrics if self.ema is None else {**metrics, **_as_average(averaged)}
        held_out_number(found, self.best_by)  # a wrong name ends the run before its first step
        return found

    def _write_samples(self, name: str, rows: list[dict]) -> None:
        """Write held-out samples into a file of this name. If the file cannot be written, the run goes on."""
        path = self.output_dir / "samples" / f"{name}.jsonl"
        with unwritten_noted(path):
            write_rows(path, rows)

    def text(self, step: int, metrics: Mapping[str, float]) -> str:
        """No line: the progress bar shows the score."""
        return ""

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """The number `best_by`; None if the KL of the same weights is above `best_max_kl`."""
        kl = "eval/ema_kl" if self.best_by.startswith("eval/ema_") else "eval/kl"
        if self.best_max_kl is not None and metrics[kl] > self.best_max_kl:
            return None
        return held_out_number(metrics, self.best_by)

    def scores(self, rows: list[dict]) -> dict[int, float]:
        """{step: score} of a run so far, without numbers of another reward than the latest one's."""
        found = {row["step"]: self.score(row) for row in comparable_scores(rows) if self.best_by in row}
        return {step: score for step, score in found.items() if score is not None}

    def state_dict(self) -> dict:
        """What was measured before the first step, and the responses."""
        if self.evaluator is None:
            return {}
        found = {BEFORE: self.evaluator.before, FIRST: self.evaluator.first}
        return {name: value for name, value in found.items() if value}


def _as_average(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of an evaluation, named as those of the averaged weights."""
    return {key.replace("eval/", "eval/ema_"): value for key, value in metrics.items()}


def _estimates(units: Units) -> dict[str, Estimate]:
    return {f"eval/{name}": Estimate.of(values) for name, values in units.items()}


def _stop_if_not_finite(rows: list[dict], rewards: Iterable[str], step: int) -> None:
    bad = [row for row in rows if not (math.isfinite(row["score"]) and math.isfinite(row["kl"]))]
    if bad:
        samples = "\n".join(
            f"  score {row['score']:.4g}, KL {row['kl']:.4g}, prompt {row['prompt'][-200:]!r}, "
            f"response {row['response'][:300]!r}"
            for row in bad[:4]
        )
        by = ", ".join(name for name in rewards if not all(math.isfinite(row[name]) for row in bad))
        what = f"NaN or infinite ({by})" if by else "NaN or infinite"
        raise RunStopped(
            f"evaluation: {len(bad)} of {len(rows)} held-out samples have a score or KL that is {what}.\n{samples}\n"
            "Look at: what scores these texts (numbers beyond float32's count as infinite), and of a run the learning "
            "rates and gradient norms of the steps before.",
            good_until=step - 1,
        )


def sample_rows(rollout: Rollout, scores: torch.Tensor, kl: torch.Tensor, tokenizer) -> list[dict]:
    """A row for each of B responses, for tables and files: prompt, response, score, kl, tokens, and in conversations
    turns, as in `turns_of`. tokens: those that the policy drew. scores: (B,). kl: (B,), in nats per response."""
    prompts, responses = decoded(rollout, tokenizer)
    columns = zip(prompts, responses, scores.tolist(), kl.tolist(), rollout.actions.sum(-1).tolist())
    rows = [dict(zip(("prompt", "response", "score", "kl", "tokens"), row)) for row in columns]
    if rollout.action_mask is not None:
        for place, row in enumerate(rows):
            row["turns"] = turns_of(rollout, place, tokenizer)
    return rows


def turns_of(rollout: Rollout, row: int, tokenizer) -> list[dict]:
    """The turns of a conversation: {"by": POLICY or ENVIRONMENT, "text": ...}, with the key "reward" where it is not
    0."""
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    real, response = rollout.attention_mask[row, : rollout.prompt_length].bool(), rollout.response_mask[row]
    before, tokens, drawn = rollout.prompts[row][real], rollout.responses[row][response], rollout.actions[row][response]
    turns, start = [], 0
    for by_policy, positions in groupby(drawn.tolist()):
        places = slice(start, start := start + len(list(positions)))
        text = text_behind(decode, before, decode(before), tokens[places])
        reward = 0.0 if rollout.turn_rewards is None else rollout.turn_rewards[row, places].sum().item()
        turns.append(
            {"by": POLICY if by_policy else ENVIRONMENT, "text": text} | ({"reward": reward} if reward else {})
        )
        before = torch.cat([before, tokens[places]])
    return turns


def text_by(who: str, row: Mapping) -> str:
    """What the policy or the environment said in the sample: its turns, each in a line. Without turns the response is
    the policy's."""
    turns = row.get("turns") or [{"by": POLICY, "text": row["response"]}]
    return "\n".join(turn["text"] for turn in turns if turn["by"] == who)


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write the rows to a file, one JSON object per line (rank 0 writes; the other ranks do nothing)."""
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
