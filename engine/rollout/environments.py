"""Environments: what answers a response between its turns. docs/environments.md describes the two shapes of a user's
class: an own one, with `step`, and the one that TRL's `environment_factory` takes.

Any method may be a coroutine function; coroutines of one object run in one event loop, which runs only while one of its
methods is waited for. Nothing is tokenised twice: what the policy drew stays as it is, and what the environment says is
put behind it.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import takewhile
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from transformers.utils import get_json_schema
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import ResponseTemplate, load_response_template

from engine.errors import UserError, shortened
from engine.models.config_and_tokenizer import vocabulary_size
from engine.reward.base import described


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


class Environments:
    """Makes the environments of a rank's conversations.

    Args:
        made: the user's class, or for TRL's shape any function that makes an environment.
        rows: rows[index] is the row of the data that a prompt comes from.
        schemas: of its tools, from `tool_schemas`.
        dialogues: dialogues[index] is the row's dialogue, {"messages": ...}, or None if its prompt is a text. TRL's
            `reset` gets the messages as `prompt`. Without `dialogues` all prompts are texts.
        template: what finds tool calls, from `response_template`, or None.
        opening: (index of a row, what `reset` said) -> the ids of the prompt. Needed for TRL's shape.
    """

    def __init__(
        self,
        made: Callable[..., Any],
        tokenizer,
        rows: Sequence[Mapping[str, Any]],
        schemas: Sequence[dict[str, Any]],
        dialogues: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        template: ResponseTemplate | None = None,
        opening: Callable[[int, str], list[int]] | None = None,
    ):
        self.made, self.tokenizer, self.rows, self.dialogues = made, tokenizer, rows, dialogues
        self.template, self.opening, self.schemas = template, opening, list(schemas)
        self.vocabulary = vocabulary_size(tokenizer)
        self.lock = threading.Lock()  # a tokenizer must not be set up in one thread while another one uses it
        self.idle: list[_Object] = []  # as in TRL an environment is made once and reset often

    def episode(self, row_index: int, prompt: list[int]) -> "Episode":
        """The conversation of a response to the prompt of this row. Runs the user's code, and raises what it raises."""
        row = dict(self.rows[row_index])
        if is_own(self.made):
            return _OwnEpisode(self, _Object(self.made(row)), row, prompt)
        try:
            environment = self.idle.pop()
        except IndexError:
            environment = _Object(self.made())
        dialogue = self.dialogues[row_index] if self.dialogues is not None else None
        said = environment.call("reset", **(row | {"prompt": dialogue["messages"]} if dialogue else row))
        if said is not None and not isinstance(said, str):
            raise TypeError(f"reset returned {shortened(said)}; it has to return a text or None")
        opening = None
        if said:
            assert self.opening is not None, "an environment that says something at first needs `opening`"
            with self.lock:
                opening = self.opening(row_index, said)
        return _ToolEpisode(self, environment, row, prompt, opening)

    def check(self, name: str, alone: bool = True) -> None:
        """Try the environment with the first row.

        name: of the flag with its value, for messages. alone: whether nothing else gives rewards. Raises: UserError if
        the class fails with this row, if it is alone and gives no reward, or if tool calls cannot be read or answered.
        """
        try:
            episode = self.episode(0, [])
            episode.close()
        except Exception as error:
            raise UserError(
                f"{name}: the class fails with the first row of the data (columns: {', '.join(self.rows[0])}): "
                f"{described(error)}"
            ) from None
        own = is_own(self.made)
        if own:
            check_own(episode.environment.made, name)
        rewarded = own or any(hasattr(episode.environment.made, reward) for reward in ("get_reward", "reward"))
        if alone and not rewarded:
            raise UserError(
                f"{name}: it has no method get_reward(self) and no attribute reward, and nothing else gives rewards. "
                "Add one, or give a --reward_function or a reward model."
            )
        model = getattr(self.tokenizer, "name_or_path", None) or "the model"
        if self.schemas and self.template is None:
            raise UserError(
                f"{name}: it has tools, and the tokenizer of {model} has no response_template, which says how tool "
                f"calls are written. Give --response_template {', '.join(known_templates())} or a JSON file."
            )
        if own or not self.schemas:
            return
        result = "the-result"
        try:
            written = self.tokenizer.decode(behind(self.tokenizer, [], [tool_message("the-tool", result)]))
        except Exception as error:  # a template may raise anything
            written = str(error)
        if result not in written:
            raise UserError(
                f"{name}: it has tools, and the chat template of {model} does not write what a tool returns (messages "
                f"of the role tool): {shortened(written)}. Give --chat_template FILE that does."
            )
        call = _written_call(self.tokenizer, self.schemas[0])
        try:
            found = call is None or parsed(call[1], self.template, call[0], self.schemas).get("tool_calls")
        except (ValueError, TypeError):
            found = None
        if not found:
            assert call is not None
            raise UserError(
                f"{name}: the response template finds no tool call in what the chat template of {model} writes for "
                f"one: {shortened(call[1])}. Give --response_template {', '.join(known_templates())} or a JSON file."
            )


