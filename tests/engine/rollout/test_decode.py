"""The decoding loop answers as plain sampling does, whatever comes, goes and is moved meanwhile, in every family."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

from engine.algorithms import get_dialect
from engine.experience import Rollout
from engine.rollout.base import SamplingConfig
from engine.rollout.cache import SlotCache
from engine.rollout.decode import Sampler, takes_slot_masks
from scripts.harness.models import BOS, EOS, PAD, POSITIONS, VOCABULARY, make_causal_lm, make_tokenizer, save_random
from tests.plain_sampling import plain_answer
from training.data.examples import collate_prompts

FAMILIES = ("llama", "mistral", "qwen2", "gpt_neox", "opt", "gpt2", "bloom")
READY = {"llama", "qwen2", "gpt_neox", "opt", "gpt2"}  # BLOOM makes its biases of a mask (B, S); Mistral has a window
LENGTHS = (1, 3, 9, 2, 5, 1, 7, 4, 8, 6, 2, 3)
INDICES = [3 * row + 1 for row in range(len(LENGTHS))]
PROMPTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row)).tolist()
    for row, length in enumerate(LENGTHS)
]
BATCH = collate_prompts(PROMPTS, torch.tensor(INDICES), torch.zeros(len(PROMPTS), dtype=torch.int64), PAD)
SAMPLING = SamplingConfig(max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS, 7, 11, 19, 23), seed=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict:
    return {family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)) for family in FAMILIES}


def loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(models) -> dict:
    """Of each family, plain sampling's answers to PROMPTS under SAMPLING."""
    return {family: plainly(model, SAMPLING) for family, model in models.items()}


def plainly(model, how: SamplingConfig) -> list[tuple[list[int], bool]]:
    return [plain_answer(model, prompt, index, 0, how) for prompt, index in zip(PROMPTS, INDICES)]


def answers(rollout: Rollout) -> list[tuple[list[int], bool]]:
    return [
        (tokens[mask].tolist(), ended.item())
        for tokens, mask, ended in zip(rollout.responses, rollout.response_mask, rollout.ended)
    ]


def sampled(model, how: SamplingConfig, rows_at_once: int | None = None) -> list[tuple[list[int], bool]]:
    return answers(Sampler(make_tokenizer(), rows_at_once).responses(model, BATCH, how))


def test_the_cases_are_hard_enough(expected):
    """Some responses end at once, some in the middle of 8 tokens, some never; more than two differ in length."""
    for rows in expected.values():
        lengths = [len(tokens) for tokens, _ in rows]
        assert min(lengths) < 8 < sum(lengths) / len(lengths) < 20 == max(lengths) and len(set(lengths)) > 4
        assert any(ended for _, ended in rows) and not all(ended for _, ended in rows)


@pytest.mark.parametrize(
    "family, rows_at_once",
    [*((family, count) for family in FAMILIES for count in (None, 3)), ("llama", 1), ("llama", 11), ("llama", 50)],
)
def test_answers_are_those_of_plain_sampling(models, expected, family, rows_at_once):
    assert sampled(models[family], SAMPLING, rows_at_once) == expected[family]


@pytest.mark.parametrize("family", ("llama", "gpt2", "bloom"))
def test_living_rows_move_to_the_left_when_the_slots_are_used_up(models, monkeypatch, family):
    """3 of 48 rows at once take far more steps than there are slots."""
    moves, shift = [], SlotCache.shift
    monkeypatch.setattr(
        SlotCache,
        "shift",
        lambda self, rows, start, end, by: (moves.append((rows, start, end, by)), shift(self, rows, start, end, by)),
    )
    rollout = Sampler(make_tokenizer(), 3).responses(models[family], BATCH.repeat(4), SAMPLING)
    assert len(moves) >= 2 and all(rows == 3 and by > 20 for rows, start, end, by in moves)
    assert answers(rollout) == [
        plain_answer(models[family], prompt, index, sample, SAMPLING)
        for prompt, index in zip(PROMPTS, INDICES)
        for sample in range(4)
    ]


