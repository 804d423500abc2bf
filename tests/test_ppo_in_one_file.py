"""examples/ppo_in_one_file.py computes what PPOTrainer computes: three steps on the same responses, of models like the
quickstart's."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from training.tools.toy.model import make_model, train_tokenizer

pytestmark = pytest.mark.slow
FILE = Path(__file__).parents[1] / "examples" / "ppo_in_one_file.py"
PROMPTS = ["Review : we saw this comedy", "Review : i tried a", "Review :", "we saw this western with a friend"] * 4
STEPS, LENGTH, RATE = 3, 24, 2e-3

# In a process of its own, as DeepSpeed changes torch's process groups: the steps of our trainer.
TRAINER = """
import sys
import torch
from engine.algorithms import get_dialect
from engine.rlhf_engine import EngineSpec, RLHFEngine
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from training.data.examples import prompt_batch
from training.ppo_trainer import PPOConfig, PPOTrainer

prompts, steps, length, rate, folder = {prompts!r}, {steps}, {length}, {rate}, sys.argv[1]
dialect = get_dialect("default").replaced(actor_lr=rate, critic_lr=rate)
engines = {{role: EngineConfig(role, stage=3) for role in ("actor", "critic")}}
spec = EngineSpec(actor_path=f"{{folder}}/policy", critic_path=f"{{folder}}/reward", **engines)
models = RLHFEngine.from_pretrained(spec)
tokenizer = models.tokenizer
sampling = SamplingConfig.of(
    dialect, [tokenizer.eos_token_id], dtype="fp32", max_new_tokens=length, pad_token_id=tokenizer.pad_token_id
)
rollouts = build_rollouts("auto", models.actor, tokenizer, others=models.engines)
config = PPOConfig(total_steps=steps, micro_batch_size=5)
trainer = PPOTrainer(models=models, rollouts=rollouts, dialect=dialect, config=config, sampling=sampling)
found = []
for step in range(steps):
    report = trainer.step(prompt_batch(prompts, tokenizer, visit=step))
    rollout = report.batch.rollout
    found.append((rollout.sequences, rollout.attention_mask[:, : rollout.prompt_length], report.metrics))
torch.save(found, f"{{folder}}/found.pt")
"""


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("ppo_in_one_file", FILE)
    module = sys.modules["ppo_in_one_file"] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_tokenizer([*PROMPTS, "it was good . it was bad . i would see it again"])
    policy = make_model(tokenizer, hidden_size=32, num_layers=2, num_heads=2, seed=1)
    policy.save_pretrained(folder / "policy")
    torch.manual_seed(2)
    reward = LlamaForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    torch.nn.init.normal_(reward.score.weight, std=0.3)
    reward.config.score_offset, reward.config.score_position = 0.25, "last"
    reward.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    program = folder / "trainer.py"
    program.write_text(TRAINER.format(prompts=PROMPTS, steps=STEPS, length=LENGTH, rate=RATE))
    done = subprocess.run([sys.executable, program, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_three_steps_are_those_of_the_trainer(example, folder):
    settings = example.Settings(steps=STEPS, learning_rate=RATE)
    models = example.load_models(folder / "policy", folder / "reward")
    optimizers = example.make_optimizers(models)
    tokenizer_end = models["policy"].config.eos_token_id
    steps = torch.load(folder / "found.pt", weights_only=False)
    seen = []
    for step, (sequences, prompt_mask, metrics) in enumerate(steps):
        old, scores, kl = example.make_experience(models, sequences, prompt_mask, tokenizer_end, settings)
        losses = example.train(models, optimizers, old, step, settings)
        ours = [metrics[name] for name in ("objective/scores", "objective/kl", "value/loss", "policy/loss")]
        seen.append([scores.mean().item(), kl.mean().item(), losses["critic"], losses["policy"]])
        assert seen[-1] == pytest.approx(ours, abs=1e-5)
    assert not old.mask.all() and not prompt_mask.all(), "some responses end early, and some prompts are shorter"
    assert abs(seen[-1][1]) > 1e-3, "the policy has moved"


def test_its_own_samples_are_responses(example, folder):
    torch.manual_seed(0)
    policy = example.load_models(folder / "policy", folder / "reward")["policy"]
    prompts, mask = torch.tensor([[0, 0, 5], [6, 7, 8]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    sequences = example.sample(policy, prompts, mask, LENGTH, eos=2, pad=0)
    alone = example.token_logprobs(policy, sequences[:1, 2:], torch.ones_like(sequences[:1, 2:]), 1)
    padded = torch.cat([mask, torch.ones_like(sequences[:, 3:])], dim=1)
    assert torch.equal(sequences[:, :3], prompts)
    torch.testing.assert_close(alone, example.token_logprobs(policy, sequences, padded, 1)[:1])
