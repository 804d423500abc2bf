"""PPO for a language model in one file: torch and transformers, one process, every formula in sight.

    python examples/ppo_in_one_file.py --policy sft --reward_model reward --prompts prompts.jsonl --output_dir out

Four models: a policy that learns (the actor), a critic that learns which score to expect, a frozen reference that the
policy is kept close to, and a frozen reward model. A step samples responses, scores them, turns each score into rewards
of tokens and these into advantages, and makes a few passes over the responses. The numbers are those of
`training/step3_rlhf.py --dialect default`, which does it on many GPUs; docs/architecture.md leads from block to block.

Shapes: B responses, P prompt positions (padded on the left), T response positions (padded on the right), S = P + T.
Position t of a (B, T) tensor belongs to response token t: its log-probability, and the value read just before it.
"""

import argparse
import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


@dataclass(frozen=True)
class Settings:
    """What can be changed; the values are those of `--dialect default`."""

    steps: int = 100  # each samples once and learns from that
    batch_size: int = 16  # responses of a step
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    kl_coef: float = 0.1  # price of a nat away from the reference, in units of the score
    score_clip: float = 5.0
    gamma: float = 1.0
    lam: float = 0.95
    clip_range: float = 0.2  # of the ratio of probabilities
    value_clip_range: float = 0.2
    ppo_epochs: int = 4  # passes over the responses of a step
    learning_rate: float = 1e-5  # at its peak: it rises for `warmup` optimizer steps, then falls to 0 at the end
    warmup: int = 10
    max_grad_norm: float = 1.0
    seed: int = 1234


@dataclass
class Experience:
    """What a step learns from."""

    sequences: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) int64, 0 at padding
    mask: Tensor  # (B, T) bool: the tokens that were sampled, EOS included
    logprobs: Tensor  # (B, T) of the policy that sampled, temperature 1
    values: Tensor  # (B, T) of the critic, before it learns; 0 after a response's end
    advantages: Tensor  # (B, T) whitened
    returns: Tensor  # (B, T) what the critic should have said


# What models say of given tokens.


def positions(attention_mask: Tensor) -> Tensor:
    """(B, S) int64: real tokens count from 0, whatever padding precedes them."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def token_logprobs(policy: nn.Module, sequences: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """(B, T) float32: log-probability of each of the last `length` tokens; each is predicted one position earlier."""
    logits = policy(input_ids=sequences, attention_mask=attention_mask, position_ids=positions(attention_mask)).logits
    logprobs = logits[:, -length - 1 : -1].float().log_softmax(-1)  # (B, T, V)
    return logprobs.gather(-1, sequences[:, -length:, None]).squeeze(-1)


def token_scores(scorer: nn.Module, sequences: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, S) float32: what a reward model or critic says at every token."""
    place = positions(attention_mask)
    hidden = scorer.base_model(input_ids=sequences, attention_mask=attention_mask, position_ids=place)[0]  # (B, S, d)
    offset = getattr(scorer.config, "score_offset", 0.0)  # step 2 normalises a reward model's scores by it
    return scorer.score(hidden).squeeze(-1).float() + offset


def token_values(critic: nn.Module, sequences: Tensor, attention_mask: Tensor, length: int) -> Tensor:
    """(B, T) float32: the score that the critic expects before each of the last `length` tokens is drawn."""
    return token_scores(critic, sequences, attention_mask)[:, -length - 1 : -1]


def sequence_scores(reward_model: nn.Module, sequences: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) float32: the reward model's number at each sequence's last real token."""
    last = (attention_mask * torch.arange(sequences.shape[1])).argmax(-1)
    return token_scores(reward_model, sequences, attention_mask).gather(-1, last[:, None]).squeeze(-1)


# 1. Sample.


@torch.no_grad()
def sample(policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, length: int, eos: int, pad: int) -> Tensor:
    """(B, S) int64: the prompts, (B, P) int64 padded on the left, and a response to each, padded behind its EOS."""
    sequences = prompts
    attention_mask = prompt_mask
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    tokens = prompts
    place = positions(prompt_mask)
    cache = None
    for _ in range(length):
        out = policy(
            input_ids=tokens, attention_mask=attention_mask, position_ids=place, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        drawn = torch.multinomial(out.logits[:, -1].float().softmax(-1), 1).squeeze(-1)  # (B,)
        tokens = torch.where(ended, pad, drawn)[:, None]
        sequences = torch.cat([sequences, tokens], dim=1)
        attention_mask = torch.cat([attention_mask, (~ended).long()[:, None]], dim=1)
        place = place[:, -1:] + 1
        ended = ended | (drawn == eos)
        if ended.all():
            break
    return sequences


# 2. From a score of each response to an advantage of each token.


def compute_rewards(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, s: Settings) -> Tensor:
    """(B, T): each token pays for its distance to the reference, the last is given the score (Ziegler et al. 2019)."""
    rewards = -s.kl_coef * (logprobs - ref_logprobs) * mask
    rewards[torch.arange(len(rewards)), mask.sum(-1) - 1] += scores.clamp(-s.score_clip, s.score_clip)
    return rewards


def gae(rewards: Tensor, values: Tensor, s: Settings) -> tuple[Tensor, Tensor]:
    """Advantages and returns, (B, T) each: Schulman et al. 2016, "High-dimensional continuous control ...", eq. 16."""
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        error = rewards[:, t] + s.gamma * next_value - values[:, t]
        advantages[:, t] = next_advantage = error + s.gamma * s.lam * next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


def masked_mean(numbers: Tensor, mask: Tensor) -> Tensor:
    """The mean over the positions that count, a scalar."""
    return (numbers * mask).sum() / mask.sum()


def whiten(numbers: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and variance 1 over the positions that count, 0 elsewhere."""
    mean = masked_mean(numbers, mask)
    variance = masked_mean((numbers - mean) ** 2, mask)
    return (numbers - mean) * torch.rsqrt(variance + 1e-8) * mask