@pytest.mark.parametrize("most, rows_at_once", [(1, None), (1, 3), (2, 3), (8, 3), (9, None), (9, 3), (10, 3), (17, 3)])
def test_responses_of_every_greatest_length(models, expected, most, rows_at_once):
    """Numbers are each token's own, so that shorter responses are the beginnings of longer ones."""
    beginnings = [(tokens[:most], ended and len(tokens) <= most) for tokens, ended in expected["llama"]]
    assert sampled(models["llama"], replace(SAMPLING, max_new_tokens=most), rows_at_once) == beginnings


@pytest.mark.parametrize("family", ("llama", "bloom"))
@pytest.mark.parametrize("rows_at_once", (None, 3))
def test_strings_that_end_a_response_and_a_temperature(models, family, rows_at_once):
    """w39 is one token; the other strings take two. The host sees 9 tokens and then 8 more: one is completed by the
    tenth."""
    how = replace(SAMPLING, stop_token_ids=(EOS,), stop_strings=("w39", "3 w2", "1 w1"), temperature=0.6, seed=3)
    expected = plainly(models[family], how)
    completed = [tokens for tokens, ended in expected if ended and tokens[-1] not in (EOS, 39)]
    assert len(completed) >= 3 and any(len(tokens) == 10 for tokens in completed)
    assert sampled(models[family], how, rows_at_once) == expected


@pytest.mark.parametrize("family", ("gpt2", "opt"))
def test_the_models_last_position_may_be_used_and_none_after_it(models, family):
    """Models with a table of positions fail beyond it. The row that takes all of them is read in step with a row that
    joined later and has more tokens to come, so that the loop goes on past its end."""
    longest = LENGTHS.index(max(LENGTHS))
    how = replace(SAMPLING, max_new_tokens=POSITIONS - max(LENGTHS), stop_token_ids=())
    whole = plain_answer(models[family], PROMPTS[longest], INDICES[longest], 0, how)[0]
    others = tuple(token for token in range(VOCABULARY) if token not in whole)[:8]
    how = replace(how, stop_token_ids=others)
    expected = plainly(models[family], how)
    assert expected[longest] == (whole, False) and len(PROMPTS[longest] + whole) == POSITIONS
    assert sum(len(tokens) < 20 for tokens, _ in expected) > 3
    for rows_at_once in (None, 2):
        assert sampled(models[family], how, rows_at_once) == expected


def test_token_ids_beyond_the_vocabulary_are_not_drawn(models):
    """As if the model had no others: the same number falls on the first 40 tokens, their shares added up anew."""

    class Narrow(torch.nn.Module):
        def forward(self, input_ids):
            output = models["llama"](input_ids)
            output.logits = output.logits[..., :40]
            return output

    how = replace(SAMPLING, vocabulary_size=40)
    expected = plainly(Narrow(), how)
    assert expected != plainly(models["llama"], SAMPLING)
    assert sampled(models["llama"], how, 3) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_which_families_take_ready_masks(models, family):
    assert takes_slot_masks(models[family]) == (family in READY)


@pytest.mark.parametrize("family", sorted(READY))
def test_answers_are_the_same_with_the_models_own_masks(models, expected, monkeypatch, family):
    monkeypatch.setattr("engine.rollout.decode.takes_slot_masks", lambda model: False)
    assert sampled(models[family], SAMPLING, 3) == expected[family]


COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@pytest.mark.parametrize(
    "config",
    (MistralConfig(**COMMON, sliding_window=6), Gemma2Config(**COMMON, head_dim=8, sliding_window=6)),
    ids=("mistral", "gemma2"),
)
def test_a_window_that_is_shorter_than_the_sequence(tmp_path, config):
    """All layers of this Mistral, every other one of Gemma 2, see 6 tokens."""
    folder = save_random(AutoModelForCausalLM.from_config(config), tmp_path)
    model = loaded(folder)
    expected = plainly(model, SAMPLING)
    wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=POSITIONS).eval()
    assert sum(a != b for a, b in zip(plainly(wide, SAMPLING), expected)) > 6  # the window is felt
    assert not takes_slot_masks(model)
    for rows_at_once in (None, 3):
        assert sampled(model, SAMPLING, rows_at_once) == expected


