"""The decoding loop answers as plain sampling does, whatever comes, goes and is moved meanwhile, in every family; what
ends a response; and what decoding costs: sequences times steps, memory allocated once, questions of the host.
"""

import copy
import json
import random
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig

from engine.algo.sampling import keyed_uniforms
from engine.algorithms import get_dialect
from engine.experience import PromptBatch, Rollout
from engine.models.config_and_tokenizer import read_tokenizer
from engine.models.loading import load_policy
from engine.models.policy import Policy
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.rollout import ReplicaRollouts, decode, passes, request
from engine.rollout.base import SamplingConfig
from engine.rollout.cache import SlotCache
from engine.rollout.decode import Sampler, slots_of_a_row, takes_slot_masks
from engine.rollout.passes import cache_bytes
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import BOS, EOS, PAD, POSITIONS, VOCABULARY, make_causal_lm, make_tokenizer, save_random
from scripts.harness.models import FAMILIES as CONFIGS
from tests.engine.meters import HostQuestions
from tests.made import Made
from tests.plain_sampling import TOKENIZER, plain_answer
from training.data.examples import collate_prompts
from training.runtime.models import generation_stops

FAMILIES = ("llama", "mistral", "qwen2", "gpt_neox", "opt", "gpt2", "bloom")
READY = set(FAMILIES) - {"bloom"}  # BLOOM makes its biases of a mask (B, S)
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
    return Made(lambda family: loaded(make_causal_lm(tmp_path_factory.mktemp(family), family)))


def loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected(models) -> dict:
    """Of each family, plain sampling's answers to PROMPTS under SAMPLING."""
    return Made(lambda family: plainly(models[family], SAMPLING))


def plainly(model, how: SamplingConfig) -> list[tuple[list[int], bool]]:
    return [plain_answer(model, prompt, index, 0, how) for prompt, index in zip(PROMPTS, INDICES)]


def answers(rollout: Rollout) -> list[tuple[list[int], bool]]:
    return [
        (tokens[mask].tolist(), ended.item())
        for tokens, mask, ended in zip(rollout.responses, rollout.response_mask, rollout.ended)
    ]


def sampled(model, how: SamplingConfig, rows_at_once: int | None = None) -> list[tuple[list[int], bool]]:
    return answers(Sampler(make_tokenizer(), rows_at_once).responses(model, BATCH, how))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cases_are_hard_enough(expected, family):
    """Some responses end at once, some in the middle of 8 tokens, some never; more than two differ in length."""
    lengths = [len(tokens) for tokens, _ in expected[family]]
    assert min(lengths) < 8 < sum(lengths) / len(lengths) < 20 == max(lengths) and len(set(lengths)) > 4
    assert {ended for _, ended in expected[family]} == {True, False}


