"""Conversations are those of plain sampling, turn for turn; what bad environments do to their rows alone; limits."""

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from engine.errors import RunStopped
from engine.models.loading import load_policy
from engine.rollout import Conversations, Environments, ReplicaRollouts, Reply, RolloutBackend, Turn, VLLMRollouts
from engine.rollout.base import SamplingConfig
from engine.rollout.cache import SlotCache
from scripts.harness.models import EOS, PAD, make_causal_lm, make_tokenizer
from tests import fake_vllm
from tests.engine.rollout.test_decode import BATCH, INDICES, PROMPTS, answers
from tests.plain_sampling import plain_answer
from training.data.examples import collate_prompts

ENDS = (EOS, *range(5, 64, 6))
SAMPLING = SamplingConfig(
    max_new_tokens=24, pad_token_id=PAD, stop_token_ids=ENDS, seed=5, logprob_temperature=1.0, with_entropy=True
)
ROWS = [{"prompt": f"row {number}"} for number in range(40)]


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> SimpleNamespace:
    policy = load_policy(make_causal_lm(tmp_path_factory.mktemp("llama"), "llama"), torch.float32).eval()
    return SimpleNamespace(module=policy, stage=0, version=0, role="actor")


def said(index: int, number: int, turn: list[int]) -> list[int]:
    """What is inserted: 1 to 3 tokens that depend on row, turn and the turn's last token."""
    return [4 + (7 * index + 3 * number + turn[-1] + place) % 60 for place in range(1 + (index + number) % 3)]


class Talk:
    """Inserts `said`; the third turn of a row, or of some rows the second, is the last. Rewards are 1, 2, 3."""

    def __init__(self, row: dict):
        self.index = int(row["prompt"].split()[1])

    def step(self, turn: Turn) -> Reply:
        inserted = said(self.index, turn.number, list(turn.tokens))
        return Reply(tokens=inserted, reward=turn.number + 1.0, done=turn.number + 1 >= 2 + self.index % 2)


def conversations_of(backend: RolloutBackend, made: Callable = Talk, **how) -> Conversations:
    limits = {"turns": 8, "turn_tokens": None, "seconds": 60.0, "threads": 4} | how
    return Conversations(backend, Environments(made, make_tokenizer(), ROWS, []), **limits)


def ours(actor: SimpleNamespace, made: Callable = Talk, rows_at_once: int | None = None, **how) -> Conversations:
    return conversations_of(ReplicaRollouts(actor, make_tokenizer(), rows_at_once), made, **how)


def plain_talk(model, prompt: list[int], index: int, sample: int, how: SamplingConfig):
    """(tokens, which of them are drawn, rewards, whether it ended by itself), by plain sampling."""
    tokens, drawn, rewards = [], [], {}
    for number in range(8):
        left = replace(how, max_new_tokens=how.max_new_tokens - len(tokens))
        turn, ended = plain_answer(model, prompt + tokens, index, sample + number * 2**32, left)
        tokens, drawn = tokens + turn, drawn + [True] * len(turn)
        rewards[len(tokens) - 1] = number + 1.0
        if not ended or number + 1 >= 2 + index % 2:
            break
        inserted = said(index, number, turn)
        if len(tokens) + len(inserted) >= how.max_new_tokens:
            ended = False
            break
        tokens, drawn = tokens + inserted, drawn + [False] * len(inserted)
    return tokens, drawn, [rewards.get(place, 0.0) for place in range(len(tokens))], ended


@pytest.fixture(scope="module")
def expected(actor) -> dict:
    """{(index, sample): plain sampling's conversation}."""
    return {
        (index, sample): plain_talk(actor.module.model, prompt, index, sample, SAMPLING)
        for prompt, index in zip(PROMPTS, INDICES)
        for sample in (0, 1)
    }


def talks(rollout) -> dict:
    return {
        (int(rollout.indices[row]), int(rollout.samples[row])): (
            rollout.responses[row][mask].tolist(),
            rollout.action_mask[row][mask].tolist(),
            rollout.turn_rewards[row][mask].tolist(),
            bool(rollout.ended[row]),
        )
        for row, mask in enumerate(rollout.response_mask)
    }


def test_the_cases_are_hard_enough(expected):
    turns = [sum(reward > 0 for reward in rewards) for _, _, rewards, _ in expected.values()]
    assert set(turns) == {1, 2, 3} and {ended for *_, ended in expected.values()} == {True, False}


@pytest.mark.parametrize("rows_at_once", [None, 5])
def test_conversations_are_those_of_plain_sampling(actor, expected, rows_at_once):
    assert talks(ours(actor, rows_at_once=rows_at_once).generate(BATCH.repeat(2), SAMPLING)) == expected


