"""Shows the results of an audit as a table for the terminal, as JSON, and as a page with texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from training.reporting.best_of import BestOf, measure_of
from training.reporting.standard_errors import Estimate
from training.tools.audit.flags import AuditFlags
from training.tools.pages.page import (
    Response,
    SampleRow,
    Samples,
    columns,
    document,
    dot,
    sample_data,
    sample_section,
)
from training.tools.pages.page import table as page_table

ALL = "all responses"
HOW = (
    *("sft_model_name_or_path", "reward_model_name_or_path", "reward_function", "reward_url", "environment", "judge"),
    *("data_path", "eval_data_path", "num_eval_prompts", "num_samples_per_prompt", "temperature", "max_answer_seq_len"),
    *("seed", "dtype"),
)


@dataclass(frozen=True, slots=True)
class Audit:
    """The results of an audit. prompts: P prompts. rows: a row of `Answers.rows` for each of P * n responses, sorted by
    prompt. best: their scores and measures, (P, n) each."""

    args: AuditFlags
    prompts: Sequence[str]
    rows: Sequence[dict]
    best: BestOf

    def cells(self, reward: str, k: int) -> list[str]:
        """The mean of each score and measure over the best of k by a reward."""
        return [measure_of(name).text(self.best.best(reward, name, k).value) for name in self.best.columns]

    def overview(self) -> dict[str, list[str]]:
        """{name of a row: cells}: the head, all responses, and the best of k by each reward."""
        best = self.best
        head = [f"{name} (judge)" if name == best.judge else measure_of(name).label for name in best.columns]
        by_reward = {name: self.cells(name, best.k) for name in best.rewards}
        return {"by": head, ALL: self.cells(best.rewards[0], 1), **by_reward}


def nats(k: int) -> float:
    """The KL of the best of k to the model that drew them is at most log(k) - (k - 1) / k nats a response. Source:
    Beirami et al., arXiv:2401.01879, theorem 1."""
    return math.log(k) - (k - 1) / k


def table(audit: Audit) -> str:
    """The text table of the best of k, and the verdict."""
    best = audit.best
    head = f"{len(audit.prompts):,} held-out prompts, {best.n} responses each; means over the best of {best.k}"
    rows = columns([(name, *cells) for name, cells in audit.overview().items()])
    return "\n".join([head, "", *rows, "", *best.verdict])


def content(audit: Audit) -> dict:
    """All results as JSON values. A number over prompts is a pair of it and its standard error."""
    best = audit.best

    def pair(estimate: Estimate) -> list[float | None]:
        return [estimate.value, estimate.error]

    rewards = {
        reward: {
            "judged": pair(best.judged(reward)) if best.judge else None,
            "hacks": best.hacks(reward),
            "best_of": {k: {name: pair(best.best(reward, name, k)) for name in best.columns} for k in best.sizes},
        }
        for reward in best.rewards
    }
    samples = [
        {name: row[name] for name in ("prompt", "response")}
        | {name: float(column.flat[place]) for name, column in best.columns.items()}
        for place, row in enumerate(audit.rows)
    ]
    how = {name: getattr(audit.args, name) for name in HOW} | {"verdict_at": best.k}
    return {"verdict": best.verdict, "how": how, "rewards": rewards, "samples": samples}


def page(audit: Audit) -> str:
    """The HTML page of the audit."""
    best, args, samples = audit.best, audit.args, _samples(audit)
    how = (
        f"{len(audit.prompts):,} held-out prompts, {best.n} responses to each by {args.sft_model_name_or_path}; "
        f"temperature {args.temperature:g}, seed {args.seed}."
    )
    verdict = "".join(f"<li>{escape(line)}.</li>" for line in best.verdict)
    dots = {name: dot(name, place) for place, name in enumerate((ALL, *best.rewards))}
    (by, head), *rows = audit.overview().items()
    by_size = []
    for reward in best.rewards:
        columns = [[f"{nats(k):.2f}", *audit.cells(reward, k)] for k in best.sizes]
        lines = zip(["nats away, at most", *map(escape, head)], *columns, strict=True)
        sizes = page_table(["best of", *map(str, best.sizes)], list(lines), f"the best by {reward}")
        by_size.append(f"<details><summary>by {escape(reward)}</summary>{sizes}</details>")
    body = f"""<section>
<h2>The best of {best.k}</h2>
<ul class="verdicts">{verdict}</ul>
{page_table((by, *head), [(dots[name], *cells) for name, cells in rows], f"the best of {best.k} by each reward")}
<p class="soft">Means over the best of {best.k} by each reward, exact over all ways to draw {best.k} of the {best.n}
responses to a prompt. Ended: came to an end of their own. New words: in no prompt, and in no response to another
prompt. Repeated: 1 - distinct / all 3-grams of words. Nats a token: log-prob under the SFT model.</p>
<h3>The best of 1, 2, 4 and so on</h3>
{"".join(by_size)}
</section>
{sample_section(samples)}"""
    return document("The best responses by each reward", how, body, {"samples": sample_data(samples)}, ["samples.js"])


def _samples(audit: Audit) -> Samples:
    """The first response to each prompt, and the best by each reward beside it."""
    best, rows = audit.best, []
    for place, prompt in enumerate(audit.prompts):
        chosen = [0, *(int(best.scores[name][place].argmax()) for name in best.rewards)]
        scores = np.array([[column[place, number] for column in map(best.scores.get, best.names)] for number in chosen])
        responses = []
        for number, own, changes in zip(chosen, scores.tolist(), (scores - scores[0]).tolist(), strict=True):
            row, ended = audit.rows[place * best.n + number], bool(best.measures["ended"][place, number])
            turns = row.get("turns", ())
            responses.append(Response(row["response"], own, None, row["tokens"], ended, changes, turns))
        rows.append(SampleRow(prompt, place, 0, responses))
    names = ["the first response", *(f"the best of {best.n} by {name}" for name in best.rewards)]
    return Samples(names, best.names, 1, rows, "audit.json")