@pytest.mark.parametrize(
    "family, rows_at_once",
    [("llama", 3), ("llama", None), ("llama", 1), ("llama", 11), ("llama", 50)]
    + [(family, count) for family in FAMILIES[1:] for count in (None, 3)],
)
def test_answers_are_those_of_plain_sampling(models, expected, family, rows_at_once):
    assert sampled(models[family], SAMPLING, rows_at_once) == expected[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_long_prompts_are_read_in_pieces(models, expected, monkeypatch, family):
    """Of 4 tokens, of one row, without padding. Rows whose prompts are short join a batch of long ones."""
    monkeypatch.setattr(passes, "READ_AT_ONCE", 4)
    model, reads = models[family], []

    def note(_, args, named):
        mask, tokens = named["attention_mask"], named["input_ids"].shape[1]
        if tokens > 1:
            reads.append((len(named["input_ids"]), tokens, mask is None or bool(torch.as_tensor(mask).all())))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        rollout = Sampler(make_tokenizer(), 5).responses(model, BATCH, replace(SAMPLING, logprob_temperature=1.0))
    finally:
        hook.remove()
    assert answers(rollout) == expected[family]
    assert (1, 4, True) in reads and all(rows * tokens <= 20 for rows, tokens, _ in reads)
    plain = Policy(model)(
        rollout.sequences, rollout.attention_mask, rollout.position_ids, response_length=rollout.response_length
    )[0]
    found, mask = rollout.logprobs, rollout.response_mask
    torch.testing.assert_close(found[mask], plain[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_living_rows_move_to_the_left_when_the_slots_are_used_up(models, expected, monkeypatch, family):
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
        answer
        for first, prompt, index in zip(expected[family], PROMPTS, INDICES)
        for answer in (first, *(plain_answer(models[family], prompt, index, k, SAMPLING) for k in (1, 2, 3)))
    ]


@pytest.mark.parametrize("most, rows_at_once", [(1, None), (1, 3), (2, 3), (8, 3), (9, None), (9, 3), (10, 3), (17, 3)])
def test_responses_of_every_greatest_length(models, expected, most, rows_at_once):
    """Numbers are each token's own, so that shorter responses are the beginnings of longer ones."""
    beginnings = [(tokens[:most], ended and len(tokens) <= most) for tokens, ended in expected["llama"]]
    assert sampled(models["llama"], replace(SAMPLING, max_new_tokens=most), rows_at_once) == beginnings


@pytest.mark.parametrize("family", ("llama", "bloom"))
def test_strings_that_end_a_response_and_a_temperature(models, family):
    """w39 is one token; the other strings take two. The host sees 9 tokens and then 8 more: one is completed by the
    tenth."""
    how = replace(SAMPLING, stop_token_ids=(EOS,), stop_strings=("w39", "3 w2", "1 w1"), temperature=0.6, seed=3)
    expected = plainly(models[family], how)
    completed = [tokens for tokens, ended in expected if ended and tokens[-1] not in (EOS, 39)]
    assert len(completed) >= 3 and any(len(tokens) == 10 for tokens in completed)
    for rows_at_once in (None, 3):
        assert sampled(models[family], how, rows_at_once) == expected


@pytest.mark.parametrize("learned", ("gpt2", "opt"))
def test_the_models_last_position_may_be_used_and_none_after_it(models, learned):
    """Models with a table of positions fail beyond it. The row that takes all of them is read in step with a row that
    joined later and has more tokens to come, so that the loop goes on past its end."""
    longest = LENGTHS.index(max(LENGTHS))
    how = replace(SAMPLING, max_new_tokens=POSITIONS - max(LENGTHS), stop_token_ids=())
    whole = plain_answer(models[learned], PROMPTS[longest], INDICES[longest], 0, how)[0]
    others = tuple(token for token in range(VOCABULARY) if token not in whole)[:8]
    how = replace(how, stop_token_ids=others)
    expected = plainly(models[learned], how)
    assert expected[longest] == (whole, False) and len(PROMPTS[longest] + whole) == POSITIONS
    assert sum(len(tokens) < 20 for tokens, _ in expected) > 3
    for rows_at_once in (None, 2):
        assert sampled(models[learned], how, rows_at_once) == expected


def test_token_ids_beyond_the_vocabulary_are_not_drawn(models, expected):
    """As if the model had no others: the same number falls on the first 40 tokens, their shares added up anew."""

    class Narrow(torch.nn.Module):
        def forward(self, input_ids):
            output = models["llama"](input_ids)
            output.logits = output.logits[..., :40]
            return output

    how = replace(SAMPLING, vocabulary_size=40)
    narrow = plainly(Narrow(), how)
    assert narrow != expected["llama"]
    assert sampled(models["llama"], how, 3) == narrow


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
    assert sum(a != b for a, b in zip(sampled(wide, SAMPLING), expected)) > 6  # the window is felt
    for rows_at_once in (None, 3):
        assert sampled(model, SAMPLING, rows_at_once) == expected


@pytest.mark.parametrize("family", ["llama", "bloom"])
@pytest.mark.parametrize("sampling", ("fixed", "without_eos"))
def test_responses_of_fixed_length(models, expected, sampling, family):
    """With ends that are tokens like others, and with ends that are never drawn."""
    how = SamplingConfig.of(
        get_dialect("default").override(sampling=sampling, temperature=0.8),
        SAMPLING.stop_token_ids,
        "bf16",
        max_new_tokens=20,
        pad_token_id=PAD,
        seed=5,
    )
    found = plainly(models[family], how)
    for rows_at_once in (None, 3):
        assert sampled(models[family], how, rows_at_once) == found != expected[family]
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


def test_a_rank_is_told_of_its_own_responses(models, expected):
    """The prompts of the group's other rank come first, and one of them is longer."""
    group, told = SimpleNamespace(size=2, place=1, all_objects=lambda own: [BATCH.select(range(5)), own]), []
    own = collate_prompts(PROMPTS[5:], torch.tensor(INDICES[5:]), torch.zeros(7, dtype=torch.int64), PAD)
    sampler = Sampler(make_tokenizer(), 2, group=group)
    sampler.responses(models["llama"], own, SAMPLING, told.append)
    answered = [pair for rollout in told for pair in zip(rollout.indices.tolist(), answers(rollout))]
    assert sorted(answered) == list(zip(INDICES, expected["llama"]))[5:] and sampler.rows_at_once == 2 * 2


def test_slots_of_a_row_by_hand():
    slots = [slots_of_a_row(tokens, waiting) for waiting in (False, True) for tokens in (100, 1000)]
    assert slots == [100 + 8, 1000 + 8, 100 + 8 + 8 * 8, 1000 + 8 + 1000 // 4]


def test_a_rank_keeps_pace_with_the_others(models, expected, monkeypatch):
    """Another rank reads two prompts, the first in 3 pieces, and draws 8 more tokens for each; this rank draws one."""
    monkeypatch.setattr(decode, "takes_slot_masks", lambda model: True)
    model, widths, others = models["llama"], [], iter([1, 3, 8, 1, 1, 8, 0])
    hook = model.register_forward_pre_hook(
        lambda _, args, named: widths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    sampler = Sampler(make_tokenizer(), agree=lambda own: max(own, next(others)))
    rollout = sampler.responses(model, BATCH.select([2]), replace(SAMPLING, max_new_tokens=1))
    hook.remove()
    assert widths == [LENGTHS[2]] + [1] * (2 + 8 + 1 + 8) and next(others, None) is None
    assert answers(rollout)[0][0] == expected["llama"][2][0][:1]


def test_a_model_answers_in_eval_mode_and_has_its_own_again_after_an_error_too(models):
    sampler, model, modes = Sampler(make_tokenizer()), copy.deepcopy(models["llama"]).train(), []

    def fail(rollout):
        modes.append(model.training)
        raise InterruptedError

    sampler.responses(model, BATCH, SAMPLING)
    modes.append(model.training)
    with pytest.raises(InterruptedError):
        sampler.responses(model, BATCH, SAMPLING, fail)
    assert [*modes, model.training] == [True, False, True]


STOPS_PROMPTS = ([5, 9, 33], [17], [40, 41, 42, 43], [6, 60])
LONGEST = 20
SEED = 6
HOSTILE = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 1,
    "top_p": 0.01,
    "min_p": 0.5,
    "typical_p": 0.2,
    "epsilon_cutoff": 0.1,
    "repetition_penalty": 5.0,
    "no_repeat_ngram_size": 1,
    "max_length": 5,
    "max_new_tokens": 3,
    "min_new_tokens": 18,
    "min_length": 18,
    "num_beams": 4,
    "num_return_sequences": 2,
    "suppress_tokens": [7, 8, 9],
    "begin_suppress_tokens": [10, 11],
    "bad_words_ids": [[12], [13]],
    "forced_eos_token_id": EOS,
    "stop_strings": ["w"],
    "guidance_scale": 3.0,
    "use_cache": False,
    "sequence_bias": [[[20], 50.0]],
}


@pytest.fixture(scope="module")
def unedited(tmp_path_factory) -> str:
    return make_causal_lm(tmp_path_factory.mktemp("unedited"))


@pytest.fixture(scope="module")
def free(unedited):
    """What each prompt is answered if nothing ends it: forward passes of the whole text, and inverse-CDF sampling."""
    model = loaded(unedited)
    answers = []
    for index, prompt in enumerate(STOPS_PROMPTS):
        tokens = list(prompt)
        for step in range(LONGEST):
            with torch.no_grad():
                probabilities = torch.softmax(model(torch.tensor([tokens])).logits[0, -1].double(), -1).numpy()
            number = keyed_uniforms(SEED, torch.tensor([index]), torch.tensor([0]), step).item()
            tokens.append(int(np.searchsorted(probabilities.cumsum(), number)))
        answers.append(tokens[len(prompt) :])
    return answers


def edit(folder, name, **settings):
    path = Path(folder) / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (old | settings).items() if value is not None}))


