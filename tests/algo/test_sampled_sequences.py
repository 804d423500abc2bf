"""Whole tokens drawn by the decoding loop against the model's own probabilities."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from engine.experience import PromptBatch
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler

VOCABULARY, EOS, PAD, ROWS = 11, 10, 0, 20_000
PROMPTS = [[4, 7, 1, 5], [9, 2]]
# Chi-squared critical values at a probability of 0.001: 10 = 11 tokens - 1; 100 = 10 first tokens x (11 - 1).
CRITICAL = {10: 29.588, 100: 149.449}


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=EOS,
            eos_token_id=EOS,
            initializer_range=0.4,
            tie_word_embeddings=False,
        )
    )


def llama():
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.4,
            bos_token_id=EOS,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def drawn(model, temperature: float, **changed):
    """A rollout of two tokens for 20,000 samples of each prompt, mixed, the shorter prompt left-padded."""
    width = max(map(len, PROMPTS))
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in PROMPTS]
    masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]
    which = torch.arange(2 * ROWS) % 2
    prompts = PromptBatch(torch.tensor(rows)[which], torch.tensor(masks)[which], which, torch.arange(2 * ROWS) // 2)
    sampling = SamplingConfig(
        **{
            "max_new_tokens": 2,
            "pad_token_id": PAD,
            "stop_token_ids": (EOS,),
            "seed": 1,
            "temperature": temperature,
            **changed,
        }
    )
    return Sampler(tokenizer=None).responses(model.eval(), prompts, sampling)


@torch.no_grad()
def probabilities(model, tokens: list[int], temperature: float) -> np.ndarray:
    """The model's next-token distribution by a plain forward pass without padding or cache, in float64."""
    logits = model(torch.tensor([tokens])).logits[0, -1].double().numpy() / temperature
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def statistic(counts: np.ndarray, expected: np.ndarray) -> float:
    assert expected.min() > 4, "too few draws for a chi-squared test"
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_and_second_tokens_follow_the_model(build, temperature):
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        model.lm_head.weight *= 0.25  # no token so rare that it would not be drawn often enough
    rollout = drawn(model, temperature)
    for index, prompt in enumerate(PROMPTS):
        rows = rollout.indices == index
        responses, mask = rollout.responses[rows].numpy(), rollout.response_mask[rows].numpy()
        first = probabilities(model, prompt, temperature)
        counts = np.bincount(responses[:, 0], minlength=VOCABULARY)
        assert statistic(counts, ROWS * first) < CRITICAL[10]
        assert statistic(counts, ROWS * probabilities(model, prompt[1:], temperature)) > CRITICAL[10]  # context counts
        ended = responses[:, 0] == EOS
        assert (mask[:, 0]).all() and (mask[:, 1] == ~ended).all() and (responses[ended, 1] == PAD).all()
        total = 0.0
        for token in range(VOCABULARY):
            followers = responses[(responses[:, 0] == token) & ~ended, 1]
            if token != EOS:
                second = probabilities(model, [*prompt, token], temperature)
                total += statistic(np.bincount(followers, minlength=VOCABULARY), len(followers) * second)
        assert total < CRITICAL[100]


def test_tokens_that_are_never_drawn_leave_their_share_to_the_others():
    torch.manual_seed(0)
    model = gpt2()
    unknown = VOCABULARY - 1  # an end that the tokenizer does not know
    rollout = drawn(
        model, 1.0, stop_token_ids=(), never_drawn=(EOS, 3, unknown), vocabulary_size=unknown, logprob_temperature=1.0
    )
    assert rollout.response_mask.all() and not rollout.ended.any()
    assert not torch.isin(rollout.responses, torch.tensor([EOS, 3, unknown])).any()
    first = rollout.responses[::2, 0]
    expected = probabilities(model, PROMPTS[0], 1.0)
    logprobs = torch.tensor(np.log(expected), dtype=torch.float32)[first]  # of the whole distribution
    torch.testing.assert_close(rollout.logprobs[::2, 0], logprobs, rtol=0, atol=1e-4)
    expected[[EOS, 3, unknown]] = 0
    kept = expected > 0
    counts = np.bincount(first.numpy(), minlength=VOCABULARY)
    assert statistic(counts[kept], ROWS * expected[kept] / expected.sum()) < CRITICAL[10]


def test_without_stops_every_response_has_one_length_and_eos_is_a_token():
    torch.manual_seed(0)
    model = gpt2()
    rollout = drawn(model, 1.0, stop_token_ids=())
    assert rollout.response_mask.all() and rollout.responses.shape[1] == 2
    counts = np.bincount(rollout.responses[::2, 0].numpy(), minlength=VOCABULARY)
    share = probabilities(model, PROMPTS[0], 1.0)[EOS]
    assert counts[EOS] > 0 and abs(counts[EOS] - ROWS * share) < 4 * (ROWS * share * (1 - share)) ** 0.5
