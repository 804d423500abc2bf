"""Responses are those of plain sampling, token for token, whatever the backend, the number of ranks and the order."""

from dataclasses import replace

import pytest

from engine.rollout.base import SamplingConfig
from scripts.harness.models import EOS, PAD
from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import prompt_tokens
from tests.distributed.work_rollouts import CASES, UNEVEN_STOPS
from tests.engine.rollout.test_conversations import plain_talk
from tests.plain_sampling import plain_answer

STAGE3 = {"stage": 3, "config": "stage3.json"}
SAMPLINGS = {
    "one EOS": SamplingConfig(max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS,), seed=5),
    "several EOS": SamplingConfig(
        max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS, 7, 11, 19, 23, 41), seed=4, temperature=0.7
    ),
    "stop strings": SamplingConfig(
        max_new_tokens=20, pad_token_id=PAD, stop_token_ids=(EOS,), seed=3, stop_strings=("w39", "3 w2", "1 w1")
    ),
}


@pytest.fixture(scope="module")
def one_rank(folder) -> dict:
    return run_ranks("tests.distributed.work_rollouts:answers", world=1, folder=folder, samplings=SAMPLINGS, **STAGE3)[
        0
    ]


@pytest.fixture(scope="module")
def two_ranks(folder) -> dict[str, list[dict]]:
    """What each function of work_rollouts returned on both ranks, by its name."""
    models = plain.policy(folder), plain.critic(folder)
    actor, critic = (sum(4 * p.numel() for p in model.parameters()) for model in models)
    half = actor // 2 + 4 * (2 * 2 + 1) * 32 // 2  # norms are not divided: two in each of 2 layers, and the last
    cache = 4 * 306 * 2 * 2 * 2 * 8  # bytes of 306 keys and values of 2 layers and 2 heads, 8 wide
    later = (actor + critic) // 2 + (actor + critic)  # each rank has half of the gradients and of Adam's two moments
    whole, divided = actor + cache, half + cache
    ranks = run_ranks(
        "tests.distributed.work_rollouts:everything",
        world=2,
        folder=folder,
        samplings=SAMPLINGS,
        moving=SAMPLINGS["several EOS"],
        free={
            name: int(taken / share) + later
            for name, taken, share in (
                ("much", whole, 0.59),
                ("middling", whole, 0.74),
                ("less", whole, 0.76),
                ("little", divided, 0.76),
            )
        },
        **STAGE3,
    )
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.fixture(scope="module")
def model(folder):
    return plain.policy(folder)


@pytest.fixture(scope="module")
def expected(model) -> dict:
    """Of each sampling, {(index, sample): (tokens, ended)} for 8 prompts and 2 samples of each."""
    keys = [(index, sample) for index in range(8) for sample in (0, 1)]
    return {name: plain_answers(model, keys, how) for name, how in SAMPLINGS.items()}


def plain_answers(model, keys, how: SamplingConfig) -> dict[tuple[int, int], tuple[list[int], bool]]:
    """{(index, sample): (tokens, ended)} by plain sampling."""
    return {(index, sample): plain_answer(model, prompt_tokens(index), index, sample, how) for index, sample in keys}


def test_the_cases_are_hard_enough(expected):
    """Responses differ, end early and late, at several tokens, and at strings that two tokens complete."""
    lengths = {name: [len(tokens) for tokens, _ in answers.values()] for name, answers in expected.items()}
    assert all(min(column) < 8 for column in lengths.values()) and max(lengths["one EOS"]) == 20
    last = {tokens[-1] for tokens, ended in expected["several EOS"].values() if ended}
    assert len(last) >= 3
    by_string = [tokens for tokens, ended in expected["stop strings"].values() if ended and tokens[-1] != EOS]
    assert sum(tokens[-1] != 39 for tokens in by_string) >= 2 and any(8 < len(tokens) < 16 for tokens in by_string)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", CASES)
def test_one_rank_answers_as_plain_sampling_does(one_rank, expected, case, sampling):
    assert one_rank[*case, sampling] == expected[sampling]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_answer_as_plain_sampling_does(two_ranks, expected, case, sampling):
    one, other = (rank[*case, sampling] for rank in two_ranks["answers"])
    assert len(one) == len(other) == 8
    assert one | other == expected[sampling]


