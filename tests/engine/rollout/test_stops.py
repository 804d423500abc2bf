"""What ends a response, and that nothing else of a model's generation settings reaches the sampling."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.algo.sampling import keyed_uniforms
from engine.experience import PromptBatch
from engine.models.loading import load_policy
from engine.models.reading import read_tokenizer
from engine.rlhf_engine import EngineSpec, frozen_model
from engine.rollout import ReplicaRollouts, SamplingConfig
from engine.zero.communication import init
from engine.zero.config import EngineConfig
from scripts.harness.models import EOS, PAD, make_causal_lm, make_tokenizer
from training.runtime.models import generation_stops

PROMPTS = ([5, 9, 33], [17], [40, 41, 42, 43], [6, 60])
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
def free(tmp_path_factory):
    """What each prompt is answered if nothing ends it: forward passes of the whole text, and inverse-CDF sampling."""
    folder = make_causal_lm(tmp_path_factory.mktemp("free"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for index, prompt in enumerate(PROMPTS):
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
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    rows = torch.arange(len(PROMPTS))
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
    assert responses(folder, stops=()) == (free, [False] * len(PROMPTS))
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
    return " ".join(make_tokenizer().convert_ids_to_tokens(tokens))


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
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(tmp_path, free, row, first, last, trim):
    text = spelled(free[row][first : last + 1])
    text = text[trim : len(text) - 1 if trim else None]
    expected = cut_all(free, lambda tokens: text in spelled(tokens))
    assert expected[0][row] == free[row][: last + 1] and expected[1][row] and not all(expected[1])
    assert responses(make_causal_lm(tmp_path), stops=(), strings=(text,)) == expected


def test_stop_strings_and_tokens_end_what_they_meet_first(tmp_path, free):
    strings = (spelled(free[0][4:6]), spelled(free[1][12:14]), "no such word")
    eos = (free[0][8], free[1][9], free[2][3])  # row 0 meets its string first, row 1 its token
    expected = cut_all(free, lambda tokens: tokens[-1] in eos or any(text in spelled(tokens) for text in strings))
    assert [len(tokens) for tokens in expected[0][:3]] == [6, 10, 4]
    assert responses(make_causal_lm(tmp_path), stops=eos, strings=strings) == expected


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
