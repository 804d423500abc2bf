"""The benchmark of step 3 runs and tells all it should; its arithmetic is what torch counts and what a hand counts."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GenerationConfig

from scripts.benchmark_floor import Shape, Work
from scripts.benchmark_plain import Plain
from scripts.benchmark_report import Report
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


def test_generation_is_what_torch_counts(llama, work):
    llama.generation_config = GenerationConfig(do_sample=True, max_new_tokens=RESPONSE, pad_token_id=0)
    prompts = torch.randint(4, VOCABULARY, (ROWS, PROMPT))
    found = counted(lambda: llama.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts)))
    assert found - beyond_causal(PROMPT) == pytest.approx(work.prefill + work.decode, rel=0.005)


def test_bytes_of_decoding_by_hand(work):
    # 13 steps after the prefill read all weights; the first attends to 11 positions, the last to 23, in each of which a
    # layer holds 2 heads of 8 numbers, as keys and as values.
    cache = sum(2 * 2 * 8 * LAYERS * attended for attended in range(11, 24))
    assert work.decode_bytes(5, 2) == 2 * (13 * (TRUNK + VOCABULARY * WIDTH) + 5 * cache)


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


def test_the_plain_step_has_torchs_own_layers(tmp_path, monkeypatch):
    plain = Plain(
        tiny_models.make_causal_lm(tmp_path / "actor"),
        tiny_models.make_scorer(tmp_path / "reward"),
        dtype=torch.float32,
        response_length=2,
        micro_batch=2,
    )

    def not_torchs(*_):
        raise AssertionError("another linear layer was called")

    monkeypatch.setattr(F, "linear", not_torchs)
    prompts = collate_prompts([[4, 5], [6, 7]], torch.arange(2), torch.zeros(2, dtype=torch.int64), 0)
    plain.train(plain.make_experience(plain.generate(prompts)))
    assert F.linear is not_torchs  # put back for those whose it is


def test_ratios_are_of_medians_and_quartiles_of_pairs():
    ours, other = [2.0, 4.0, 6.0, 30.0, 5.0], [4.0, 4.0, 4.0, 10.0, 5.0]  # pairs: 0.5, 1, 1.5, 3, 1
    report = Report(
        name="",
        lines=[],
        prompts=1,
        response=2,
        ranks=1,
        floor={},
        flops={},
        matrix_rate=1.0,
        decode_rate=1.0,
        copy_rate=1.0,
        peak_flops=None,
        decode_seconds=1.0,
        decode_bytes=1,
        decoding="plain",
        fallback=None,
        backends={},
        same_tokens=True,
        steps={side: [{"step": seconds} for seconds in all_] for side, all_ in (("ours", ours), ("plain", other))},
    )
    assert report.ratio("step") == "1.25 (1.00 to 1.50)"


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


def test_a_given_model_is_measured(tmp_path):
    actor = tiny_models.make_causal_lm(tmp_path / "actor")
    ended = run_benchmark(model=actor, prompts=2, prompt_length=4, response_length=4, steps=1, warmup=0, no_plain=True)
    assert ended.code == 0 and actor in ended.stdout and "| whole step |" in ended.stdout, ended.stderr


def test_a_mistake_is_told_at_once():
    ended = run_benchmark(model="no/such/folder")
    assert ended.code == 2 and ended.stderr.count("error: ") == 1, ended.stderr
    ended = run_benchmark(response_length=1)
    assert ended.code == 2 and "--response_length 2" in ended.stderr, ended.stderr
