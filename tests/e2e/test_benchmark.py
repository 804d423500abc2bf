"""The benchmark of step 3 runs and tells all it should; its arithmetic is what torch counts and what a hand counts."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from scripts.benchmark_floor import Shape, Work
from scripts.benchmark_plain import Plain
from scripts.harness import models as tiny_models
from scripts.harness.models import VOCABULARY, WIDTH
from scripts.harness.programs import Result, forked_program
from tests.distributed import plain as by_one_process
from training.data.examples import collate_prompts

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "benchmark_step3.py"
LAYERS, ROWS, PROMPT, RESPONSE = 2, 3, 10, 14
LENGTH = PROMPT + RESPONSE
# Of scripts/harness/models.py's Llama, a layer: queries and output 32 x 32, keys and values 16 x 32, three of 32 x 48.
TRUNK = LAYERS * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48)


def run_benchmark(**flags: object) -> Result:
    return forked_program(PROGRAM, flags, ranks=1)


def counted(call) -> int:
    """Floating-point operations of the matrix products that torch sees."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.fixture
def llama():
    """A model whose attention is written out in matrix products, because torch counts no others on a CPU."""
    config = tiny_models.make_config("llama", layers=LAYERS)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()


@pytest.fixture
def work(llama) -> Work:
    shape = Shape.of(llama.config)
    return Work(actor=shape, critic=shape, rows=ROWS, prompt=PROMPT, response=RESPONSE)


def beyond_causal(length: int) -> int:
    """What written-out attention spends on the later positions, which the mask then throws away: of length^2 pairs all
    but length (length + 1) / 2. The floor does not have it, because kernels need not compute it."""
    return ROWS * LAYERS * 4 * WIDTH * (length**2 - length * (length + 1) // 2)


def test_arithmetic_by_hand(work):
    assert work.actor.parameters == TRUNK == 15360
    token_by_token = sum(2 * TRUNK + LAYERS * 4 * WIDTH * (before + 1) for before in range(LENGTH))
    head = RESPONSE * 2 * VOCABULARY * WIDTH
    assert work.experience == ROWS * (4 * token_by_token + 2 * head)
    assert work.training == ROWS * 3 * (2 * token_by_token + head)


def test_forward_and_backward_are_what_torch_counts(llama, work):
    tokens = torch.randint(4, VOCABULARY, (ROWS, LENGTH))

    def forward():
        return llama(input_ids=tokens, logits_to_keep=RESPONSE).logits

    # All tolerances are for the rotary angles, the one small product that the formula leaves out.
    actor = counted(forward)
    critic = counted(lambda: llama.base_model(input_ids=tokens))
    wasted = beyond_causal(LENGTH)
    assert 2 * (actor - wasted + critic - wasted) == pytest.approx(work.experience, rel=0.005)
    trained = counted(lambda: forward().sum().backward()) + counted(
        lambda: llama.base_model(input_ids=tokens)[0].sum().backward()
    )
    assert trained - 6 * wasted == pytest.approx(work.training, rel=0.005)


def test_the_plain_step_does_the_whole_work(tmp_path):
    actor = tiny_models.make_causal_lm(tmp_path / "actor")
    reward = tiny_models.make_scorer(tmp_path / "reward")
    plain = Plain(actor, reward, dtype=torch.float32, response_length=RESPONSE, micro_batch=2)
    token_lists = torch.randint(4, VOCABULARY, (ROWS, PROMPT)).tolist()
    prompts = collate_prompts(token_lists, torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64), 0)
    sequences = plain.generate(prompts)
    assert sequences.shape == (ROWS, LENGTH) and sequences[:, :PROMPT].equal(prompts.input_ids)

    experience = plain.make_experience(sequences)
    model = by_one_process.policy(tmp_path)
    logits = model(input_ids=sequences).logits[:, PROMPT - 1 : -1].double()
    expected = -F.cross_entropy(logits.flatten(0, 1), sequences[:, PROMPT:].flatten(), reduction="none")
    torch.testing.assert_close(experience.logprobs.double(), expected.view(ROWS, RESPONSE), rtol=0, atol=1e-4)

    before = {name: value.clone() for name, value in plain.actor.state_dict().items()}
    plain.train(experience)
    changed = [name for name, value in plain.actor.state_dict().items() if not value.equal(before[name])]
    assert len(changed) == len(before), before.keys() - set(changed)


def test_one_process_measures_a_tiny_model(tmp_path):
    ended = run_benchmark(
        size="260k",
        prompts=4,
        steps=1,
        warmup=0,
        response_length=8,
        rollout_backend=["replica", "zero3"],
        json=tmp_path / "found.json",
    )
    assert ended.code == 0, ended.stderr
    for phase in ("generate", "make experience", "train", "whole step"):
        row = next(line for line in ended.stdout.splitlines() if line.startswith(f"| {phase} |"))
        assert all(float(cell.split()[0]) > 0 for cell in row.strip("| ").split(" | ")[1:]), row
    for begin in (
        "generation, tokens/s: ours ",
        "peak memory of a rank",
        "training: ",
        "decode: ",
        "generation by backend, s: replica ",
    ):
        assert any(line.startswith(begin) for line in ended.stdout.splitlines()), begin
    assert "x replica): the same tokens" in ended.stdout
    [found] = json.loads((tmp_path / "found.json").read_text())
    assert [len(found["steps"][side]) for side in ("ours", "plain")] == [1, 1]