class _Object:
    """A user's object. Coroutines are waited for in its own event loop."""

    def __init__(self, made: object):
        self.made = made
        self.loop: asyncio.AbstractEventLoop | None = None

    def call(self, method: str, /, *given: Any, **named: Any) -> Any:
        value = getattr(self.made, method)(*given, **named)
        if not inspect.isawaitable(value):
            return value

        async def result() -> Any:
            return await value

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(result())


class Episode(ABC):
    """The conversation of one response. Its methods are called one after another, in any thread; they run the user's
    code and raise what it raises.

    opening: the ids of the prompt, if the environment's `reset` said something; None for the ids of the data.
    """

    def __init__(
        self,
        of: Environments,
        environment: _Object,
        row: Mapping[str, Any],
        prompt: list[int],
        opening: list[int] | None = None,
    ):
        self.of, self.environment, self.opening = of, environment, opening
        self.options = template_options(row)
        self.before = prompt if opening is None else opening  # what stands before a turn, behind the last one
        self.failed = False

    def answer(self, tokens: list[int], number: int, left: int, ended: bool) -> Answer:
        """The environment's answer to a turn. tokens: ids that the policy drew. number: of the turn, from 0. left: how
        many tokens the response may still get. ended: whether the turn ended by itself; if not, its tools are not
        called."""
        self.failed = True
        decode = self.of.tokenizer.decode
        with self.of.lock:
            text, drawn, before = decode(tokens, skip_special_tokens=True), decode(tokens), decode(self.before)
        message, unparsed = {"role": "assistant", "content": text}, 0
        if self.of.template is not None:
            try:
                message = parsed(drawn, self.of.template, before, self.of.schemas)
            except (ValueError, TypeError, RecursionError):  # the last: JSON that is nested too deeply
                unparsed = 1
        reply = checked(self._reply(Turn(text, tuple(tokens), message, number, left), ended), self.of.vocabulary)
        self.before = [] if reply.done else self._ids(reply, tokens)
        self.failed = False
        return Answer(self.before, reply.reward, reply.done, unparsed)

    @abstractmethod
    def close(self) -> float:
        """End the conversation. To be called once, and never while a call is still running. Returns the reward that is
        given at the end, which belongs to the last turn."""

    @abstractmethod
    def _reply(self, turn: Turn, ended: bool) -> Reply: ...

    def _ids(self, reply: Reply, drawn: list[int]) -> list[int]:
        """The ids that the reply puts behind the drawn turn."""
        if reply.tokens is not None:
            return [int(token) for token in reply.tokens]
        with self.of.lock:
            if reply.messages:
                return behind(self.of.tokenizer, drawn, reply.messages, **self.options)
            return self.of.tokenizer.encode(reply.text, add_special_tokens=False) if reply.text else []


class _OwnEpisode(Episode):
    def _reply(self, turn: Turn, ended: bool) -> Reply:
        return reply_of(self.environment.call("step", turn))

    def close(self) -> float:
        """Rewards come with the replies: 0.0."""
        try:
            if callable(getattr(self.environment.made, "close", None)):
                self.environment.call("close")
        finally:
            if self.environment.loop:
                self.environment.loop.close()
        return 0.0


