"""Responses are those of plain sampling, token for token, whatever the backend, the number of ranks and the order."""
import pytest
import torch

from engine.rollout.base import SamplingConfig
from tests.distributed import plain
from tests.distributed.harness import run_ranks
from tests.distributed.tiny_run import prompt_tokens
from tests.distributed.work_rollouts import ORDERS
from tests.tiny_models import EOS, PAD, make_tokenizer

STAGE3 = {"stage": 3, "config": "stage3.json"}
SAMPLINGS = {
    "one EOS": SamplingConfig(max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS,), seed=5),
    "several EOS": SamplingConfig(max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS, 7, 11, 19, 23, 41), seed=4,
                                  temperature=0.7),
    "stop strings": SamplingConfig(max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS,), seed=3,
                                   stop_strings=("w39", "3 w2", "1 w1")),
}


@pytest.fixture(scope="module")
def one_rank(folder) -> dict:
    return run_ranks("tests.distributed.work_rollouts:answers", world=1, folder=folder, samplings=SAMPLINGS,
                     **STAGE3)[0]


@pytest.fixture(scope="module")
def two_ranks(folder) -> dict[str, list[dict]]:
    """What each function of work_rollouts returned on both ranks, by its name."""
    ranks = run_ranks("tests.distributed.work_rollouts:everything", world=2, folder=folder, samplings=SAMPLINGS,
                      moving=SAMPLINGS["several EOS"], **STAGE3)
    return {name: [rank[name] for rank in ranks] for name in ("answers", "gathers", "uneven")}


@pytest.fixture(scope="module")
def model(folder):
    return plain.policy(folder)


@pytest.fixture(scope="module")
def expected(model) -> dict:
    """Of each sampling, {(index, sample): (tokens, ended)} for 8 prompts and 2 samples of each."""
    return {name: {(index, sample): plain_answer(model, index, sample, how) for index in range(8) for sample in (0, 1)}
            for name, how in SAMPLINGS.items()}


def plain_answer(model, index: int, sample: int, how: SamplingConfig) -> tuple[list[int], bool]:
    """One response, one row at a time, the whole sequence anew for each token."""
    tokenizer, prompt, response = make_tokenizer(), prompt_tokens(index), []
    while len(response) < how.max_new_tokens:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + response])).logits[0, -1]
        passed = (logits / how.temperature).softmax(-1).cumsum(-1) > uniform(how.seed, index, sample, len(response))
        response.append(passed.nonzero()[0].item())
        text = tokenizer.decode(response)
        if response[-1] in how.stop_token_ids or any(string in text for string in how.stop_strings):
            return response, True
    return response, False


def uniform(seed: int, index: int, sample: int, position: int) -> float:
    """The sample's own random number: SplitMix64 in Python's integers."""
    def mix(bits: int) -> int:
        bits = (bits + 0x9E3779B97F4A7C15) % 2 ** 64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2 ** 64
        return bits ^ bits >> 31

    bits = seed
    for key in (index, sample, position):
        bits = mix(bits) ^ key
    return (mix(mix(bits)) >> 11) / 2 ** 53


def test_the_cases_are_hard_enough(expected):
    """Responses differ, end early and late, at several tokens, and at strings that two tokens complete."""
    lengths = {name: [len(tokens) for tokens, _ in answers.values()] for name, answers in expected.items()}
    assert all(min(column) < 8 for column in lengths.values()) and max(lengths["one EOS"]) == 20
    last = {tokens[-1] for tokens, ended in expected["several EOS"].values() if ended}
    assert len(last) >= 3
    by_string = [tokens for tokens, ended in expected["stop strings"].values() if ended and tokens[-1] != EOS]
    assert sum(tokens[-1] != 39 for tokens in by_string) >= 2 and any(8 < len(tokens) < 16 for tokens in by_string)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ("replica", "zero3"))
def test_one_rank_answers_as_plain_sampling_does(one_rank, expected, backend, order, sampling):
    assert one_rank[backend, order, sampling] == expected[sampling]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", ("replica", "zero3"))
def test_two_ranks_answer_as_plain_sampling_does(two_ranks, expected, backend, order, sampling):
    one, other = (rank[backend, order, sampling] for rank in two_ranks["answers"])
    assert len(one) == len(other) == 8
    assert one | other == expected[sampling]


def test_the_replica_gathers_once_per_change_of_the_weights(two_ranks):
    for rank in two_ranks["gathers"]:
        assert rank["gathers"] == {"start": 1, "start again": 0, "step": 0, "after the step": 1,
                                   "after the step again": 0, "after the step, zero3": 0, "averaged": 1,
                                   "swapped back": 1}


@pytest.mark.parametrize("event, weights", (("after the step", "weights"), ("after the step, zero3", "weights"),
                                            ("averaged", "averaged weights"), ("swapped back", "weights")))
def test_responses_come_from_the_weights_as_they_stand(two_ranks, folder, event, weights):
    model, how = plain.policy(folder), SAMPLINGS["several EOS"]
    model.load_state_dict({name: tensor.double() for name, tensor in two_ranks["gathers"][0][weights].items()})
    for rank in two_ranks["gathers"]:
        answers = rank["answers"][event]
        assert answers == {(index, sample): plain_answer(model, index, sample, how) for index, sample in answers}


def test_the_step_changes_responses(two_ranks):
    for rank in two_ranks["gathers"]:
        answers = rank["answers"]
        assert answers["start"] == answers["start again"] != answers["after the step"] != answers["averaged"]


def test_ranks_whose_responses_differ_in_length_end_together(two_ranks):
    """The zero3 backend and ZeRO-3 wait for each other in every layer: a rank too few would be noticed by a hang."""
    for backend in ("zero3", "replica"):
        one, other = (rank[backend] for rank in two_ranks["uneven"])
        assert one["shape"] == (4, 1) and other["shape"] == (4, 20)
        assert one["metrics"]["rollout/response_length"] == (1 + 20) / 2
        assert one["metrics"]["rollout/eos_rate"] == 0.5
        assert one["finite"] and other["finite"]
    zero3, replica = (two_ranks["uneven"][0][backend]["metrics"] for backend in ("zero3", "replica"))
    assert zero3 == pytest.approx(replica, rel=1e-4, abs=1e-6)
