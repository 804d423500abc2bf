"""Judges policies alike, whatever trained them: each answers the same held-out prompts with the same random numbers.

    python -m scripts.comparison.judge JOB.json FLAGS...

FLAGS are step 3's, of the dialect `default`: responses are drawn at temperature 1 until EOS, scored by the task's
reward, and their KL is the one to the SFT model. JOB has "policies" ({name: [folder, scale]}: the SFT
model plus so much of the change to that one), "texts" (files whose words are known), "judge" (the name of a reward
function of weight 0, or "") and "written", where {name: measures} goes; the SFT model's name is "".
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import pstdev

import torch
from torch import Tensor

from engine import distributed
from engine.models.loading import load_policy
from engine.rlhf_engine import RLHFEngine
from scripts.comparison.tasks import known_words
from training.config.step3 import RLHFFlags
from training.reporting.evaluation import Evaluator
from training.reporting.variety import distinct_bigrams
from training.runtime.launch import leave, run
from training.runtime.plan import make_plan
from training.runtime.ranks import agreed
from training.step3_rlhf import build_evaluator, build_trainer, choose_rollouts


def policy_measures(
    metrics: Mapping[str, float], rows: Sequence[dict], known: Collection[str], judge: str = ""
) -> dict[str, float]:
    """What a policy is judged by. metrics, rows: the results of `Evaluator.run`. known: the known words. judge: name of
    a reward function.

    Returns: score and KL (nats per response) with their standard errors; tokens: mean number of tokens of a response;
    distinct_bigrams: number of distinct pairs of neighbouring words, divided by the number of all response tokens;
    known_words: share of the responses' words that are known. With a judge: the mean of what it returns, the mean's
    standard error, and the standard deviation over the responses.
    """
    responses = [row["response"] for row in rows]
    words = [word for text in responses for word in text.split()]
    judged = {}
    if judge:
        judged = {"judge": metrics[f"eval/reward_{judge}"], "judge_se": metrics[f"eval/reward_{judge}_se"]}
        judged["judge_std"] = pstdev(row[f"reward_{judge}"] for row in rows)
    return judged | {
        "score": metrics["eval/score"],
        "score_se": metrics.get("eval/score_se", 0.0),
        "kl": metrics["eval/kl"],
        "kl_se": metrics.get("eval/kl_se", 0.0),
        "tokens": metrics["eval/response_length"],
        "distinct_bigrams": distinct_bigrams(responses) / max(sum(row["tokens"] for row in rows), 1),
        "known_words": sum(word in known for word in words) / len(words) if words else 1.0,
    }


def put_weights(models: RLHFEngine, sft: dict[str, Tensor], folder: str, scale: float) -> None:
    """Have the actor compute with the SFT model's weights plus `scale` times what another policy of its architecture
    departs from them."""
    other = load_policy(folder, torch.float32, what="policy").state_dict()
    merged = (
        other if scale == 1.0 else {name: sft[name].lerp(weight.to(sft[name]), scale) for name, weight in other.items()}
    )
    models.actor.module.load_state_dict(merged)
    models.actor.version += 1  # copies of them are stale


def main(args: RLHFFlags, job: dict) -> None:
    """Judge the SFT model and all policies of a job."""
    plan = agreed(lambda: make_plan(args, None))
    models = RLHFEngine.from_pretrained(plan.spec)
    rollouts = choose_rollouts(args, plan, models)
    evaluator = build_evaluator(plan, build_trainer(args, plan, models, rollouts))
    assert isinstance(evaluator, Evaluator), "a task has held-out prompts"
    known = known_words([Path(path) for path in job["texts"]])
    found = {"": policy_measures(*evaluator.run(0), known, job["judge"])}
    sft = {name: weight.clone() for name, weight in models.actor.module.state_dict().items()}
    for name, (folder, scale) in job["policies"].items():
        put_weights(models, sft, folder, scale)
        found[name] = policy_measures(*evaluator.run(1), known, job["judge"])
        print(", ".join([name, *(f"{what} {value:.3f}" for what, value in found[name].items())]), flush=True)
    if distributed.is_main():
        Path(job["written"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    leave(run(lambda args: main(args, content), RLHFFlags, __doc__.splitlines()[0], sys.argv[2:]))