@pytest.mark.parametrize("rows_at_once", (None, 3))
@pytest.mark.parametrize("family", ("llama", "bloom"))
@pytest.mark.parametrize("sampling", ("fixed", "without_eos"))
def test_responses_of_fixed_length(models, expected, sampling, family, rows_at_once):
    """With ends that are tokens like others, and with ends that are never drawn."""
    how = SamplingConfig.of(
        get_dialect("default").override(sampling=sampling, temperature=0.8),
        SAMPLING.stop_token_ids,
        "bf16",
        max_new_tokens=20,
        pad_token_id=PAD,
        seed=5,
    )
    found = sampled(models[family], how, rows_at_once)
    assert found == plainly(models[family], how) != expected[family]
    assert all(len(tokens) == 20 and not ended for tokens, ended in found)
    drawn = {token for tokens, _ in found for token in tokens}
    assert bool(drawn & set(SAMPLING.stop_token_ids)) == (sampling == "fixed")


@pytest.mark.parametrize("rows_at_once", (None, 3))
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_recorded_log_probs_are_those_of_the_finished_sequences(models, family, rows_at_once):
    model, how = models[family], replace(SAMPLING, temperature=0.9, logprob_temperature=0.7, with_entropy=True)
    rollout = Sampler(make_tokenizer(), rows_at_once).responses(model, BATCH, how)
    expected = torch.zeros(2, *rollout.response_mask.shape)
    for row, (tokens, _) in enumerate(answers(rollout)):
        logits = model(torch.tensor([PROMPTS[row] + tokens])).logits[0, LENGTHS[row] - 1 : -1] / 0.7
        logprobs = torch.log_softmax(logits, -1)
        expected[0, row, : len(tokens)] = logprobs[range(len(tokens)), tokens]
        expected[1, row, : len(tokens)] = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(torch.stack([rollout.logprobs, rollout.entropy]), expected, rtol=0, atol=1e-4)
    outside = ~rollout.response_mask
    assert outside.any() and not rollout.logprobs[outside].any() and not rollout.entropy[outside].any()


def test_nothing_is_recorded_unasked_and_what_is_changes_no_token(models):
    plain, noted, with_entropy = (
        Sampler(make_tokenizer()).responses(models["llama"], BATCH, how)
        for how in (
            SAMPLING,
            replace(SAMPLING, logprob_temperature=1.0),
            replace(SAMPLING, logprob_temperature=1.0, with_entropy=True),
        )
    )
    assert plain.logprobs is None and plain.entropy is None and noted.entropy is None
    assert torch.equal(plain.sequences, noted.sequences) and torch.equal(plain.sequences, with_entropy.sequences)
    assert torch.equal(noted.logprobs, with_entropy.logprobs)


def test_a_rollout_is_its_prompts_and_what_was_drawn(models, expected):
    """As wide as the longest response, with padding after each; masks, indices and samples as given."""
    rollout = Sampler(make_tokenizer(), 3).responses(models["opt"], BATCH.repeat(2), replace(SAMPLING, pad_token_id=9))
    assert torch.equal(rollout.prompts, BATCH.input_ids.repeat_interleave(2, 0))
    assert torch.equal(rollout.attention_mask[:, : max(LENGTHS)], BATCH.attention_mask.repeat_interleave(2, 0))
    assert torch.equal(rollout.attention_mask[:, max(LENGTHS) :], rollout.response_mask.long())
    assert rollout.indices.tolist() == [index for index in INDICES for _ in (0, 1)]
    assert rollout.samples.tolist() == [0, 1] * len(INDICES)
    assert rollout.response_mask.any(0).all() and (rollout.responses[~rollout.response_mask] == 9).all()
    first = rollout.select(rollout.samples == 0)
    assert answers(first) == expected["opt"] and answers(first) != answers(rollout.select(rollout.samples == 1))