def responses(folder, stops=None, strings=()):
    """What our rollouts give for PROMPTS, without padding, and which of them ended."""
    init()
    tokenizer = read_tokenizer(folder, "actor")
    actor = frozen_model(load_policy, folder, EngineConfig("reference", 0), EngineSpec(actor_path="", critic_path=""))
    width = max(map(len, STOPS_PROMPTS))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in STOPS_PROMPTS])
    rows = torch.arange(len(STOPS_PROMPTS))
    rollout = ReplicaRollouts(actor, tokenizer).generate(
        PromptBatch(ids, (ids != PAD).long(), rows, torch.zeros_like(rows)),
        SamplingConfig(
            max_new_tokens=LONGEST,
            pad_token_id=PAD,
            stop_strings=strings,
            seed=SEED,
            stop_token_ids=generation_stops(folder, tokenizer) if stops is None else stops,
        ),
    )
    assert rollout.response_mask.any(0).all()  # no slot that no row uses
    found = [row[mask].tolist() for row, mask in zip(rollout.responses, rollout.response_mask)]
    for row, response in zip(rollout.responses.tolist(), found):
        assert row == response + [PAD] * (len(row) - len(response))
    return found, rollout.ended.tolist()


def cut(answer, ends):
    """The answer up to and including the first token where `ends` (of all tokens so far) holds, and whether it did."""
    for count in range(1, len(answer) + 1):
        if ends(answer[:count]):
            return answer[:count], True
    return answer, False