def test_a_row_does_not_depend_on_the_others(actor, expected):
    rollouts = ours(actor)
    for rows in ([3], [7, 1, 10]):
        for key, talk in talks(rollouts.generate(BATCH.select(rows), SAMPLING)).items():
            assert talk == expected[key]


def test_by_vllm_they_are_the_same(actor, expected, monkeypatch):
    fake_vllm.install(monkeypatch)
    backend = VLLMRollouts(actor, make_tokenizer(), rows_at_once=5, row_length=33, cache_bytes=1 << 20)
    assert talks(conversations_of(backend).generate(BATCH.repeat(2), SAMPLING)) == expected


def test_log_probs_of_drawn_tokens_are_those_of_one_pass_by_transformers(actor):
    exact = SimpleNamespace(module=copy.deepcopy(actor.module).double(), stage=0, version=0, role="actor")
    rollout = ours(exact).generate(BATCH, SAMPLING)
    model, compared = exact.module.model, 0
    for row, mask in enumerate(rollout.response_mask):
        prompt, response = PROMPTS[row], rollout.responses[row][mask]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        drawn = rollout.action_mask[row][mask]
        compared += drawn.sum()
        for found, wanted in (
            (rollout.logprobs, logprobs.gather(-1, response[:, None])[:, 0]),
            (rollout.entropy, -(logprobs.exp() * logprobs).sum(-1)),
        ):
            wanted = torch.where(drawn, wanted, 0.0)
            torch.testing.assert_close(found[row][mask].double(), wanted, rtol=0, atol=1e-6)
    assert compared > 100


def test_one_turn_is_the_other_backends(actor):
    class Done:
        def __init__(self, row): ...

        def step(self, turn):
            return None

    backend = ReplicaRollouts(actor, make_tokenizer())
    expected, found = backend.generate(BATCH, SAMPLING), ours(actor, Done).generate(BATCH, SAMPLING)
    for column in fields(expected):
        if getattr(expected, column.name) is not None:
            assert torch.equal(getattr(found, column.name), getattr(expected, column.name)), column.name
    assert torch.equal(found.action_mask, expected.response_mask) and not found.turn_rewards.any()


# What environments of some rows do in their second turn.


def raising(error: BaseException) -> Callable:
    def act(turn: Turn):
        raise error

    return act


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


BAD = {
    "says what cannot be printed": (
        raising(ValueError("half a character: \ud800")),
        "ValueError: half a character: \\ud800 (",
    ),
    "raises an error without a text": (raising(Mute()), "Mute: (without a text) ("),
    "raises": (raising(ZeroDivisionError("by nought")), "ZeroDivisionError: by nought ("),
    "exits": (raising(SystemExit(3)), "SystemExit: 3 ("),
    "is interrupted": (raising(KeyboardInterrupt()), "KeyboardInterrupt:  ("),
    "hangs": (lambda turn: time.sleep(600), "Late: no answer within 0.5 s"),
    "says nothing": (lambda turn: "", "ValueError: answered with nothing"),
    "says another thing": (lambda turn: 7, "TypeError: step returned 7"),
    "says an id too high": (lambda turn: Reply(tokens=[64]), "ValueError: Reply.tokens has 64"),
    "is worth more than 32 bits": (lambda turn: Reply("w05", reward=1e39), "ValueError: the reward is 1e+39"),
    "is worth no number": (lambda turn: Reply("w05", reward=float("nan")), "ValueError: the reward is nan"),
    "says too much": (lambda turn: "w05 " * 1_000_000, ""),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_environment_ends_its_row_alone(actor, expected, name, capsys):
    act, message = BAD[name]

    class Bad(Talk):
        def step(self, turn: Turn):
            return act(turn) if self.index in INDICES[:2] and turn.number == 1 else super().step(turn)

    late = {"seconds": 0.5} if name == "hangs" else {}
    rollouts = ours(actor, Bad, threads=1, **late)
    found = talks(rollouts.generate(BATCH, SAMPLING))
    counts = rollouts.counts()
    for key, talk in found.items():
        if key[0] not in INDICES[:2]:
            assert talk == expected[key]
            continue
        tokens, drawn, rewards, _ = expected[key]
        second = [place for place, reward in enumerate(rewards) if reward == 2.0]
        end = second[0] + 1
        given = [reward if reward == 1.0 else 0.0 for reward in rewards[:end]]
        assert talk == (tokens[:end], drawn[:end], given, False)
    assert counts["environment_errors"] == (2 if message else 0)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if f"turn 2: {message}" in line]
    assert len(lines) == len(printed.splitlines()) == (2 if message else 0)
    assert all(line.startswith(f"--environment: row {index} (") for line, index in zip(lines, INDICES))


