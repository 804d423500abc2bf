"""Plain copies that are lent to all models: filled as often as needed, given back on request, and right."""

import pytest
import torch

from scripts.harness.ranks import run_ranks
from tests.distributed import plain
from tests.distributed.tiny_run import SAMPLING, prompt_tokens
from tests.distributed.work_copies import MODES
from tests.plain_sampling import plain_answer

# Actor and reference take turns in one module, critic and reward model in another. So a whole step fills four times,
# and once less where the actor's weights are still held from a generation before it.
FILLS = {
    "a step": 4,
    "evaluation": 1,
    "evaluation again": 0,
    "after a rest": 0,
    "a step with what is held": 3,
    "the next step": 4,
    "generation": 1,
    "judging": 3,
    "judging again": 4,
}


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    return run_ranks(
        "tests.distributed.work_copies:between_steps", world=2, folder=folder, stage=3, config="stage3.json"
    )


@pytest.fixture(scope="module")
def sizes(folder) -> tuple[int, int]:
    """Bytes of the actor and of the reward model in float32."""
    models = plain.policy(folder), plain.critic(folder)
    return tuple(sum(4 * p.numel() for p in model.parameters()) for model in models)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_filled_how_often(ranks, mode):
    for rank in ranks:
        assert rank[mode]["fills"] == FILLS | {"after a rest": int(mode == "free")}


def test_ranks_agree_on_memory_once_a_fill_and_once_a_model(ranks):
    """The actor's copy, which has just generated, makes its passes; reference, critic and reward model are gathered
    first."""
    assert [rank["keep"]["agreements"] for rank in ranks] == [1 + 3 * 2] * 2


@pytest.mark.parametrize("mode", MODES)
def test_what_stays_after_a_rest(ranks, sizes, mode):
    """A step ends with a rest: where copies are given back, the one that an evaluation made is all there is then."""
    after = {"free": 0, "others freed": sizes[0]}.get(mode, sum(sizes))
    for rank in ranks:
        alone, all_copies = rank[mode]["rest with an actor"], rank[mode]["rest with all"]
        assert alone["before"] == max(after, sizes[0])
        assert all_copies["before"] == sum(sizes)
        for rest in (alone, all_copies):
            assert rest["after"] == after
            assert rest["cache"] == (2 if mode in ("keep", "others freed") else 0)


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_the_same_after_a_rest(ranks, folder, mode):
    model = plain.policy(folder)
    model.load_state_dict({name: tensor.double() for name, tensor in ranks[0][mode]["weights"].items()})
    for rank in ranks:
        first, again, rested = rank[mode]["answers"].values()
        assert first == again == rested
        assert first == {key: plain_answer(model, prompt_tokens(key[0]), *key, SAMPLING) for key in first}


@pytest.mark.parametrize("mode", MODES)
def test_copies_say_what_the_engines_say(ranks, mode):
    for rank in ranks:
        for name, (lent, own) in rank[mode]["own"].items():
            torch.testing.assert_close(lent, own, rtol=0, atol=1e-5, msg=name)


def test_the_four_models_have_moved_apart(ranks):
    """Or it would not show whose weights a copy holds."""
    judged = ranks[0]["free"]["own"]
    assert (judged["logprobs"][0] - judged["ref_logprobs"][0]).abs().max() > 1e-3
    before, after = ranks[0]["keep"]["own"], ranks[0]["host"]["own"]
    assert (before["values"][0].sum() - after["values"][0].sum()).abs() > 1e-3