class _ToolEpisode(Episode):
    def _reply(self, turn: Turn, ended: bool) -> Reply:
        calls = turn.message.get("tool_calls") if ended else None
        return Reply(messages=[self._called(call) for call in calls]) if calls else Reply(done=True)

    def _called(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The message with a tool's result, or with its error, which as in TRL is told to the policy."""
        function = call.get("function", call)
        name = function["name"]
        try:
            if name not in tools_of(self.environment.made):
                raise ValueError(f"Tool {name} not found.")
            result = self.environment.call(name, **function["arguments"])
        except Exception as error:
            result = {"error": str(error)}
        return tool_message(name, result)

    def close(self) -> float:
        """The reward of `get_reward`, or else the attribute `reward`."""
        made = self.environment.made
        reward = self.environment.call("get_reward") if hasattr(made, "get_reward") else getattr(made, "reward", None)
        if not self.failed:
            self.of.idle.append(self.environment)
        return _number(reward)


def tool_message(name: str, result: Any) -> dict[str, Any]:
    """The message with what a tool returned: a text, or a list of parts for the chat template."""
    return {"role": "tool", "name": name, "content": result if isinstance(result, list) else str(result)}


def is_own(made: Callable[..., Any]) -> bool:
    """Whether the class is of the own shape."""
    return callable(getattr(made, "step", None))


def check_own(environment: object, name: str) -> None:
    """Raises: UserError if the methods of an environment of the own shape are those of something else."""
    if callable(getattr(environment, "reset", None)):
        raise UserError(
            f"{name}: it has step and reset. A class with step is not reset: an object is made for each response, with "
            "the row, so let __init__(self, row) begin, and step(self, turn) read turn.text. Rename reset; if step is "
            "a tool of a class as TRL's environment_factory gets it, rename step."
        )
    taken = inspect.signature(environment.step)  # type: ignore[attr-defined]
    try:
        taken.bind("turn")
    except TypeError:
        raise UserError(f"{name}: step{taken} has to take one argument, the turn: step(self, turn).") from None


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """{name: method} of the tools of an environment of TRL's shape."""
    methods = inspect.getmembers(environment, inspect.ismethod)
    return {name: method for name, method in methods if name not in ("reset", "get_reward") and name[0] != "_"}


@cache
def tool_schemas(made: Callable[..., Any], name: str = "the environment") -> list[dict[str, Any]]:
    """The JSON schemas of the tools, for the chat template. An environment of TRL's shape is made for it, once. name:
    of the flag with its value, for messages.

    Raises: UserError if the class has neither shape, or if no schema can be made of a tool.
    """
    if is_own(made):
        tools = list(getattr(made, "tools", None) or ())
    else:
        try:
            environment = made()
        except Exception as error:
            raise UserError(
                f"{name}: it has no method step, so it is taken for a class as TRL's environment_factory gets it, and "
                f"it cannot be made without arguments: {described(error)}. Add step(self, turn), or make it so."
            ) from None
        if not callable(getattr(environment, "reset", None)):
            raise UserError(
                f"{name}: it has neither the method step(self, turn) nor reset(self, **row). Add one of them "
                "(docs/environments.md)."
            )
        tools = list(tools_of(environment).values())
    schemas = []
    for tool in tools:
        try:
            schemas.append(tool if isinstance(tool, dict) else get_json_schema(tool))
        except Exception as error:  # of several classes
            raise UserError(
                f"{name}: no JSON schema can be made of its tool {getattr(tool, '__name__', tool)} "
                f"({shortened(str(error), 300)}). Give each argument a type, and a docstring that describes the tool "
                "and, below Args:, each argument. A method that is no tool gets a name that begins with _."
            ) from None
    return schemas


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
        said = {"observation": said[0], "reward": said[1], "done": said[2] or said[3]}
    field = said.get if isinstance(said, Mapping) else partial(getattr, said)
    text = field("environment_feedback", field("observation", _MISSING))
    reward, done = field("rewards", field("reward", _MISSING)), field("done", _MISSING)
    if any(value is _MISSING for value in (text, reward, done)):
        raise TypeError(
            f"step returned {shortened(said)}. It has to return a Reply, a text, None for the end, Gymnasium's "
            "5-tuple, or a dict or an object with observation, reward and done"
        )
    return Reply("" if text is None else text, reward=reward, done=bool(done))


_MISSING = object()
MOST = torch.finfo(torch.float32).max


def _number(reward: Any) -> float:
    """A number, a tensor or an array with one number, or None for 0. Raises: ValueError for anything else."""
    try:
        number = math.nan if isinstance(reward, str) else 0.0 if reward is None else float(reward)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not abs(number) <= MOST:
        raise ValueError(f"the reward is {shortened(reward)}; it has to be a finite number of 32 bits")
    return number


def checked(reply: Reply, vocabulary: int = 0) -> Reply:
    """The reply, whose reward is a float. vocabulary: ids have to be smaller. Raises: TypeError or ValueError if the
    reply cannot be used."""
    if not isinstance(reply.text, str):
        raise TypeError(f"what is to be inserted is {shortened(reply.text)}; it has to be a text")
    if (reply.text != "") + (reply.tokens is not None) + bool(reply.messages) > 1:
        raise ValueError("a Reply has more than one of text, tokens and messages; give one of them")
    for token in reply.tokens if reply.tokens is not None else ():
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= token < vocabulary:
            raise ValueError(f"Reply.tokens has {token!r}; ids are whole numbers from 0 to {vocabulary - 1}")
    if isinstance(reply.messages, (str, Mapping)):
        raise TypeError(f"Reply.messages is {shortened(reply.messages)}; it has to be a list of messages")
    return replace(reply, reward=_number(reply.reward))


def parsed(text: str, template: ResponseTemplate, prefix: str, tools: list[dict]) -> dict[str, Any]:
    """The drawn text as a message of the assistant, its calls checked. prefix: the text before it; what stands behind
    the template's last anchor there belongs to the message. tools: schemas, by which arguments get their types.

    Raises: ValueError or TypeError if a call cannot be read: it is cut off, or no JSON, or no call.
    """
    prefix = prefix if template.start_anchor_re.search(prefix) else ""
    message = parse_response(text, template, prefix=prefix, tools=tools)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{shortened(call)} is no tool call")
        function["arguments"] = function.get("arguments") or {}
        if not isinstance(function["arguments"], dict):
            raise ValueError(f"{shortened(call)} has no arguments by name")
    return {"content": "", **message}


def behind(tokenizer, drawn: list[int], messages: Sequence[Mapping[str, Any]], **options) -> list[int]:
    """The ids of the messages as the chat template writes them behind an answer, with the beginning of the next answer.
    They begin with the token that ends an answer, unless the drawn turn has it. If the drawn turn ends with the token
    that begins the messages, as turns of some models do, it is not repeated.

    options: arguments of the chat template. Raises: what the template raises; ValueError if there is none, or if it
    leaves answers out.
    """
    if not tokenizer.chat_template:
        raise ValueError("messages need a chat template, and the model has none: give --chat_template FILE, or a text")
    asked, answer = {"role": "user", "content": "the-question"}, "the-answer"
    answered: dict[str, Any] = {"role": "assistant", "content": answer}
    if messages[0]["role"] == "tool":  # some templates write the name of the call beside the result
        function = {"name": messages[0].get("name", "the-tool"), "arguments": {"of": answer}}
        answered |= {"content": "", "tool_calls": [{"type": "function", "function": function}]}

    def after(*more: Mapping[str, Any], **asking: bool) -> list[int]:
        text = tokenizer.apply_chat_template([asked, answered, *more], tokenize=False, **asking, **options)
        if answer not in text:
            raise ValueError(f"the chat template leaves {answered} out")
        return tokenizer.encode(text.partition(answer)[2], add_special_tokens=False)

    ended, whole = after(), after(*messages, add_generation_prompt=True)
    end = list(takewhile(lambda place: ended[place] == whole[place], range(min(len(ended), len(whole)))))
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ends = [p for p in end if ended[p] == tokenizer.eos_token_id] or [p for p in end if ended[p] in special]
    if ends and ended[ends[-1]] not in drawn:
        return whole[ends[-1] :]
    rest = whole[ends[-1] + 1 :] if ends else whole
    return rest[1:] if rest[:1] == drawn[-1:] else rest


def _written_call(tokenizer, schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """A prompt, and an answer with a call of the tool, as the chat template writes them; None if it writes a finished
    answer otherwise than behind its prompt."""
    asked = {"role": "user", "content": "the-question"}
    values = {"integer": 7, "number": 7.5, "boolean": True, "array": [], "object": {}}
    properties = schema["function"].get("parameters", {}).get("properties", {})
    arguments = {name: values.get(str(about.get("type")), "the-answer") for name, about in properties.items()}
    function = {"name": schema["function"]["name"], "arguments": arguments}
    answered = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    prompt = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([asked, answered], tokenize=False)
    return (prompt, whole.removeprefix(prompt)) if whole.startswith(prompt) else None


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row's arguments of the chat template (`chat_template_kwargs`)."""
    given = row.get("chat_template_kwargs")
    options = (json.loads(given) if isinstance(given, str) else given) or {}
    return {name: value for name, value in options.items() if value is not None}


# In a wheel the files of configs/response_templates are in a folder beside this file; in a checkout they are there.
_INSTALLED = Path(__file__).with_name("response_templates")
TEMPLATES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs" / "response_templates"


def known_templates() -> list[str]:
    """The names of the response templates that come along."""
    return sorted(path.stem for path in TEMPLATES.glob("*.json"))


def response_template(given: str | None, tokenizer) -> ResponseTemplate | None:
    """What finds tool calls in a turn. given: one of `known_templates`, or a JSON file; None for the tokenizer's own
    `response_template`, if it has one. Raises: UserError if it cannot be read."""
    template = getattr(tokenizer, "response_template", None)
    if given is None and template is None:
        return None
    try:
        if given is not None:
            path = TEMPLATES / f"{given}.json" if given in known_templates() else Path(given)
            template = json.loads(path.read_text(encoding="utf-8"))
        return load_response_template(template)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--response_template {given or '(the tokenizer has one)'}: {str(error)[:300]}. Give "
            f"{', '.join(known_templates())}, or a JSON file with a response_template as transformers reads it."
        ) from None
