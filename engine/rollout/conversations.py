"""Conversations: responses of several turns, between which an environment inserts tokens. Any other backend draws the
turns.

    rollouts = Conversations(rollouts, environments, turns=8, turn_tokens=None, seconds=60.0, threads=32)

All open conversations of a rank draw their next turn together. Then their environments answer side by side in threads,
and the tokens that they insert are joined to those that were drawn: nothing is tokenised again. All ranks draw equally
many turns. Keys and values are not kept from turn to turn: before each turn a conversation is read again from its
beginning, unless the wrapped backend has a cache for that, as vLLM has.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from engine import distributed
from engine.errors import RunStopped, shortened
from engine.experience import PromptBatch, Rollout
from engine.reward.base import described
from engine.rollout.base import RolloutBackend, SamplingConfig
from engine.rollout.environments import Environments
from engine.rollout.request import copied
from engine.trace import moved

T = TypeVar("T")

TURN = 1 << 32  # turn n is drawn with the random numbers of sample number + n * TURN
TOLD = 5  # the number of errors of environments that each rank prints
COUNTED = (
    *("responses", "turns", "inserted_tokens", "turn_limit", "token_limit"),
    *("environment_errors", "unparsed_calls", "environment_seconds"),
)


@dataclass(slots=True)
class _Conversation:
    """A response so far.

    row: the row of the data. left: how many tokens the response may still get. columns: what is known of each token,
    {field of Rollout: values}. begin: where the latest turn begins. ended: as in Rollout. over: whether no further turn
    is drawn. failed: whether its environment did something wrong.
    """

    row: int
    prompt: list[int]
    left: int
    tokens: list[int] = field(default_factory=list)
    columns: dict[str, list] = field(default_factory=dict)
    episode: Any = None  # an Episode, once it is made
    begin: int = 0
    ended: bool = False
    over: bool = False
    failed: bool = False

    def add(self, tokens: list[int], drawn: bool, **recorded: list[float]) -> None:
        """Append tokens. recorded: what the sampler recorded of drawn ones."""
        columns: dict[str, list] = {"action_mask": [drawn] * len(tokens), **recorded}
        for name in {"turn_rewards", *columns, *self.columns}:
            self.columns.setdefault(name, []).extend(columns.get(name, [0.0] * len(tokens)))
        self.tokens += tokens
        self.left -= len(tokens)

    def add_reward(self, reward: float) -> None:
        """Add a reward to the last token, which is one that was drawn."""
        self.columns["turn_rewards"][-1] += reward


class Conversations(RolloutBackend):
    """Draws conversations turn by turn.

    Args:
        backend: draws the turns.
        environments: makes the episodes; their methods run in threads of this process.
        turns: the largest number of turns of a conversation.
        turn_tokens: the largest number of tokens of a turn; None if only the whole response is limited
            (`SamplingConfig.max_new_tokens`). A turn that does not end by itself is the last one.
        seconds: how long an environment may take to begin, to answer and to end.
        threads: the number of environments that are waited for at the same time.

    The inserted tokens count in `max_new_tokens`. An answer that leaves no room for a further token ends the
    conversation, and nothing of it is inserted. An environment that raises an exception, is late or answers with
    something that cannot be inserted ends its conversation, and the run goes on; only RunStopped ends the run.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        environments: Environments,
        *,
        turns: int,
        turn_tokens: int | None,
        seconds: float,
        threads: int,
    ):
        self.backend, self.environments = backend, environments
        self.turns, self.turn_tokens, self.seconds, self.threads = turns, turn_tokens, seconds, threads
        self.why, self.computes_as_actor = backend.why, backend.computes_as_actor
        self._counted: dict[str, float] = dict.fromkeys(COUNTED, 0.0)
        self._told, self._dtype = 0, torch.get_default_dtype()

    @property
    def decoding_ran(self) -> str:  # type: ignore[override]
        """That of the wrapped backend."""
        return self.backend.decoding_ran

    @property
    def fallback(self) -> str | None:  # type: ignore[override]
        """That of the wrapped backend."""
        return self.backend.fallback

    def release_memory(self) -> None:
        """Free the wrapped backend's memory."""
        self.backend.release_memory()

    def counts(self) -> dict[str, float]:
        """The sums named in COUNTED, over this rank's calls of `generate` since the last call of this method."""
        counted, self._counted = self._counted, dict.fromkeys(COUNTED, 0.0)
        return self.backend.counts() | counted

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig) -> Rollout:
        """One conversation for each row of the prompts (all ranks call this together)."""
        conversations = _begun(prompts, sampling)
        try:
            self._open(conversations)
            for turn in range(self.turns):
                living = [row for row, one in enumerate(conversations) if turn == 0 or not one.over]
                if not distributed.any_rank(bool(living)):
                    break
                asked = self._next_turns(prompts, conversations, living, turn, sampling.pad_token_id)
                drawn = self.backend.generate(asked, sampling)
                if living:
                    self._take(copied(drawn, "cpu"), [conversations[row] for row in living])
                    self._answer([conversations[row] for row in living if conversations[row].episode], turn)
        except BaseException:  # the run ends
            side_by_side([one.episode.close for one in conversations if one.episode], self.seconds, len(prompts))
            raise
        self._close(conversations)
        self._counted["responses"] += len(conversations)
        return _rollout(prompts, conversations, sampling.pad_token_id)

    def _open(self, conversations: Sequence[_Conversation]) -> None:
        """Make the episodes. Without an episode, a conversation has one turn."""
        calls = [partial(self.environments.episode, one.row, one.prompt) for one in conversations]
        for one, made in zip(conversations, self._side_by_side(conversations, calls), strict=True):
            if isinstance(made, BaseException):
                self._fail(one, made, "its beginning")
                continue
            one.episode = made
            if made.opening is not None:
                one.prompt = made.opening

    def _next_turns(
        self,
        prompts: PromptBatch,
        conversations: Sequence[_Conversation],
        living: Sequence[int],
        turn: int,
        pad_token_id: int,
    ) -> PromptBatch:
        """What the wrapped backend is asked for: a turn of each living conversation."""
        chosen = [conversations[row] for row in living]
        texts = [one.prompt + one.tokens for one in chosen]
        most = [self._most(one) for one in chosen]
        if not living:  # the other ranks wait for this one's passes: one token, which nobody looks at
            living, texts, most = [0], [conversations[0].prompt[-1:]], [1]
        device = prompts.input_ids.device
        return PromptBatch(
            *_padded(texts, pad_token_id, "left", device),
            prompts.indices[living],
            prompts.samples[living] + turn * TURN,
            torch.tensor(most, device=device),
            prompts.first_row,
        )

    def _most(self, one: _Conversation) -> int:
        """The largest number of tokens of the conversation's next turn."""
        return one.left if self.turn_tokens is None else min(one.left, self.turn_tokens)

    def _take(self, drawn: Rollout, asked: Sequence[_Conversation]) -> None:
        """Append the turns that were drawn."""
        columns = {name: getattr(drawn, name) for name in ("logprobs", "entropy") if getattr(drawn, name) is not None}
        lengths = drawn.response_mask.sum(-1).tolist()
        for row, (one, length, ended) in enumerate(zip(asked, lengths, drawn.ended.tolist(), strict=True)):
            most = min(length, self._most(one))  # a user's own backend may not know limits of rows
            ended = ended and most == length
            recorded = {name: column[row, :most].tolist() for name, column in columns.items()}
            one.begin = len(one.tokens)
            one.add(drawn.responses[row, :most].tolist(), True, **recorded)
            one.ended = ended and not one.failed
            one.over = not one.ended
            self._counted["token_limit"] += not ended
        self._counted["turns"] += len(asked)

    def _answer(self, asked: Sequence[_Conversation], turn: int) -> None:
        """Have the environments answer, and insert what they say."""
        calls = [partial(one.episode.answer, one.tokens[one.begin :], turn, one.left, one.ended) for one in asked]
        for one, answered in zip(asked, self._side_by_side(asked, calls), strict=True):
            if isinstance(answered, BaseException):
                self._fail(one, answered, f"turn {turn + 1}")
                continue
            one.add_reward(answered.reward)
            self._counted["unparsed_calls"] += answered.unparsed
            if one.over or answered.done:
                one.over = True
            elif turn + 1 == self.turns:
                self._limited(one, "turn_limit")
            elif not answered.tokens:
                empty = ValueError("answered with nothing; None or a Reply with done=True ends a conversation")
                self._fail(one, empty, f"turn {turn + 1}")
            elif len(answered.tokens) >= one.left:
                self._limited(one, "token_limit")
            else:
                one.add(answered.tokens, False)
                self._counted["inserted_tokens"] += len(answered.tokens)

    def _close(self, conversations: Sequence[_Conversation]) -> None:
        """Close the episodes, and add the rewards that they give at the end."""
        left = [one for one in conversations if one.episode]
        calls = [one.episode.close for one in left]
        for one, reward in zip(left, self._side_by_side(left, calls), strict=True):
            if not isinstance(reward, BaseException):
                one.add_reward(reward)
            elif not one.failed:
                self._fail(one, reward, "its end")

    def _side_by_side(
        self, conversations: Sequence[_Conversation], calls: Sequence[Callable[[], T]]
    ) -> list[T | BaseException]:
        """What `side_by_side` returns, for a call of each conversation. Raises: RunStopped if an environment does."""
        began = time.monotonic()
        outcomes = side_by_side(calls, self.seconds, self.threads)
        torch.set_default_dtype(self._dtype)  # an environment may have changed the default of the whole process
        self._counted["environment_seconds"] += time.monotonic() - began
        for one, outcome in zip(conversations, outcomes, strict=True):
            if isinstance(outcome, RunStopped):
                raise outcome
            if isinstance(outcome, Late):
                threading.Thread(target=_close_late, args=(outcome.future, one.episode), daemon=True).start()
                one.episode = None
        return outcomes

    def _limited(self, one: _Conversation, limit: str) -> None:
        one.over, one.ended = True, False
        self._counted[limit] += 1

    def _fail(self, one: _Conversation, problem: BaseException, when: str) -> None:
        """End a conversation because of its environment."""
        one.failed = True
        self._limited(one, "environment_errors")
        self._told += 1
        if self._told <= TOLD:
            prompt = shortened(self.environments.tokenizer.decode(one.prompt, skip_special_tokens=True), 60)
            last = "; further errors are only counted" if self._told == TOLD else ""
            what = described(problem)
            print(f"--environment: row {one.row} ({prompt}), {when}: {what}; the row ends here{last}", flush=True)


