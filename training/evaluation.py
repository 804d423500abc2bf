"""Held-out prompts: what the actor answers, how it scores, how far it is from the reference."""
import dataclasses
import json
import math
from pathlib import Path

import torch

from engine import distributed
from engine.errors import RunStopped
from engine.experience import Rollout
from engine.experience_maker import ExperienceMaker
from engine.rollout.base import RolloutBackend, SamplingConfig
from training.data import Prompts, collate_prompts

EVAL_SEED = 0x5EED  # mixed into the run's seed: held-out samples share no random numbers with training


class Evaluator:
    """Answers the same prompts with the same random numbers each time, so that scores differ by the policy alone."""

    def __init__(self, prompts: Prompts, *, rollouts: RolloutBackend, maker: ExperienceMaker, sampling: SamplingConfig,
                 tokenizer, batch_size: int):
        self.prompts, self.rollouts, self.maker = prompts, rollouts, maker
        self.sampling = dataclasses.replace(sampling, seed=sampling.seed ^ EVAL_SEED)
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def run(self) -> tuple[dict[str, float], list[dict]]:
        """Metrics and one row a prompt (prompt, response, score, kl), the same on all ranks (all ranks call this).

        Raises: RunStopped on all ranks for a score or KL that is NaN or infinite.
        """
        own = {}
        for indices in self._own_batches():
            rollout = self._answer(indices)
            judged = self.maker.judge(rollout)
            kl = ((judged.logprobs - judged.ref_logprobs) * rollout.response_mask).sum(-1)
            own.update(zip(indices, sample_rows(rollout, judged.scores, kl, self.tokenizer)))
        found = {index: row for part in distributed.all_gather_objects(own) for index, row in part.items()}
        rows = [found[index] for index in sorted(found)]
        _stop_if_not_finite(rows)
        metrics = {f"eval/{name}": sum(row[key] for row in rows) / len(rows)
                   for name, key in (("score", "score"), ("kl", "kl"), ("response_length", "tokens"))}
        metrics["eval/distinct_bigrams"] = float(distinct_bigrams([row["response"] for row in rows]))
        return metrics, rows

    def _own_batches(self) -> list[list[int]]:
        """This rank's prompts in batches, equally many on all ranks: what is left over is filled up with repeats."""
        world, size = distributed.world_size(), len(self.prompts)
        share = -(-size // world)
        own = [(distributed.rank() * share + offset) % size for offset in range(share)]
        return [own[start:start + self.batch_size] for start in range(0, share, self.batch_size)]

    def _answer(self, indices: list[int]) -> Rollout:
        keys = torch.tensor(indices)
        batch = collate_prompts([self.prompts[index] for index in indices], keys, torch.zeros_like(keys),
                                self.sampling.pad_token_id)
        return self.rollouts.generate(batch.to(distributed.device()), self.sampling)


def _stop_if_not_finite(rows: list[dict]) -> None:
    bad = [row for row in rows if not (math.isfinite(row["score"]) and math.isfinite(row["kl"]))]
    if bad:
        samples = "\n".join(f"  score {row['score']:.4g}, KL {row['kl']:.4g}, prompt {row['prompt'][-200:]!r}, "
                            f"response {row['response'][:300]!r}" for row in bad[:4])
        raise RunStopped(f"evaluation: {len(bad)} of {len(rows)} held-out samples have a score or KL that is NaN or "
                         f"infinite.\n{samples}\nLook at: the reward model's score of these texts, the learning rates "
                         "and gradient norms of the steps before. Restart points are untouched.")


def sample_rows(rollout: Rollout, scores: torch.Tensor, kl: torch.Tensor, tokenizer) -> list[dict]:
    """Texts and numbers of each response, for tables and files; `scores`, `kl`: (B,), kl in nats a response."""
    prompt_masks = rollout.attention_mask[:, :rollout.prompt_length].bool()
    rows = []
    for row in range(len(rollout)):
        response = rollout.responses[row][rollout.response_mask[row]]
        prompt = rollout.prompts[row][prompt_masks[row]]
        prompt_text = tokenizer.decode(prompt, skip_special_tokens=True)
        # Decoded behind its prompt, because many tokenizers drop the space that a text begins with.
        whole = tokenizer.decode(torch.cat([prompt, response]), skip_special_tokens=True)
        text = whole[len(prompt_text):] if whole.startswith(prompt_text) else \
            tokenizer.decode(response, skip_special_tokens=True)
        rows.append({"prompt": prompt_text, "response": text, "score": scores[row].item(), "kl": kl[row].item(),
                     "tokens": len(response)})
    return rows


def distinct_bigrams(texts: list[str]) -> int:
    """How many different pairs of neighbouring words the texts hold: falls when answers become alike."""
    words = (text.split() for text in texts)
    return len({pair for line in words for pair in zip(line, line[1:])})


def write_rows(path: Path, rows: list[dict]) -> None:
    """Save evaluated samples as JSON lines (rank 0 writes)."""
    if distributed.is_main():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
