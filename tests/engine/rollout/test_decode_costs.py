"""What decoding costs: rows times steps, memory that is allocated once, questions of the host."""

import random
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from engine.rollout import decode, draws
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler
from scripts.harness.models import BOS, EOS, PAD, VOCABULARY, make_causal_lm, make_tokenizer
from tests.engine.meters import HostQuestions
from training.data.examples import collate_prompts

LAST = VOCABULARY - 1  # the token that a number just below 1 falls on


def batch(lengths: list[int]):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return collate_prompts(prompts, torch.arange(len(prompts)), torch.zeros(len(prompts), dtype=torch.int64), PAD)


def sampling(most: int, stops: tuple[int, ...] = ()) -> SamplingConfig:
    return SamplingConfig(max_new_tokens=most, pad_token_id=PAD, stop_token_ids=stops, seed=2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("rows_at_once", (None, 16))
def test_rows_times_steps_are_at_most_five_fourths_of_the_tokens(model, monkeypatch, rows_at_once):
    """64 responses of 4 to 256 tokens: the numbers that tokens are drawn by are 0 up to each row's wanted length, where
    one just below 1 falls on the token that ends it."""
    draw = random.Random(7)
    wanted = [4, 256, *(draw.randint(4, 256) for _ in range(62))]

    def numbers(seed, indices, samples, positions):
        lengths = torch.tensor(wanted)[indices]
        return (positions == lengths - 1).double() * (1 - 2.0**-53)

    sampler = Sampler(make_tokenizer(), rows_at_once)
    sampler.responses(model, batch([1]), sampling(1))  # what is found out about masks is found out
    monkeypatch.setattr(draws, "keyed_uniforms", numbers)
    passes = []
    hook = model.register_forward_pre_hook(
        lambda _, args, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    try:
        rollout = sampler.responses(model, batch([draw.randint(2, 32) for _ in wanted]), sampling(256, (LAST,)))
    finally:
        hook.remove()
    assert rollout.response_mask.sum(-1).tolist() == wanted and rollout.ended.all()
    decoded = sum(rows for rows, width in passes if width == 1)  # no prompt is as short
    assert sampler.row_steps == decoded
    assert max(rows for rows, _ in passes) == (rows_at_once or 64)
    # A row's first token comes with its prompt; behind its end it takes 7 steps more at the most.
    assert sum(wanted) - 64 <= decoded <= sum(wanted) + 64 * 6 < 1.25 * sum(wanted)
    assert 64 * 255 > 1.8 * sum(wanted)  # what it would be if no row left


def places(sampler: Sampler) -> list[int]:
    return [tensor.data_ptr() for layer in sampler.cache.layers for tensor in (layer.keys, layer.values)]


def test_the_caches_memory_is_allocated_once(model):
    sampler = Sampler(make_tokenizer())
    sampler.responses(model, batch([5, 9, 2, 7]), sampling(30))
    layer = sampler.cache.layers[0]
    first, shape, memory = places(sampler), layer.keys.shape, weakref.ref(layer.keys.untyped_storage())
    assert len(first) == 2 and shape[0] == 4 and shape[2] >= 9 + 30
    for lengths, most in (([5, 9, 2, 7], 30), ([3, 4], 30), ([5, 9, 2, 7], 12), ([1], 1)):  # as large, and smaller
        sampler.responses(model, batch(lengths), sampling(most))
        assert places(sampler) == first and sampler.cache.layers[0].keys.shape == shape
    del layer
    sampler.responses(model, batch([5, 9, 2, 7, 3]), sampling(30))
    assert sampler.cache.layers[0].keys.shape[0] == 5 and memory() is None  # larger: the old memory is given back
    sampler.cache.free()
    assert places(sampler) == []
    sampler.responses(model, batch([5, 9]), sampling(10))
    assert sampler.cache.layers[0].keys.shape[0] == 2


class Asked:
    """Questions of the host in each call of `_draw`, and how many tokens that call was to draw."""

    def __init__(self, monkeypatch):
        self.questions, self.counts = [], []
        draw = decode._Loop._draw

        def counted(decoding, count):
            with HostQuestions() as meter:
                draw(decoding, count)
            self.questions.append(meter.count)
            self.counts.append(count)

        monkeypatch.setattr(decode._Loop, "_draw", counted)


@pytest.mark.parametrize("family", ("llama", "qwen2", "gpt_neox", "opt", "gpt2"))
def test_the_host_asks_once_per_8_tokens(tmp_path, monkeypatch, family):
    model = AutoModelForCausalLM.from_pretrained(make_causal_lm(tmp_path, family), dtype=torch.float32).eval()
    how = SamplingConfig(max_new_tokens=28, pad_token_id=PAD, stop_token_ids=(EOS,), seed=2, logprob_temperature=1.0)
    asked = Asked(monkeypatch)
    Sampler(make_tokenizer()).responses(model, batch([5, 9, 1]), how)
    assert asked.counts == [8, 8, 8, 3]  # and one with the prompts
    assert asked.questions == [1, 1, 1, 1]
    Sampler(make_tokenizer(), 2).responses(model, batch([5, 9, 1, 4, 8, 3, 2]), how)
    assert len(asked.questions) > 8 and set(asked.questions) == {1}
    assert asked.counts.count(8) > len(asked.counts) / 2


def test_questions_for_each_token_would_be_seen(model, monkeypatch):
    """Hugging Face looks into each mask that it makes; and a look at each token is one, too."""
    asked, how = Asked(monkeypatch), sampling(17)
    monkeypatch.setattr(decode, "takes_slot_masks", lambda model: False)
    Sampler(make_tokenizer()).responses(model, batch([5, 9, 1]), how)
    assert asked.counts == [8, 8] and min(asked.questions) >= 8
    monkeypatch.setattr(decode, "takes_slot_masks", lambda model: True)
    find, asked.questions[:] = draws.sample_tokens, []
    monkeypatch.setattr(draws, "sample_tokens", lambda *args: find(*args) if find(*args).sum() >= 0 else None)
    Sampler(make_tokenizer()).responses(model, batch([5, 9, 1]), how)
    assert asked.questions == [9, 9]


@pytest.mark.parametrize(
    "ask, count",
    [
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.numpy(), 1),
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x.any()), 1),
        (lambda x: int(x[0]), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: torch.where(x > 0, x, 0.0), 0),
        (lambda x: x[[1, 0]], 0),
        (lambda x: x.cumsum(0).gather(0, x.long()), 0),
    ],
)
def test_what_counts_as_a_question(ask, count):
    numbers = torch.tensor([1.0, 0.0])
    with HostQuestions() as meter:
        ask(numbers)
    assert meter.count == count