def test_the_line_of_an_error_is_the_users_and_the_first_few_are_told(actor, capsys):
    class Raises(Talk):
        def step(self, turn):
            return [][turn.number]

    rollouts = ours(actor, Raises)
    for _ in range(2):
        rollouts.generate(BATCH, SAMPLING)
        assert rollouts.counts()["environment_errors"] == len(BATCH) and not any(rollouts.counts().values())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "further errors are only counted" in lines[4]
    assert "turn 1: IndexError: list index out of range (" in lines[0]
    assert f"{__file__}, line " in lines[0] and ": return [][turn.number]); the row ends here" in lines[0]


def test_end_tokens_that_are_inserted_end_nothing(actor):
    class Ends(Talk):
        def step(self, turn):
            return "w07 </s> w08" if turn.number == 0 else None

    rollout = ours(actor, Ends).generate(BATCH, SAMPLING)
    both = rollout.ended & (rollout.action_mask.sum(-1) < rollout.response_mask.sum(-1))
    assert both.sum() > 6
    for row in both.nonzero()[:, 0]:
        inserted = rollout.responses[row][rollout.response_mask[row] & ~rollout.action_mask[row]]
        assert inserted.tolist() == [7, EOS, 8]


def test_an_environment_may_change_the_default_dtype(actor, expected):
    class Changes(Talk):
        def step(self, turn):
            torch.set_default_dtype(torch.float64)
            return super().step(turn)

    try:
        assert talks(ours(actor, Changes).generate(BATCH.repeat(2), SAMPLING)) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["make", "close"])
def test_an_environment_that_fails_at_the_beginning_or_the_end(actor, expected, name, capsys):
    class Bad(Talk):
        def __init__(self, row):
            super().__init__(row)
            self.bad = self.index == INDICES[1]
            assert name != "make" or not self.bad

        def close(self):
            assert name != "close" or not self.bad

    rollouts = ours(actor, Bad)
    found = talks(rollouts.generate(BATCH, SAMPLING))
    for key, talk in found.items():
        tokens, drawn, rewards, ended = expected[key]
        if key[0] == INDICES[1]:
            end = len(tokens) if name == "close" else rewards.index(1.0) + 1
            rewards, ended = [reward * (name == "close") for reward in rewards], False
            tokens, drawn, rewards = tokens[:end], drawn[:end], rewards[:end]
        assert talk == (tokens, drawn, rewards, ended)
    assert rollouts.counts()["environment_errors"] == 1
    assert ("its beginning" if name == "make" else "its end") in capsys.readouterr().out


def test_rewards_at_the_end_and_a_prompt_of_the_environments_own(actor):
    """As TRL's classes have them."""

    class Tools:
        def reset(self, **row):
            return "w09 w10"

        def get_reward(self):
            return 0.25

    environments = Environments(Tools, make_tokenizer(), ROWS, [], opening=lambda index, said: [11, 12, index, 9, 10])
    limits = {"turns": 3, "turn_tokens": None, "seconds": 60.0, "threads": 4}
    rollouts = Conversations(ReplicaRollouts(actor, make_tokenizer()), environments, **limits)
    rollout = rollouts.generate(BATCH.select([2, 4]), SAMPLING)
    for row, index in enumerate((INDICES[2], INDICES[4])):
        assert rollout.prompts[row].tolist() == [11, 12, index, 9, 10]
        tokens, ended = plain_answer(actor.module.model, [11, 12, index, 9, 10], index, 0, SAMPLING)
        mask = rollout.response_mask[row]
        assert (rollout.responses[row][mask].tolist(), bool(rollout.ended[row])) == (tokens, ended)
        assert rollout.turn_rewards[row][mask].tolist() == [0.0] * (len(tokens) - 1) + [0.25]
    assert rollout.attention_mask[:, :5].all()


class Counted(Talk):
    made: ClassVar[list["Counted"]] = []

    def __init__(self, row):
        super().__init__(row)
        self.closed = 0
        self.made.append(self)

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("stopped", [False, True])
def test_environments_are_closed_once(actor, stopped, monkeypatch):
    monkeypatch.setattr(Counted, "made", [])

    class Stops(Counted):
        def step(self, turn):
            if stopped and self.index == INDICES[5]:
                raise RunStopped("the sandboxes are gone")
            return super().step(turn)

    rollouts = ours(actor, Stops)
    if stopped:
        with pytest.raises(RunStopped, match="sandboxes"):
            rollouts.generate(BATCH, SAMPLING)
    else:
        rollouts.generate(BATCH, SAMPLING)
    assert [one.closed for one in Counted.made] == [1] * len(BATCH)