def cut_all(answers, ends):
    pairs = [cut(answer, ends) for answer in answers]
    return [tokens for tokens, _ in pairs], [ended for _, ended in pairs]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_nothing_of_the_generation_settings_but_eos_reaches_the_sampling(tmp_path, free, file):
    folder = make_causal_lm(tmp_path)
    edit(folder, file, **HOSTILE)
    assert generation_stops(folder, make_tokenizer()) == (EOS,)
    assert responses(folder) == cut_all(free, lambda tokens: tokens[-1] == EOS)
    assert responses(folder, stops=()) == (free, [False] * len(STOPS_PROMPTS))
    assert len({token for answer in free for token in answer} & {7, 8, 9, 10, 11, 12, 13, 20}) > 3


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_every_eos_of_a_list_ends_a_response(tmp_path, free, file):
    folder = make_causal_lm(tmp_path)
    eos = [free[0][2], free[1][9], free[2][17]]
    edit(folder, "config.json", eos_token_id=EOS)
    edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, file, eos_token_id=eos)
    assert generation_stops(folder, make_tokenizer()) == tuple(sorted({*eos, EOS}))
    expected = cut_all(free, lambda tokens: tokens[-1] in (*eos, EOS))
    assert responses(folder) == expected
    assert len({len(tokens) for tokens in expected[0]}) > 1 and len({tokens[-1] for tokens in expected[0]}) > 1


def test_the_generation_config_is_asked_before_the_models(tmp_path):
    folder = make_causal_lm(tmp_path)
    edit(folder, "config.json", eos_token_id=30)
    edit(folder, "generation_config.json", eos_token_id=31)
    assert generation_stops(folder, make_tokenizer()) == (EOS, 31)
    (tmp_path / "generation_config.json").unlink()
    assert generation_stops(folder, make_tokenizer()) == (EOS, 30)


def spelled(tokens):
    return " ".join(TOKENIZER.convert_ids_to_tokens(tokens))


