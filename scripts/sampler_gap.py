"""How far vLLM was from the actor in one step, computed anew by transformers in float64, beside what the run told.

    python scripts/sampler_gap.py RUN STEP ACTOR [--rounded_to int8]

From the batches that scripts/vllm_batches.py kept in RUN/batches. Of each token vLLM's log-prob and the actor's are
computed from the weights before this step (ACTOR, a folder), row by row and without padding; of these the metrics, by
their definitions in docs/metrics.md. Prints a table, and ends with 1 where the two do not agree.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where the packages are not installed

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.experience import TrainingBatch
from scripts.rounded_sampler import rounded

NOTED = 5e-5  # nats between a log-prob that float32 gave and one that float64 gives
NAMES = ("logprob_gap", "sampler_kl", "sampler_kl_k3", "ratio_min", "ratio_max", "ratio_far")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("step", type=int)
    parser.add_argument("actor", type=Path, help="its weights before this step")
    parser.add_argument("--rounded_to", help="what vLLM's were rounded to")
    options = parser.parse_args()
    flags = json.loads((options.run / "run.json").read_text())["starts"][-1]["flags"]
    rows = [json.loads(line) for line in (options.run / "metrics.jsonl").read_text().splitlines()]
    told = next(row for row in rows if row["step"] == options.step)
    paths = sorted((options.run / "batches").glob(f"{options.step}_*.pt"))
    batches = [torch.load(path, weights_only=False) for path in paths]

    temperature, takes_samplers = flags["temperature"] or 1.0, flags["old_logprobs"] == "sampler"
    actor, sampler = (loaded(options.actor, to) for to in (None, options.rounded_to))
    log_ratios, pairs = [], {}
    for rank, batch in enumerate(batches):
        mask = batch.rollout.response_mask
        by_actor, by_sampler = (response_logprobs(model, batch, temperature) for model in (actor, sampler))
        log_ratios.append(torch.where(mask, by_actor - by_sampler, 0.0))
        old = by_sampler if takes_samplers else by_actor
        for name, of_run, anew in (("noted", batch.rollout.logprobs, by_sampler), ("old", batch.logprobs, old)):
            pairs[f"{name} log-probs, rank {rank}: farthest"] = ((of_run - anew)[mask].abs().max().item(), 0.0)
    compared = [compared_tokens(batch, alone=takes_samplers) for batch in batches]
    found = distances(torch.cat([one[mask] for one, mask in zip(log_ratios, compared, strict=True)]))
    if batches[0].correction is not None:
        found |= corrections(log_ratios, batches, flags["set"])
    pairs |= {name: (told[name], value) for name, value in found.items()}
    print(f"{options.run.name}, step {options.step}, {len(batches)} ranks: told by the run, computed anew")
    agree = [math.isclose(*pair, rel_tol=1e-3, abs_tol=NOTED) for pair in pairs.values()]
    for same, (name, (run, anew)) in zip(agree, pairs.items(), strict=True):
        print(f"  {name:34} {run:12.4e} {anew:12.4e} {'' if same else ' NOT THE SAME'}")
    return 0 if all(agree) else 1


def loaded(folder: Path, to: str | None):
    """A model in float64, with matrices rounded as scripts/vllm_batches.py rounds them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for weights in model.parameters() if to else ():
            if weights.dim() == 2:
                weights.copy_(rounded(weights, to))
    return model.double()


@torch.no_grad()
def response_logprobs(model, batch: TrainingBatch, temperature: float) -> Tensor:
    """(B, T) float64 of the response tokens, zeros after them."""
    rollout = batch.rollout
    width = rollout.response_mask.shape[1]
    found = torch.zeros(rollout.response_mask.shape, dtype=torch.float64)
    for row, (ids, real) in enumerate(zip(rollout.sequences, rollout.attention_mask.bool(), strict=True)):
        prompt, response = ids[:-width][real[:-width]], ids[-width:][rollout.response_mask[row]]
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, -1)
        found[row, : len(response)] = logprobs.gather(1, response[:, None])[:, 0]
    return found


def compared_tokens(batch: TrainingBatch, alone: bool) -> Tensor:
    """(B, T) bool, the tokens that a run compares: all, or those of its longest text `alone` (the last of these)."""
    mask = batch.rollout.response_mask
    lengths = batch.rollout.attention_mask.sum(1)
    longest = (lengths == lengths.max()).nonzero().max()
    return mask & (torch.arange(len(mask))[:, None] == longest) if alone else mask


def distances(log_ratios: Tensor) -> dict[str, float]:
    """Of log pi_old - log mu (N,), by the names of the metrics."""
    ratios = log_ratios.exp()
    far = (ratios < 0.5) | (ratios > 2)
    values = (log_ratios.abs().mean(), -log_ratios.mean(), (ratios - 1 - log_ratios).mean(), ratios.min(), ratios.max())
    return {f"rollout/{name}": value.item() for name, value in zip(NAMES, (*values, far.double().mean()), strict=True)}


def corrections(log_ratios: list[Tensor], batches: list[TrainingBatch], fields: list[str]) -> dict[str, float]:
    """The mean of what the policy's loss was multiplied by, and the share that was cut."""
    given = dict(field.split("=") for field in fields)
    level, cut = given["correction"].split("_")
    lowest, highest = float(given.get("correction_min", 0.0)), float(given.get("correction_max", 2.0))
    factors, outside = [], []
    for one, batch in zip(log_ratios, batches, strict=True):
        ratios = (one.sum(1, keepdim=True).expand_as(one) if level == "sequence" else one).exp()
        ratios = ratios[batch.policy_mask]
        outside.append((ratios < lowest) | (ratios > highest))
        factors.append(ratios.clamp(lowest, highest) if cut == "truncate" else ratios * ~outside[-1])
    shares = {"policy/correction": torch.cat(factors), "policy/correction_cut": torch.cat(outside).double()}
    return {name: values.mean().item() for name, values in shares.items()}


if __name__ == "__main__":
    sys.exit(main())