def test_what_comes_late_is_ignored_and_its_environment_closed(actor, monkeypatch):
    monkeypatch.setattr(Counted, "made", [])
    goes_on, closed = threading.Event(), threading.Event()

    class Slow(Counted):
        def step(self, turn):
            if self.index == INDICES[0]:
                goes_on.wait(60)
                return Reply("w05", reward=100.0)
            return super().step(turn)

        def close(self):
            super().close()
            if self.index == INDICES[0]:
                closed.set()

    rollouts = ours(actor, Slow, threads=1, seconds=0.3)
    rollout = rollouts.generate(BATCH, SAMPLING)
    assert not Counted.made[0].closed and rollout.turn_rewards.max() <= 3.0 and not rollout.ended[0]
    goes_on.set()
    assert closed.wait(60) and [one.closed for one in Counted.made] == [1] * len(BATCH)
    assert rollout.turn_rewards[0].sum() == 0.0


HANGS = """
import threading
from engine.rollout.conversations import Late, side_by_side
late, good = side_by_side([threading.Event().wait, lambda: 5], 0.2, 1)
print(isinstance(late, Late), good)
"""


def test_the_process_ends_while_an_environment_hangs():
    """The threads of concurrent.futures are joined as Python ends."""
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "True 5\n"


def test_limits_of_turns_and_of_a_turn(actor, expected):
    rollouts = ours(actor, turns=1)
    rollout = rollouts.generate(BATCH, SAMPLING)
    ended_turns = sum(
        ended or max(rewards) > 1.0 or len(tokens) < 24
        for (_, sample), (tokens, _, rewards, ended) in expected.items()
        if sample == 0
    )
    assert not rollout.ended.any() and rollouts.counts()["turn_limit"] == ended_turns
    rollouts = ours(actor, turn_tokens=3)
    rollout = rollouts.generate(BATCH, SAMPLING)
    counts = rollouts.counts()
    for key, (tokens, drawn, rewards, ended) in talks(rollout).items():
        first = expected[key][2].index(1.0) + 1
        assert rewards.index(1.0) == min(first, 3) - 1
        if first > 3:
            assert tokens == expected[key][0][:3] and drawn == [True] * 3 and not ended
    assert counts["token_limit"] == (~rollout.ended).sum() > 3 and counts["turns"] == (rollout.turn_rewards > 0).sum()
    assert counts["responses"] == len(BATCH) and counts["inserted_tokens"] == (
        rollout.response_mask.sum() - rollout.action_mask.sum()
    )


def test_a_users_backend_need_not_know_limits_of_rows(actor):
    class Users(RolloutBackend):
        """Goes by the settings alone, and records nothing."""

        own = ReplicaRollouts(actor, make_tokenizer())

        def generate(self, prompts, sampling):
            drawn = self.own.generate(replace(prompts, most=None), sampling)
            return replace(drawn, logprobs=None, entropy=None)

    for limits in ({}, {"turn_tokens": 3}):
        found = conversations_of(Users(), **limits).generate(BATCH, SAMPLING)
        assert talks(found) == talks(ours(actor, **limits).generate(BATCH, SAMPLING))
        assert found.logprobs is None and found.entropy is None


@pytest.mark.parametrize("rows_at_once", [None, 3])
def test_rows_have_limits_of_their_own(actor, rows_at_once, monkeypatch):
    """The longest prompt and the longest response are of different rows: the rows move to the left on the way."""
    prompts, limits = [*PROMPTS, [*range(4, 34)]], [1, 20, 3, 9, 8, 50, 2, 20, 1, 16, 5, 7, 3]
    indices, how = [*INDICES, 50], replace(SAMPLING, stop_token_ids=(), max_new_tokens=50)
    batch = collate_prompts(prompts, torch.tensor(indices), torch.zeros(len(prompts), dtype=torch.int64), PAD)
    batch = replace(batch, most=torch.tensor(limits))
    moves, shift = [], SlotCache.shift
    monkeypatch.setattr(SlotCache, "shift", lambda *args, **by: (moves.append(by), shift(*args, **by)))
    expected = [
        plain_answer(actor.module.model, prompt, index, 0, replace(how, max_new_tokens=most))
        for prompt, index, most in zip(prompts, indices, limits)
    ]
    assert answers(ReplicaRollouts(actor, make_tokenizer(), rows_at_once).generate(batch, how)) == expected
    assert moves or rows_at_once  # further slots are kept where prompts wait
    fake_vllm.install(monkeypatch)
    longest = max(len(prompt) + most for prompt, most in zip(prompts, limits))
    rows = {"rows_at_once": rows_at_once or 13, "row_length": longest, "cache_bytes": 1 << 20}
    assert answers(VLLMRollouts(actor, make_tokenizer(), **rows).generate(batch, how)) == expected
