"""Environments: what answers a response between its turns. An environment is a user's class, in one of two shapes.

Own. One object a conversation, made from the row of the data that the prompt comes from:

    class Guess:
        def __init__(self, row: dict): ...
        def step(self, turn: Turn): ...      # returns a Reply, a text, None for the end, or what `reply_of` names
        def close(self): ...                 # optional
        tools = [function, ...]              # optional: functions or JSON schemas that the prompt describes

TRL's, the class that its `environment_factory` takes, unchanged. Its public methods are tools that the policy may call:

    class Sums:
        def reset(self, **row): ...          # a text is appended to the last message of the user
        def multiply(self, a: int, b: int) -> int: ...         # with a docstring that describes a and b
        def get_reward(self) -> float: ...   # optional; without it the attribute `reward`, if there is one

The two are told apart by whether the class has `step`. Any method may be a coroutine function; coroutines of one object
run in one event loop, which runs only while one of its methods is waited for. Nothing is tokenised twice: what the
policy drew stays as it is, and what the environment says is put behind it.

Sources: the shape of TRL's environments, their tools, errors and rewards, and the tokens of messages are those of
`GRPOTrainer` (trl/trainer/grpo_trainer.py, `_tool_call_loop` and `_get_tool_suffix_ids`) and of `parse_response`
(trl/chat_template_utils.py), huggingface/trl at f2cd5771. What `step` may return is that of OpenRLHF's agents
(openrlhf/utils/agent.py, OpenRLHF/OpenRLHF at 3c3be623), of Gymnasium's `Env.step` and of OpenEnv's `StepResult`.
"""

import asyncio
import inspect
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.errors import shortened


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment says after a turn.

    text: put behind the turn, encoded alone, without special tokens of the tokenizer's own. tokens: ids that are put
    there as they are. messages: as the chat template writes them behind an answer, with the beginning of the next
    answer. At most one of these three.
    reward: the reward for the turn, which falls on its last token. done: whether the conversation ends here; nothing is
    then put behind the turn.
    """

    text: str = ""
    tokens: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    reward: float = 0.0
    done: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy drew, as an environment's `step` gets it.

    text: the turn without special tokens. tokens: its ids, the end token included. message: the turn as a message of
    the assistant, with `tool_calls` and `reasoning_content` as the response template finds them; without a response
    template its `content` is the text. number: of the turn, from 0. left: how many tokens the response may still get.
    """

    text: str
    tokens: tuple[int, ...]
    message: dict[str, Any]
    number: int
    left: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An environment's reply as ids. unparsed: 1 if the turn's tool call could not be read, else 0."""

    tokens: list[int]
    reward: float = 0.0
    done: bool = False
    unparsed: int = 0


class Episode(Protocol):
    """The conversation of one response. Its methods are called one after another, in any thread, and raise what the
    environment raises.

    opening: the ids of the prompt, if the environment's `reset` said something; None for the ids of the data.
    """

    opening: list[int] | None

    def answer(self, tokens: list[int], number: int, left: int, ended: bool) -> Answer:
        """The environment's answer to a turn. tokens: ids that the policy drew. number: of the turn, from 0. left: how
        many tokens the response may still get. ended: whether the turn ended by itself."""

    def close(self) -> float:
        """End the conversation; to be called once, unless a call of the environment is still running. Returns the
        reward that is given at the end (`get_reward`), for the last turn; 0.0 for environments of the own shape, which
        give rewards with their replies."""


class Environments:
    """Makes the environments of a rank, and speaks to them with the tokenizer.

    Args:
        made: the user's class, or for TRL's shape any function that makes an environment.
        rows: rows[index] is the row of the data that a prompt comes from. If it has `dialogue`, TRL's `reset` gets the
            messages of the prompt as `prompt`, else the text.
        template: the response template (`response_template`), or None.
        opening: (index of a row, what `reset` said) -> the ids of the prompt. Needed for TRL's shape.
        vocabulary: ids of `Reply.tokens` must be smaller.
    """

    def __init__(
        self,
        made: Callable[..., Any],
        tokenizer,
        rows: Sequence[Mapping[str, Any]],
        *,
        template: dict | None = None,
        opening: Callable[[int, str], list[int]] | None = None,
        vocabulary: int | None = None,
    ):
        self.made, self.tokenizer, self.rows, self.template, self.opening = made, tokenizer, rows, template, opening
        self.vocabulary = vocabulary
        self.idle: list[_Tools] = []  # TRL makes an environment once and resets it often
        self.lock = threading.Lock()  # tokenizers in Rust cannot be used in one thread and set up in another

    def episode(self, row_index: int, prompt: list[int]) -> Episode:
        """The conversation of a response to the prompt of this row. Runs the user's code, and raises what it raises."""
        row = self.rows[row_index]
        if is_own(self.made):
            return _Episode(self, _Own(self.made, row), prompt, _template_options(row))
        try:
            tools = self.idle.pop()
        except IndexError:
            tools = _Tools(self.made)
        opening = None
        if said := tools.reset(row):
            assert self.opening is not None, "an environment that says something at first needs `opening`"
            with self.lock:
                opening = self.opening(row_index, said)
        return _Episode(self, tools, prompt, _template_options(row), opening)

    def turn(self, tokens: list[int], before: list[int], number: int, left: int) -> tuple[Turn, int]:
        """(the turn, 1 if its tool call could not be read, else 0). before: the ids before the turn."""
        with self.lock:
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            drawn, prefix = self.tokenizer.decode(tokens), self.tokenizer.decode(before) if self.template else ""
        message, unparsed = {"role": "assistant", "content": text}, 0
        if self.template:
            try:
                message = parsed(drawn, self.template, prefix)
            except (ValueError, TypeError):  # a call that is cut off or broken
                unparsed = 1
        return Turn(text, tuple(tokens), message, number, left), unparsed

    def ids(self, reply: Reply, drawn: list[int], options: dict) -> list[int]:
        """The ids that the reply puts behind the drawn turn. options: arguments of the chat template."""
        if reply.tokens is not None:
            return list(reply.tokens)
        with self.lock:
            if reply.messages:
                return behind(self.tokenizer, drawn, reply.messages, **options)
            return self.tokenizer.encode(reply.text, add_special_tokens=False) if reply.text else []