@torch.no_grad()
def make_experience(models: dict[str, nn.Module], sequences: Tensor, prompt_mask: Tensor, eos: int, s: Settings):
    """(Experience, scores (B,), KL to the reference (B,) in nats) of responses to prompts with this mask (B, P)."""
    responses = sequences[:, prompt_mask.shape[1] :]  # (B, T)
    ends = (responses == eos).long()
    mask = ends.cumsum(-1) - ends == 0  # up to and with the first EOS
    attention_mask = torch.cat([prompt_mask, mask.long()], dim=1)
    length = responses.shape[1]
    logprobs = token_logprobs(models["policy"], sequences, attention_mask, length)
    ref_logprobs = token_logprobs(models["reference"], sequences, attention_mask, length)
    values = token_values(models["critic"], sequences, attention_mask, length) * mask
    scores = sequence_scores(models["reward"], sequences, attention_mask)
    rewards = compute_rewards(scores, logprobs, ref_logprobs, mask, s)
    advantages, returns = gae(rewards, values, s)
    old = Experience(sequences, attention_mask, mask, logprobs, values, whiten(advantages, mask), returns)
    return old, scores, ((logprobs - ref_logprobs) * mask).sum(-1)


# 3. Learn.


def policy_loss(logprobs: Tensor, old: Experience, s: Settings) -> Tensor:
    """The clipped surrogate, a scalar: Schulman et al. 2017, "Proximal policy optimization algorithms", eq. 7."""
    ratio = (logprobs - old.logprobs).exp()  # (B, T)
    clipped = ratio.clamp(1 - s.clip_range, 1 + s.clip_range)
    return masked_mean(torch.maximum(-old.advantages * ratio, -old.advantages * clipped), old.mask)


def value_loss(values: Tensor, old: Experience, s: Settings) -> Tensor:
    """Half the squared error, a scalar, of values that count as moved by at most the clip range."""
    near = values.clamp(old.values - s.value_clip_range, old.values + s.value_clip_range)
    errors = torch.maximum((values - old.returns) ** 2, (near - old.returns) ** 2)
    return 0.5 * masked_mean(errors, old.mask)


def learning_rate(step: int, s: Settings) -> float:
    """Of optimizer step `step`, from 0: a line up, a line down."""
    if step < s.warmup:
        return s.learning_rate * (step + 1) / s.warmup
    return s.learning_rate * (1 - (step - s.warmup) / max(1, s.steps * s.ppo_epochs - s.warmup))


def train(models: dict[str, nn.Module], optimizers: dict, old: Experience, step: int, s: Settings) -> dict[str, float]:
    """The passes over one step's responses, each an optimizer step of critic and policy; returns their mean losses."""
    losses, length = {"critic": 0.0, "policy": 0.0}, old.mask.shape[1]
    for epoch in range(s.ppo_epochs):
        for name, of_tokens, loss_of in (("critic", token_values, value_loss), ("policy", token_logprobs, policy_loss)):
            loss = loss_of(of_tokens(models[name], old.sequences, old.attention_mask, length), old, s)
            optimizers[name].param_groups[0]["lr"] = learning_rate(step * s.ppo_epochs + epoch, s)
            optimizers[name].zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(models[name].parameters(), s.max_grad_norm)
            optimizers[name].step()
            losses[name] += loss.item() / s.ppo_epochs
    return losses


def load_models(policy: str, reward_model: str) -> dict[str, nn.Module]:
    """The four, without dropout: the reference is the policy as it was, the critic starts as the reward model."""
    learning = {
        "policy": AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        "critic": AutoModelForSequenceClassification.from_pretrained(reward_model, dtype=torch.float32),
    }
    frozen = {"reference": copy.deepcopy(learning["policy"]), "reward": copy.deepcopy(learning["critic"])}
    return learning | {name: model.requires_grad_(False) for name, model in frozen.items()}


def make_optimizers(models: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    """Adam for the two models that learn."""
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    return {name: torch.optim.AdamW(models[name].parameters(), **options) for name in ("critic", "policy")}


def main() -> None:
    """Read the command line, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("policy", "reward_model", "prompts", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in vars(Settings()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    s = Settings(**{name: getattr(args, name) for name in vars(Settings())})
    torch.manual_seed(s.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.policy, padding_side="left", truncation_side="left")
    eos = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id
    models = load_models(args.policy, args.reward_model)
    optimizers = make_optimizers(models)
    texts = [json.loads(line)["prompt"] for line in Path(args.prompts).read_text(encoding="utf-8").splitlines()]
    for step in range(s.steps):
        chosen = [texts[i] for i in torch.randperm(len(texts))[: s.batch_size]]
        ids = tokenizer(chosen, padding=True, truncation=True, max_length=s.max_prompt_tokens, return_tensors="pt")
        sequences = sample(models["policy"], ids["input_ids"], ids["attention_mask"], s.max_new_tokens, eos, pad)
        experience, scores, kl = make_experience(models, sequences, ids["attention_mask"], eos, s)
        losses = train(models, optimizers, experience, step, s)
        numbers = {"score": scores.mean().item(), "KL": kl.mean().item()} | losses
        print(f"step {step + 1}", *(f"{name} {number:.4f}" for name, number in numbers.items()), flush=True)
    models["policy"].save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