class Late(TimeoutError):
    """A call was not waited for any longer. future: of the call."""

    def __init__(self, seconds: float, future: Future):
        super().__init__(f"no answer within {seconds:g} s")
        self.future = future


def side_by_side(calls: Sequence[Callable[[], T]], seconds: float, threads: int) -> list[T | BaseException]:
    """What each call returns or raises, or `Late` if it takes more than `seconds`. A late call keeps its thread, but it
    does not count among the `threads` that run at the same time.

    Each call has a daemon thread of its own: at its end the process does not wait for calls that hang, as it would for
    the threads of an executor.
    """
    futures: list[Future] = [Future() for _ in calls]
    outcomes: dict[Future, Any] = {}
    waiting = deque(zip(futures, calls, strict=True))
    running: dict[Future, float] = {}  # {call: when it is late}; the call that was started first comes first
    while waiting or running:
        moved("environments answer")
        while waiting and len(running) < threads:
            future, call = waiting.popleft()
            running[future] = time.monotonic() + seconds
            threading.Thread(target=_run, args=(call, future), name="environment", daemon=True).start()
        oldest, until = next(iter(running.items()))
        done = wait(running, max(0.0, until - time.monotonic()), FIRST_COMPLETED).done
        for future in done or [oldest]:
            error = future.exception() if done else Late(seconds, oldest)
            outcomes[future] = future.result() if error is None else error
            del running[future]
    return [outcomes[future] for future in futures]


