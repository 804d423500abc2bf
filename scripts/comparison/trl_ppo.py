"""A run of TRL's own PPO on a task, by a Python that has trl; a policy is saved at each evaluation.

    /path/to/python -m scripts.comparison.trl_ppo --sft SFT --reward REWARD --prompts prompts.jsonl ...

trl.experimental.ppo of 1.12.0, with its defaults but for: the learning rate, the seed, the task's numbers of responses,
`temperature` 1 and `stop_token` "eos" (the responses that all entries learn from), float32 and no activation
checkpointing. The value model starts as the reward model, as in TRL's examples (examples/scripts/ppo/ppo.py), and both
rates are one.
"""

import argparse
import json
from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer


class SavePolicies(TrainerCallback):
    """Saves the policy after every so many steps."""

    def __init__(self, folder: Path, every: int):
        self.folder, self.every = folder, every

    def on_step_end(self, args, state, control, model=None, **others):
        """After a step's updates."""
        if state.global_step % self.every == 0:
            model.policy.save_pretrained(self.folder / f"step_{state.global_step:06d}")


def load_scorer(folder: str):
    """A reward model with the offset of its scores, which stands in its configuration, as a bias of its head."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1)
    head = nn.Linear(model.score.in_features, 1)
    with torch.no_grad():
        head.weight.copy_(model.score.weight)
        head.bias.fill_(getattr(model.config, "score_offset", 0.0))
    model.score = head
    return model


def prompts(path: str, tokenizer, longest: int) -> Dataset:
    """The prompts as token ids, those that are too long cut on their left."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    ids = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    opening = len(tokenizer("")["input_ids"])
    return Dataset.from_dict(
        {"input_ids": [row if len(row) <= longest else row[:opening] + row[opening - longest :] for row in ids]}
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("sft", "reward", "prompts", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("max_prompt_length", "response_length", "responses", "steps", "every", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    out = Path(options.output_dir)
    out.mkdir(parents=True)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.sft, padding_side="left")
    policy, reference = (AutoModelForCausalLM.from_pretrained(options.sft, dtype=torch.float32) for _ in range(2))
    config = PPOConfig(
        output_dir=str(out),
        learning_rate=options.rate,
        seed=options.seed,
        total_episodes=options.steps * options.responses,
        per_device_train_batch_size=options.responses,
        gradient_accumulation_steps=1,
        local_rollout_forward_batch_size=options.responses,
        response_length=options.response_length,
        stop_token="eos",
        temperature=1.0,
        num_sample_generations=0,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=load_scorer(options.reward),
        value_model=load_scorer(options.reward),
        train_dataset=prompts(options.prompts, tokenizer, options.max_prompt_length),
        callbacks=[SavePolicies(out.parent / "policies", options.every)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