class _Episode:
    def __init__(self, speech: Environments, environment, prompt: list[int], options: dict, opening=None):
        self.speech, self.environment, self.options, self.opening = speech, environment, options, opening
        self.before = list(prompt if opening is None else opening)
        self.failed = False

    def answer(self, tokens: list[int], number: int, left: int, ended: bool) -> Answer:
        self.failed = True
        turn, unparsed = self.speech.turn(tokens, self.before, number, left)
        reply = checked(reply_of(self.environment.step(turn, ended)), self.speech.vocabulary)
        ids = [] if reply.done else self.speech.ids(reply, tokens, self.options)
        self.before += tokens + ids
        self.failed = False
        return Answer(ids, float(reply.reward), reply.done, unparsed)

    def close(self) -> float:
        reward = self.environment.close()
        if isinstance(self.environment, _Tools) and not self.failed:
            self.speech.idle.append(self.environment)
        return reward


class _Waiting:
    """Waits for coroutines in an event loop of its own."""

    loop: asyncio.AbstractEventLoop | None = None

    def wait(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(result())


class _Own(_Waiting):
    def __init__(self, made: type, row: Mapping[str, Any]):
        self.made = made(dict(row))

    def step(self, turn: Turn, ended: bool) -> Any:
        return self.wait(self.made.step(turn))

    def close(self) -> float:
        if callable(close := getattr(self.made, "close", None)):
            self.wait(close())
        if self.loop:
            self.loop.close()
        return 0.0


class _Tools(_Waiting):
    def __init__(self, made: Callable[[], Any]):
        self.made = made()
        self.tools = tools_of(self.made)

    def reset(self, row: Mapping[str, Any]) -> str | None:
        dialogue = getattr(row, "dialogue", None)
        prompt = {"prompt": dialogue["messages"]} if dialogue else {}
        said = self.wait(self.made.reset(**{**row, **prompt}))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {shortened(said)}; it has to return a text or None")
        return said

    def step(self, turn: Turn, ended: bool) -> Reply:
        calls = turn.message.get("tool_calls") if ended else None
        return Reply(messages=[self.called(call) for call in calls]) if calls else Reply(done=True)

    def called(self, call: dict) -> dict:
        """The message with a tool's result. An error of the tool is told to the policy, as TRL does."""
        function = call.get("function", call)
        name = function["name"]
        try:
            if name not in self.tools:
                raise ValueError(f"Tool {name} not found.")
            result = self.wait(self.tools[name](**function["arguments"]))
        except Exception as error:
            result = {"error": str(error)}
        return {"role": "tool", "name": name, "content": result if isinstance(result, list) else str(result)}

    def close(self) -> float:
        given = getattr(self.made, "get_reward", None)
        reward = self.wait(given()) if callable(given) else getattr(self.made, "reward", 0.0)
        return checked(Reply(reward=_number(reward))).reward


def is_own(made: Callable[..., Any]) -> bool:
    """Whether the class is of the own shape."""
    return callable(getattr(made, "step", None))


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """{name: method} of the tools of an environment of TRL's shape."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    return {name: method for name, method in methods if name not in ("reset", "get_reward") and name[0] != "_"}


def reply_of(said: Any) -> Reply:
    """What `step` returned, as a Reply: a Reply; a text; None for the end; Gymnasium's (observation, reward,
    terminated, truncated, info); a dict or an object with observation or environment_feedback, reward or rewards, and
    done, as OpenRLHF's agents and OpenEnv's StepResult. Raises: TypeError for anything else."""
    if isinstance(said, Reply):
        return said
    if said is None:
        return Reply(done=True)
    if isinstance(said, str):
        return Reply(said)
    if isinstance(said, tuple) and len(said) == 5:
        text, reward, terminated, truncated, _ = said
        return _plain(text, reward, terminated or truncated)

    def field(*names: str) -> Any:
        found = (said.get(n, _MISSING) if isinstance(said, Mapping) else getattr(said, n, _MISSING) for n in names)
        return next((value for value in found if value is not _MISSING), _MISSING)

    found = field("environment_feedback", "observation"), field("rewards", "reward"), field("done")
    if any(value is _MISSING for value in found):
        raise TypeError(
            f"step returned {shortened(said)}. It has to return a Reply, a text, None for the end, Gymnasium's "
            "5-tuple, or a dict or an object with observation, reward and done"
        )
    return _plain(*found)


_MISSING = object()


def _plain(text: Any, reward: Any, done: Any) -> Reply:
    if not isinstance(text, str | None):
        raise TypeError(f"step returned the observation {shortened(text)}; it has to be a text")
    return Reply(text or "", reward=_number(reward), done=bool(done))


def _number(value: Any) -> float:
    """A number, a tensor or an array with one number, or None for 0."""
    return 0.0 if value is None else float(value)


def checked(reply: Reply, vocabulary: int | None = None) -> Reply:
    """The reply. Raises: TypeError or ValueError if it cannot be used, such as ids outside the vocabulary."""
    if not isinstance(reply.text, str):
        raise TypeError(f"Reply.text is {shortened(reply.text)}; it has to be a text")
    if (reply.text != "") + (reply.tokens is not None) + bool(reply.messages) > 1:
        raise ValueError("a Reply has more than one of text, tokens and messages; give one of them")
    for token in reply.tokens if reply.tokens is not None else ():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < (vocabulary or token + 1):
            raise ValueError(f"Reply.tokens has {token!r}; ids are whole numbers from 0 to {(vocabulary or 0) - 1}")
    for message in reply.messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise TypeError(f"Reply.messages has {shortened(message)}; a message is a dict with role and content")
    if not math.isfinite(reply.reward):
        raise ValueError(f"the reward is {reply.reward}; it has to be a finite number")
    return reply


def parsed(text: str, template: dict, prefix: str) -> dict[str, Any]:
    """The drawn text as a message of the assistant. prefix: the text before it. Raises: ValueError or TypeError if it
    has a tool call that cannot be read."""
    from transformers.utils.chat_parsing import parse_response

    message = parse_response(text, template, prefix=prefix)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{shortened(call)} is no tool call")
        if function.setdefault("arguments", {}) is None:
            function["arguments"] = {}
        if not isinstance(function["arguments"], dict):
            raise ValueError(f"{shortened(call)} has no arguments by name")
    return {"role": "assistant", "content": "", **message}


def behind(tokenizer, drawn: list[int], messages: Sequence[Mapping[str, Any]], **options) -> list[int]:
    """The ids of the messages as the chat template writes them behind an answer, with the beginning of the next answer.
    They begin with the token that ends an answer, unless the drawn turn ends with it."""
    asked = {"role": "user", "content": "dummy"}
    answered: dict[str, Any] = {"role": "assistant", "content": "dummy"}
    if messages[0]["role"] == "tool":  # some templates write the name of the call with the result
        function = {"name": messages[0].get("name", "dummy"), "arguments": {}}
        answered |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}

    def ids(*more, **asking) -> list[int]:
        text = tokenizer.apply_chat_template([asked, answered, *more], tokenize=False, **asking, **options)
        return tokenizer.encode(text, add_special_tokens=False)

    before, whole = ids(), ids(*messages, add_generation_prompt=True)
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    end = (
        tokenizer.eos_token_id
        if tokenizer.eos_token_id in before
        else next(filter(special.__contains__, before[::-1]), None)
    )
    if end is None:
        raise ValueError("the chat template ends an answer with no special token; reply with text in place of messages")
    places = [place for place, token in enumerate(whole) if token == end]
    place = places[before.count(end) - 1]
    return whole[place + (drawn[-1:] == [end]) :]


def _template_options(row: Mapping[str, Any]) -> dict:
    """The row's arguments of the chat template (`chat_template_kwargs`)."""
    given = row.get("chat_template_kwargs")
    return (json.loads(given) if isinstance(given, str) else given) or {}