def _run(call: Callable[[], Any], future: Future) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # the user's code may raise anything, also SystemExit
        future.set_exception(error)


def _close_late(future: Future, episode: Any) -> None:
    """Close the episode of a call that is late, once the call has ended. An episode that is made late is the call's
    result."""
    wait([future])
    with contextlib.suppress(BaseException):  # nobody waits for it
        (episode or future.result()).close()


def _begun(prompts: PromptBatch, sampling: SamplingConfig) -> list[_Conversation]:
    """A conversation for each row of the prompts."""
    columns = zip(prompts.input_ids.cpu(), prompts.attention_mask.cpu().bool(), prompts.indices.tolist(), strict=True)
    return [
        _Conversation(prompts.first_row + index, ids[mask].tolist(), left=sampling.max_new_tokens)
        for ids, mask, index in columns
    ]


def _rollout(prompts: PromptBatch, conversations: Sequence[_Conversation], pad_token_id: int) -> Rollout:
    """The rollout of finished conversations, one for each row of the prompts."""
    device = prompts.input_ids.device
    ids, mask = _padded([one.prompt for one in conversations], pad_token_id, "left", device)
    responses, response_mask = _padded([one.tokens for one in conversations], pad_token_id, "right", device)
    columns = {
        name: pad_sequence([torch.tensor(one.columns[name]) for one in conversations], batch_first=True).to(device)
        for name in conversations[0].columns
    }
    return Rollout(
        sequences=torch.cat([ids, responses], 1),
        attention_mask=torch.cat([mask, response_mask], 1),
        response_mask=response_mask.bool(),
        ended=torch.tensor([one.ended for one in conversations], device=device),
        indices=prompts.indices,
        samples=prompts.samples,
        **columns,
    )


def _padded(texts: Sequence[list[int]], pad_token_id: int, side: str, device) -> tuple[Tensor, Tensor]:
    """Texts as (ids, mask), each (B, length of the longest) int64. side: "left" or "right", that of the padding."""
    rows = [torch.tensor(text, device=device) for text in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side=side)
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=side)