def test_all_ranks_choose_by_the_one_with_the_least_memory(two_ranks, expected):
    """Copy and cache may take 0.6 of the memory free beside gradients and moments if they stay, 0.75 if not."""
    for name, chosen in (("much", (1, "keep")), ("middling", (1, "free")), ("less", (2, "keep"))):
        one, other = (rank[name] for rank in two_ranks["choices"])
        assert one["why"] == other["why"] and one["chosen"] == other["chosen"] == chosen, one["why"]
        answers = one["answers"] | other["answers"]
        assert answers == {key: answer for key, answer in expected["several EOS"].items() if key[1] == 0}


def test_too_little_memory_on_one_rank_is_refused_on_both(two_ranks):
    one, other = (rank["little"]["refused"] for rank in two_ranks["choices"])
    assert one == other and one.startswith("--rollout_backend auto: a copy, keys and values on 2 ranks take 0.00 of ")
    assert "--per_device_generation_batch_size" in one and "--rollout_backend zero3" in one


@pytest.mark.parametrize("parts", (1, 2))
def test_vllm_is_given_the_weights_of_partitions_and_groups_answer_together(two_ranks, expected, parts):
    one, other = (rank[parts] for rank in two_ranks["vllm"])
    wanted = {key: answer for key, answer in expected["several EOS"].items() if key[1] == 0}
    assert len(other["answers"]) == 3 and one["answers"] | other["answers"] == wanted
    spread = "each actor on 2 ranks" if parts == 2 else "a whole actor on each rank"
    assert one["why"] == f"rollouts by vllm 0.32.0: as asked; {spread}, tokens drawn with our random numbers"


@pytest.mark.parametrize("backend", [("replica", 1), ("replica", 2), ("zero3", None), ("vllm", 2)])
def test_conversations_of_all_ranks_and_backends_are_those_of_plain_sampling(two_ranks, model, backend):
    """The rank whose conversations are over keeps pace with the other."""
    one, other = (rank[backend] for rank in two_ranks["conversations"])
    turns = []
    for rank in (one, other):
        for (index, sample), talk in rank["conversations"].items():
            assert talk == plain_talk(model, prompt_tokens(index), index, sample, SAMPLINGS["several EOS"])
        turns.append([sum(reward > 0 for reward in talk[2]) for talk in rank["conversations"].values()])
        assert rank["turns"] == sum(turns[-1])
    assert (max(turns[0]), max(turns[1]), len(turns[0]), len(turns[1])) == (3, 2, 6, 4)


def test_the_replica_gathers_once_per_change_of_the_weights(two_ranks):
    for rank in two_ranks["gathers"]:
        assert rank["gathers"] == {
            "start": 1,
            "start again": 0,
            "step": 0,
            "after the step": 1,
            "after the step again": 0,
            "after the step, zero3": 0,
            "averaged": 1,
            "swapped back": 1,
        }


@pytest.mark.parametrize(
    "event, weights",
    (
        ("after the step", "weights"),
        ("after the step, zero3", "weights"),
        ("averaged", "averaged weights"),
        ("swapped back", "weights"),
    ),
)
def test_responses_come_from_the_weights_as_they_stand(two_ranks, folder, event, weights):
    model, how = plain.policy(folder), SAMPLINGS["several EOS"]
    model.load_state_dict({name: tensor.double() for name, tensor in two_ranks["gathers"][0][weights].items()})
    for rank in two_ranks["gathers"]:
        answers = rank["answers"][event]
        assert answers == plain_answers(model, answers, how)


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


@pytest.mark.parametrize("backend", ("zero3", "replica"))
def test_rows_come_and_go_on_one_rank_while_the_others_go_on(two_ranks, model, backend):
    """3 of 8 rows at once: rank 0 reads prompts again and again, and has nothing to do when rank 1 begins."""
    for rank, stops in zip(two_ranks["uneven"], UNEVEN_STOPS):
        answers = rank[backend]["answers"]
        assert len(answers) == 8
        assert answers == plain_answers(model, answers, replace(SAMPLINGS["several EOS"], stop_token_ids=stops))
