"""Keyed uniforms against arbitrary-precision SplitMix64, their distribution, the tokens drawn with them, and whole
sequences drawn by the decoding loop against the model's own probabilities.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from engine.algo.sampling import keyed_uniforms, sample_tokens
from engine.experience import PromptBatch
from engine.rollout.base import SamplingConfig
from engine.rollout.decode import Sampler
from tests.plain_sampling import ROUND, splitmix, uniform

N = 20_000
# Chi-squared critical values at a probability of 0.001; the draws are fixed, so a test passes always or never.
CHI_SQUARED = {3: 16.266, 4: 18.467}
KOLMOGOROV = 1.949 / math.sqrt(N)  # at 0.001


def columns(*keys: int, rows: int = 1) -> list[torch.Tensor]:
    return [torch.full((rows,), key) for key in keys]


def test_the_generator_of_this_test_gives_the_published_numbers():
    # The first outputs of SplitMix64 from the states 0 and 1234567.
    assert [splitmix(step * 0x9E3779B97F4A7C15 & ROUND) for step in range(3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert splitmix(1234567) == 6457827717110365317


def test_uniforms_equal_the_arbitrary_precision_ones():
    big = (1 << 63) - 1
    cases = [(0, 0, 0, 0), (1, 2, 3, 4), (42, 0, 1, 0), (big, big, big, big), (7, 10**12, 5, 2047), (-3, 9, 0, 1)]
    rng = np.random.default_rng(0)
    cases += [tuple(int(key) for key in row) for row in rng.integers(0, 2**40, (200, 4))]
    for seed, index, sample, position in cases:
        drawn = keyed_uniforms(seed, *columns(index, sample, position))
        assert drawn.dtype == torch.float64 and drawn.shape == (1,)
        assert drawn.item() == uniform(seed, index, sample, position)


def test_uniforms_depend_on_nothing_but_the_keys():
    indices, samples, positions = (torch.arange(60) // 12, torch.arange(60) // 4 % 3, torch.arange(60) % 4)
    for places in (positions, torch.tensor(2)):
        expected = [uniform(3, *key) for key in zip(indices.tolist(), samples.tolist(), places.expand(60).tolist())]
        assert keyed_uniforms(3, indices, samples, places if places.dim() else 2).tolist() == expected


ZERO, LINE = torch.zeros(N, dtype=torch.int64), torch.arange(N)
ALONG = {
    "indices": partial(keyed_uniforms, 0, LINE, ZERO, ZERO),
    "samples": partial(keyed_uniforms, 0, ZERO, LINE, ZERO),
    "positions": partial(keyed_uniforms, 0, ZERO, ZERO, LINE),
    "all": partial(keyed_uniforms, 0, LINE // 400, LINE // 100 % 4, LINE % 100),
}


@pytest.mark.parametrize("key", list(ALONG))
def test_uniforms_are_uniform_along_every_key(key):
    drawn = ALONG[key]().numpy()
    assert drawn.min() >= 0 and drawn.max() < 1 and len(set(drawn)) == N
    # Standard errors: sqrt(1/12 / N) = 0.00204 of the mean, sqrt(1/180 / N) = 0.000527 of the variance; four each.
    assert abs(drawn.mean() - 0.5) < 0.0082
    assert abs(drawn.var() - 1 / 12) < 0.0022
    steps = np.arange(N + 1) / N
    ordered = np.sort(drawn)
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < KOLMOGOROV


@pytest.mark.parametrize("neighbour", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
@pytest.mark.parametrize("key", list(ALONG))
def test_neighbouring_keys_give_uncorrelated_numbers(key, neighbour):
    here = ALONG[key]().numpy()
    there = keyed_uniforms(*(own + step for own, step in zip(ALONG[key].args, neighbour))).numpy()
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(N)
    # Nor are their squared deviations, which a mere mirror image (u, 1 - u) would betray.
    assert abs(np.corrcoef((here - 0.5) ** 2, (there - 0.5) ** 2)[0, 1]) < 4 / math.sqrt(N)


def test_tokens_by_hand():
    logits = torch.tensor([0.25, 0.25, 0.5]).log().expand(6, 3)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.4999, 0.5001, 0.9999], dtype=torch.float64)
    assert sample_tokens(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2]
    # At temperature 1/2 the probabilities 1 : 1 : 4 end at 1/6, 2/6, 1.
    uniforms = torch.tensor([0.166, 0.167, 0.333, 0.334, 0.9, 0.0], dtype=torch.float64)
    assert sample_tokens(logits, uniforms, 0.5).tolist() == [0, 1, 1, 2, 2, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_token_counts_follow_the_softmax(temperature):
    logits = np.array([1.5, -1.0, 0.3, 0.0, -0.4])
    probabilities = np.exp(logits / temperature)
    probabilities /= probabilities.sum()
    drawn = sample_tokens(torch.tensor(logits, dtype=torch.float32).expand(N, 5), ALONG["all"](), temperature)
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert ((counts - N * probabilities) ** 2 / (N * probabilities)).sum() < CHI_SQUARED[4]
    # The counts would betray a temperature that is off by a tenth.
    wrong = np.exp(logits / (temperature * 1.1))
    wrong /= wrong.sum()
    assert ((counts - N * wrong) ** 2 / (N * wrong)).sum() > CHI_SQUARED[4]


def test_the_ends_whatever_the_cumulative_sum_rounds_to():
    # Float32 probabilities seldom add up to exactly 1; neither end may leave the vocabulary or meet a zero.
    logits = torch.tensor(np.random.default_rng(4).normal(0, 3, (500, 101)), dtype=torch.float32)
    logits[:, 0] = logits[:, -1] = -math.inf
    rows = torch.ones(500, dtype=torch.float64)
    assert sample_tokens(logits, 0 * rows).tolist() == [1] * 500
    last = sample_tokens(logits, (1 - 2.0**-53) * rows)
    assert last.max() <= 99 and logits.gather(1, last.unsqueeze(1)).isfinite().all()
    # A number of 1 is outside the contract; rounding up to it must still not fall off the end.
    assert sample_tokens(logits, rows).max() <= 99


def test_rare_tokens_of_a_large_vocabulary_have_shares_of_their_own():
    """All but the first have 1e-9 each, of which float32 would round 60 to one sum."""
    logits, tokens = torch.full((1, 150_000), math.log(1e-9)), torch.arange(1, 150_000, 9999)
    logits[0, 0] = 0.0
    uniforms = (1 + (tokens.double() - 0.5) * 1e-9) / (1 + 149_999e-9)  # in the middle of a token's share
    assert torch.equal(sample_tokens(logits.expand(len(tokens), -1), uniforms), tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened(dtype):
    logits = torch.tensor(np.random.default_rng(5).normal(0, 2, (1, 300)), dtype=dtype)
    wide = np.exp(logits.double().numpy()[0])
    cumulative = np.cumsum(wide / wide.sum())
    targets = (cumulative[:-1] + cumulative[1:]) / 2  # in the middle of a token's share
    drawn = sample_tokens(logits.expand(299, 300), torch.tensor(targets))
    assert drawn.tolist() == list(range(1, 300))


VOCABULARY, EOS, PAD, ROWS = 11, 10, 0, 8_000
PROMPTS = [[4, 7, 1, 5], [9, 2]]
# Chi-squared critical values at a probability of 0.001: 10 = 11 tokens - 1; 100 = 10 first tokens x (11 - 1).
CRITICAL = {10: 29.588, 100: 149.449}


def gpt2():
    return without_rare_tokens(
        GPT2LMHeadModel,
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
        ),
    )


@torch.no_grad()
def without_rare_tokens(kind: type, config):
    model = kind(config)
    model.lm_head.weight *= 0.2  # no token so rare that it would not be drawn often enough
    return model


def drawn(model, temperature: float, **changed):
    """A rollout of two tokens for ROWS samples of each prompt, mixed, the shorter prompt left-padded."""
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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_and_second_tokens_follow_the_model(temperature):
    torch.manual_seed(0)
    model = gpt2().eval()
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
