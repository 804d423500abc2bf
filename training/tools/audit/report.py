"""Shows the results of an audit as a table for the terminal, as JSON, and as a page with texts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from training.reporting.best_of import MEASURES, BestOf
from training.tools.audit.flags import AuditFlags
from training.tools.pages.page import Response, SampleRow, Samples, document, dot, sample_data, sample_section
from training.tools.pages.page import columns as text_columns
from training.tools.pages.page import table as page_table


@dataclass(frozen=True, slots=True)
class Audit:
    """The results of an audit. prompts: P prompts. rows: a row of `Answers.rows` for each of P * n responses, sorted by
    prompt. best: their scores and measures, (P, n) each."""

    args: AuditFlags
    prompts: Sequence[str]
    rows: Sequence[dict]
    best: BestOf

    @property
    def columns(self) -> list[str]:
        """The names of scores and measures, as the tables show them."""
        return [*self.best.scores, *self.best.measures]

    def cells(self, reward: str, k: int) -> list[str]:
        """The mean of each column over the best of k by a reward."""
        return [
            (MEASURES[name].form if name in MEASURES else "{:.3f}").format(self.best.best(reward, name, k).value)
            for name in self.columns
        ]

    def overview(self) -> tuple[list[str], list[tuple[str, list[str]]]]:
        """(head, [(reward or "", cells)]): all responses, then the best of k by each reward."""
        best = self.best
        labels = [MEASURES[name].label if name in MEASURES else name for name in self.columns]
        rows = [("", self.cells(best.rewards[0], 1)), *((name, self.cells(name, best.k)) for name in best.rewards)]
        return labels, rows


def nats(k: int) -> float:
    """The KL of the best of k to the model that drew them is at most log(k) - (k - 1) / k nats a response. Source:
    Beirami et al., arXiv:2401.01879, theorem 1."""
    return math.log(k) - (k - 1) / k


def table(audit: Audit) -> str:
    """The text table of the best of k, and the verdict."""
    head, rows = audit.overview()
    best = audit.best
    lines = [f"{len(audit.prompts):,} held-out prompts, {best.n} responses each; means over the best of {best.k}"]
    lines += ["", *text_columns([("by", *head), *((name or "all responses", *cells) for name, cells in rows)]), ""]
    return "\n".join([*lines, *best.verdict()])


def content(audit: Audit) -> dict:
    """All results as JSON values."""
    args, best = audit.args, audit.best

    def value(estimate) -> dict:
        return {"value": estimate.value, "error": estimate.error}

    return {
        "order": best.rewards,
        "verdict": best.verdict(),
        "judge": best.judge,
        "how": {
            "sft": args.sft_model_name_or_path,
            "prompts": len(audit.prompts),
            "samples_per_prompt": best.n,
            "verdict_at": best.k,
            "data": args.eval_data_path or args.data_path,
            "reward_models": args.reward_model_name_or_path,
            "reward_functions": args.reward_function,
            "temperature": args.temperature,
            "max_answer_seq_len": args.max_answer_seq_len,
            "seed": args.seed,
        },
        "rewards": {
            reward: {
                "safety": value(best.safety(reward)),
                "hacks": best.hacks(reward),
                "change": {name: value(best.change(reward, name)) for name in audit.columns},
                "best_of": {k: {name: value(best.best(reward, name, k)) for name in audit.columns} for k in best.sizes},
            }
            for reward in best.rewards
        },
        "samples": [
            {
                "prompt": row["prompt"],
                "response": row["response"],
                **{name: best.column(name).flat[place] for name in audit.columns},
            }
            for place, row in enumerate(audit.rows)
        ],
    }


def page(audit: Audit) -> str:
    """The HTML page of the audit."""
    best, args = audit.best, audit.args
    how = (
        f"{len(audit.prompts):,} held-out prompts, {best.n} responses to each by {args.sft_model_name_or_path}; "
        f"temperature {args.temperature:g}, seed {args.seed}."
    )
    verdict = "".join(f"<li>{escape(line)}.</li>" for line in best.verdict())
    head, rows = audit.overview()
    marked = [(_dot(audit, name), *cells) for name, cells in rows]
    samples = _samples(audit)
    body = f"""<section>
<h2>The best of {best.k}</h2>
<ul class="verdicts">{verdict}</ul>
{page_table(("by", *head), marked, f"the best of {best.k} by each reward")}
<p class="soft">Means over the best of {best.k} by each reward, exact over all ways to draw {best.k} of the {best.n}
responses to a prompt. Ended: came to an end of their own. New words: in no prompt, and in no response to another
prompt. Repeated: 1 - distinct / all 3-grams of words. Nats a token: log-prob under the SFT model.</p>
</section>
{"".join(_by_reward(audit, reward) for reward in best.rewards)}
{sample_section(samples)}"""
    title = f"What {', '.join(best.rewards)} would teach"
    return document(title, how, body, {"samples": sample_data(samples)}, ["samples.js"])


def _dot(audit: Audit, name: str) -> str:
    return dot(name or "all responses", audit.best.rewards.index(name) + 1 if name else 0)


def _by_reward(audit: Audit, reward: str) -> str:
    """The section of one reward: the best of 1, 2, 4, ..., n."""
    head, _ = audit.overview()
    rows = [(f"{k}", f"{nats(k):.2f}", *audit.cells(reward, k)) for k in audit.best.sizes]
    caption = f"the best by {reward}"
    return f"""<section>
<h2>By {escape(reward)}</h2>
{page_table(("best of", "nats away, at most", *head), rows, caption)}
</section>"""


def _samples(audit: Audit) -> Samples:
    """The first response to each prompt, and the best by each reward beside it."""
    best, n = audit.best, audit.best.n
    rewards = list(best.scores)

    def response(place: int, number: int) -> Response:
        row, first = audit.rows[place * n + number], audit.rows[place * n]
        scores = [best.scores[name][place, number] for name in rewards]
        return Response(
            row["response"],
            scores,
            None,
            row["tokens"],
            bool(best.measures["ended"][place, number]),
            [0.0 if row is first else score - best.scores[name][place, 0] for name, score in zip(rewards, scores)],
            row.get("turns", ()),
        )

    rows = [
        SampleRow(
            prompt,
            place,
            0,
            [response(place, 0), *(response(place, best.scores[name][place].argmax()) for name in best.rewards)],
        )
        for place, prompt in enumerate(audit.prompts)
    ]
    names = ["the first response", *(f"the best of {n} by {name}" for name in best.rewards)]
    return Samples(names, rewards, 1, rows, "audit.json")