@pytest.mark.parametrize(
    "row, first, last, trim",
    [
        (0, 0, 0, 0),  # the first token alone
        (1, 4, 4, 0),  # one token
        (2, 6, 8, 0),  # three tokens, over the border at which the loop looks for strings
        (3, 10, 11, 2),  # from within a token to within the next
        (0, 14, 15, 0),
        (1, 18, 19, 0),  # completed by the last token that may be drawn
    ],
)
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(unedited, free, row, first, last, trim):
    text = spelled(free[row][first : last + 1])
    text = text[trim : len(text) - 1 if trim else None]
    expected = cut_all(free, lambda tokens: text in spelled(tokens))
    assert expected[0][row] == free[row][: last + 1] and expected[1][row] and not all(expected[1])
    assert responses(unedited, stops=(), strings=(text,)) == expected


def test_stop_strings_and_tokens_end_what_they_meet_first(unedited, free):
    strings = (spelled(free[0][4:6]), spelled(free[1][12:14]), "no such word")
    eos = (free[0][8], free[1][9], free[2][3])  # row 0 meets its string first, row 1 its token
    expected = cut_all(free, lambda tokens: tokens[-1] in eos or any(text in spelled(tokens) for text in strings))
    assert [len(tokens) for tokens in expected[0][:3]] == [6, 10, 4]
    assert responses(unedited, stops=eos, strings=strings) == expected


def test_a_response_ends_where_the_chat_template_ends_a_turn(tmp_path, free):
    folder = make_causal_lm(tmp_path)
    turn_end = free[0][5]
    word = spelled([turn_end])
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [word]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }} " + word + " {% endfor %}</s>"
    tokenizer.save_pretrained(folder)
    assert generation_stops(folder, read_tokenizer(folder, "actor")) == tuple(sorted((EOS, turn_end)))
    expected = cut_all(free, lambda tokens: tokens[-1] in (EOS, turn_end))
    assert expected[1][0] and responses(folder) == expected


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
    monkeypatch.setattr(request, "keyed_uniforms", numbers)
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


@pytest.mark.parametrize("family", sorted(READY))
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


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory) -> dict:
    """Models of which some layers keep a state for each row."""

    def made(family: str):
        config = AutoConfig.for_model(family, vocab_size=VOCABULARY, pad_token_id=PAD, **HYBRIDS[family])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return loaded(save_random(model, tmp_path_factory.mktemp(family)))

    return Made(made)


# falcon_h1's layers keep states beside keys and values; mamba's keep no keys and values.
HYBRIDS = {family: CONFIGS[family] for family in ("qwen3_5_text", "nemotron_h", "lfm2")} | {
    "falcon_h1": CONFIGS["qwen3"] | {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_d_ssm": 32},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_states_join_leave_and_move_with_their_rows(hybrids, family):
    """12 prompts of different lengths, 3 or all of them at once; the slots are used up, so that rows move left."""
    model = hybrids[family]
    expected = plainly(model, SAMPLING)
    assert len({len(tokens) for tokens, _ in expected}) > 4
    for rows_at_once in (None, 3):
        assert sampled(model, SAMPLING, rows_at_once) == expected
    batch, how = BATCH.repeat(4), replace(SAMPLING, logprob_temperature=1.0)
    drawn = Sampler(make_tokenizer(), 3).responses(model, batch, how)
    assert answers(drawn)[::4] == expected
    with torch.no_grad():
        logprobs, _ = Policy(model)(
            drawn.sequences, drawn.attention_mask, drawn.position_ids, response_length=drawn.response_length
        )
    # These large weights amplify rounding: one token at a time with transformers' own cache differs by 1e-5, too.
    assert (drawn.logprobs - logprobs)[drawn.response_mask].abs().max() < 1e-4


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_planned_bytes_are_those_that_the_cache_takes(hybrids, family):
    sampler = Sampler(make_tokenizer(), 3)
    sampler.responses(hybrids[family], BATCH, SAMPLING)
    cache = sampler.cache
    taken = sum(tensor.nbytes for tensor in (*cache.tensors(), *cache.states()))
    assert cache_bytes(Policy(hybrids[family]), cache.room.rows * cache.room.slots, cache.room.rows) == taken
