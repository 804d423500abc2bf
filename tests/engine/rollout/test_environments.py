"""Environments beside texts written by hand: replies of every form, messages behind turns, tool calls that are broken,
TRL's shape with its errors and rewards, and classes that cannot be used.

The chat templates are written for these tests, with the habits of well-known ones. The tokenizer has one id a byte.
"""

import asyncio
import json
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.errors import UserError
from engine.reward.base import described
from engine.rollout.environments import (
    Environments,
    Reply,
    behind,
    checked,
    known_templates,
    parsed,
    reply_of,
    response_template,
    tool_schemas,
)

EACH = "{% for m in messages %}"
ASKED = "{% endfor %}{% if add_generation_prompt %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
TEMPLATES = {
    # Thoughts of the last answer alone; results of tools in turns of the user.
    "qwen": EACH + "{% if m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result>{% else %}"
    "<|im_start|>{{ m.role }}\n{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}" + CALLS + "{% endif %}<|im_end|>\n" + ASKED
    + "<|im_start|>assistant\n{% if quick %}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    # The name of the tool beside its result; no line between turns.
    "llama": EACH + "<|head|>{{ m.role }}{{ m.name }}<|headend|>\n\n{{ m.content }}" + CALLS + "<|eot|>" + ASKED
    + "<|head|>assistant<|headend|>\n\n{% endif %}",
    # EOS behind the last turn, and another token at the end of each.
    "phi": EACH + "<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "<|end|>\n" + ASKED
    + "<|assistant|>\n{% else %}</s>{% endif %}",
    # The token that begins a result ends the turn that asks for it.
    "glm": EACH + "{% if m.role == 'tool' %}<|seen|>{{ m.content }}{% else %}<|{{ m.role }}|>{{ m.content }}" + CALLS
    + "{% endif %}" + ASKED + "<|assistant|>{% endif %}",
    "plain": EACH + "{{ m.role }}: {{ m.content }}\n" + ASKED + "assistant: {% endif %}",
    # Neither calls nor results of tools.
    "deaf": EACH + "{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}" + ASKED
    + "<|im_start|>assistant\n{% endif %}",
}  # fmt: skip
NAMES = "im_start im_end head headend eot user assistant end seen"
SPECIAL = [f"<|{name}|>" for name in NAMES.split()]


def tokenizer_of(template: str | None, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(models.BPE({byte: place for place, byte in enumerate(alphabet)}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token=eos, pad_token="<pad>")
    made.add_tokens([AddedToken(token, special=True) for token in [*SPECIAL, "</s>"]])
    made.add_tokens([AddedToken(token) for token in ("<tool_call>", "</tool_call>")])
    made.chat_template = TEMPLATES.get(template)
    return made


QWEN = tokenizer_of("qwen")


def ids_of(text: str, tokenizer=QWEN) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class StepResult:
    observation: object
    reward: float | None = None
    done: bool = False


@pytest.mark.parametrize(
    "said, reply",
    [
        (Reply("a", reward=2.0), Reply("a", reward=2.0)),
        ("more", Reply("more")),
        (None, Reply(done=True)),
        (("seen", 1, False, True, {}), Reply("seen", reward=1.0, done=True)),
        (("seen", 0.5, False, False, {}), Reply("seen", reward=0.5)),
        (StepResult("seen", 0.25, True), Reply("seen", reward=0.25, done=True)),
        (StepResult("seen"), Reply("seen")),
        (
            {"rewards": torch.tensor(1), "scores": 5, "environment_feedback": "go on", "done": False, "extra_logs": {}},
            Reply("go on", reward=1.0),
        ),
        ({"observation": None, "reward": 1, "done": True}, Reply(reward=1.0, done=True)),
    ],
)
def test_what_step_returns(said, reply):
    assert checked(reply_of(said)) == reply


@pytest.mark.parametrize(
    "said, message",
    [
        (7, "step returned 7. It has to return a Reply"),
        (("seen", 1.0, False, {}), "It has to return a Reply"),
        ({"text": "seen", "reward": 1.0}, "step returned {'text': 'seen', 'reward': 1.0}. It has"),
        ({"observation": "seen", "rewrad": 1.0, "done": False}, "It has to return a Reply"),
        ([1.0, "seen"], "step returned [1.0, 'seen']. It has to return a Reply"),
    ],
)
def test_what_step_must_not_return(said, message):
    with pytest.raises(TypeError) as raised:
        reply_of(said)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "reply, message",
    [
        (Reply("a", tokens=[1]), "more than one of text, tokens and messages"),
        (Reply(tokens=[1, 300]), "Reply.tokens has 300; ids are whole numbers from 0 to 299"),
        (Reply(tokens=[-1]), "Reply.tokens has -1"),
        (Reply(tokens="12"), "Reply.tokens has '1'"),
        (Reply(tokens=[True]), "Reply.tokens has True"),
        (Reply(b"a"), "what is to be inserted is b'a'; it has to be a text"),
        (reply_of(StepResult(np.zeros(2))), "what is to be inserted is array([0., 0.])"),
        (Reply(messages={"role": "user", "content": "a"}), "it has to be a list of messages"),
        (Reply(reward=float("nan")), "the reward is nan"),
        (Reply(reward="1.0"), "the reward is '1.0'; it has to be a finite number of 32 bits"),
        (Reply(reward=[1.0]), "the reward is [1.0]"),
    ],
)
def test_replies_that_cannot_be_inserted(reply, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        checked(reply, 300)
    assert message in str(raised.value)


TOOL = {"role": "tool", "name": "add", "content": "12"}
USER = {"role": "user", "content": "higher"}


@pytest.mark.parametrize(
    "template, eos, drawn, messages, text",
    [
        ("qwen", "<|im_end|>", "5<|im_end|>", [USER], "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen", "<|im_end|>", "5", [USER], "<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen",
            "<|im_end|>",
            call("add") + "<|im_end|>",
            [TOOL, TOOL],
            "\n<|im_start|>user\n<result>12</result><|im_end|>\n<|im_start|>user\n<result>12</result><|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama",
            "<|eot|>",
            call("add") + "<|eot|>",
            [TOOL],
            "<|head|>tooladd<|headend|>\n\n12<|eot|><|head|>assistant<|headend|>\n\n",
        ),
        (
            "llama",
            "</s>",
            "5</s>",
            [USER],
            "<|eot|><|head|>user<|headend|>\n\nhigher<|eot|><|head|>assistant<|headend|>\n\n",
        ),
        ("phi", "</s>", "5<|end|>", [USER], "\n<|user|>\nhigher<|end|>\n<|assistant|>\n"),
        ("glm", "</s>", call("add") + "<|seen|>", [TOOL], "12<|assistant|>"),
        ("plain", "</s>", "5</s>", [USER], "\nuser: higher\nassistant: "),
    ],
)
def test_messages_behind_a_turn(template, eos, drawn, messages, text):
    tokenizer = tokenizer_of(template, eos)
    assert behind(tokenizer, ids_of(drawn, tokenizer), messages) == ids_of(text, tokenizer)


PROMPT = "<|im_start|>user\n2*3?<|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    "template, prefix, text, said, calls",
    [
        ("qwen", PROMPT, "six<|im_end|>", "six", []),
        ("qwen", PROMPT, f"Two.\n{call('add', a=1)}\n{call('f')}<|im_end|>", "Two.", [("add", {"a": 1}), ("f", {})]),
        ("qwen", PROMPT, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("qwen", PROMPT + "<think>\n", "so</think>\nsix<|im_end|>", "six", []),
        ("qwen", "no anchor", "six<|im_end|>", "six", []),
        ("llama", LLAMA, '{"name": "add", "parameters": {"a": {"b": 1}}}<|eot_id|>', "", [("add", {"a": {"b": 1}})]),
        ("llama", LLAMA, '<|python_tag|>{"name": "f", "parameters": {}}<|eom_id|>', "", [("f", {})]),
        ("llama", LLAMA, 'like {"name": "f"}<|eot_id|>', 'like {"name": "f"}', []),
        (
            "qwen3.5",
            PROMPT,
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
            "",
            [("add", {"a": 1})],
        ),
    ],
)
def test_calls_are_found(template, prefix, text, said, calls):
    add = {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}
    message = parsed(text, response_template(template, None), prefix, [{"type": "function", "function": add}])
    found = [(each["function"]["name"], each["function"]["arguments"]) for each in message.get("tool_calls", ())]
    assert (message["role"], message["content"], found) == ("assistant", said, calls)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "add", "argu<|im_end|>',
        '<tool_call>{"name": }</tool_call><|im_end|>',
        '<tool_call>{"args": 1}</tool_call><|im_end|>',
        "<tool_call>[1]</tool_call><|im_end|>",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call><|im_end|>',
        '<tool_call>{"name": "add", "arguments": ' + "[" * 100_000 + "<|im_end|>",
    ],
)
def test_a_broken_call_is_a_turn_without_one(text):
    class Asks:
        def __init__(self, row):
            pass

        def step(self, turn):
            assert turn.message == {"role": "assistant", "content": text.removesuffix("<|im_end|>")}

    episode = environments(Asks).episode(0, ids_of(PROMPT))
    answer = episode.answer(ids_of(text), 0, 100, True)
    assert (answer.tokens, answer.done, answer.unparsed) == ([], True, 1)


def environments(made, tokenizer=QWEN, rows=({"prompt": PROMPT, "target": 3},), **given) -> Environments:
    return Environments(made, tokenizer, rows, tool_schemas(made), template=response_template("qwen", None), **given)


def test_turns_of_an_own_environment():
    log = []

    class Counts:
        def __init__(self, row):
            self.row = row

        async def step(self, turn):
            await asyncio.sleep(0)
            log.append(turn)
            if turn.number == 0:
                return Reply(" <|im_end|>", reward=0.5)
            return [Reply(tokens=[1, 2]), Reply(messages=[USER]), Reply("unheard", reward=1, done=True)][
                turn.number - 1
            ]

        async def close(self):
            log.append(self.row)

    row = {"prompt": PROMPT, "chat_template_kwargs": {"quick": True}}
    episode = environments(Counts, rows=[row]).episode(0, ids_of(PROMPT))
    drawn = ids_of("five<|im_end|>")
    answers = [episode.answer(drawn, number, 50 - number, True) for number in range(4)]
    assert episode.close() == 0.0
    rest = "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert [answer.tokens for answer in answers] == [ids_of(" <|im_end|>"), [1, 2], ids_of(rest), []]
    assert [(answer.reward, answer.done) for answer in answers] == [(0.5, False), (0, False), (0, False), (1, True)]
    first = log[0]
    assert (first.text, list(first.tokens), first.number, first.left) == ("five", drawn, 0, 50)
    assert [turn.message["content"] for turn in log[:4]] == ["five"] * 4 and log[4] == row


class Sums:
    """As TRL's environment_factory takes it."""

    def __init__(self):
        self.resets = []

    def reset(self, target, **row):
        self.target, self.total = target, 0
        self.resets.append(row)

    def add(self, a: int) -> int:
        """
        Add to the total.

        Args:
            a: What is added.
        """
        self.total += a
        return self.total

    async def fail(self) -> str:
        """Fail."""
        raise ValueError("no such sum")

    def ask(self, method: str) -> str:
        """
        Ask.

        Args:
            method: How.
        """
        return method

    def get_reward(self) -> float:
        return float(self.total == self.target)


def test_tools_of_a_trl_environment():
    dialogue = {"messages": [{"role": "user", "content": "2*3?"}], "tools": None}
    made = environments(Sums, dialogues=[dialogue])
    episode = made.episode(0, ids_of(PROMPT))
    asked = [
        call("add", a="1"),
        call("add", a=2) + call("fail"),
        call("add", b=1),
        call("reset"),
        call("ask", method="GET"),
        "3",
    ]
    answers = [episode.answer(ids_of(text + "<|im_end|>"), number, 99, True) for number, text in enumerate(asked)]
    results = [
        ["1"],
        ["3", "{'error': 'no such sum'}"],
        ["{'error': \"Sums.add() got an unexpected keyword argument 'b'\"}"],
        ["{'error': 'Tool reset not found.'}"],
        ["GET"],
    ]
    turns = ["".join(f"<|im_start|>user\n<result>{each}</result><|im_end|>\n" for each in some) for some in results]
    inserted = [f"\n{turn}<|im_start|>assistant\n" for turn in turns]
    assert [QWEN.decode(answer.tokens) for answer in answers] == [*inserted, ""]
    assert [answer.done for answer in answers] == [False] * 5 + [True]
    assert episode.close() == 1.0
    again = made.episode(0, ids_of(PROMPT))  # the object is used again, and reset
    assert again.environment is episode.environment and len(again.environment.made.resets) == 2
    assert again.environment.made.resets[1] == {"prompt": dialogue["messages"]}
    assert again.answer(ids_of(call("add", a=3)), 0, 0, False).done  # a turn that was cut off calls nothing
    assert again.close() == 0.0


def test_what_reset_says_and_what_it_must_not_say():
    class Says:
        def reset(self, said, **row):
            self.reward = 0.25
            return said

    rows = [{"prompt": PROMPT, "said": said} for said in ("Begin.", None, ["Begin."])]
    made = environments(Says, rows=rows, opening=lambda index, said: ids_of(f"{index} {said}"))
    assert made.episode(0, [1]).opening == ids_of("0 Begin.")
    quiet = made.episode(1, [1])
    assert quiet.opening is None and quiet.close() == 0.25
    with pytest.raises(TypeError, match="reset returned \\['Begin.'\\]; it has to return a text or None"):
        made.episode(2, [1])


def test_an_environment_that_failed_is_not_used_again():
    class Breaks:
        def __init__(self, row):
            pass

        def step(self, turn):
            return Reply(tokens=[10_000])

    with pytest.raises(ValueError, match="Reply.tokens has 10000"):
        environments(Breaks).episode(0, [1]).answer([1], 0, 9, True)

    made = environments(Sums)
    episode = made.episode(0, ids_of(PROMPT))
    made.tokenizer = None  # anything that fails within an answer
    with pytest.raises(AttributeError):
        episode.answer(ids_of("3"), 0, 9, True)
    episode.close()
    assert made.idle == []


class Untyped(Sums):
    def untyped(self, a):
        """Has no types."""


class Undescribed(Sums):
    def undescribed(self, a: int) -> int:
        return a


class Needy(Sums):
    def __init__(self, url):
        pass


@pytest.mark.parametrize(
    "made, message",
    [
        (type("Neither", (), {}), "--environment a.py:A: it has neither the method step"),
        (Untyped, "no JSON schema can be made of its tool untyped"),
        (Undescribed, "no JSON schema can be made of its tool undescribed"),
        (Needy, "it cannot be made without arguments: TypeError"),
    ],
)
def test_classes_that_are_no_environments(made, message):
    with pytest.raises(UserError) as raised:
        tool_schemas(made, "--environment a.py:A")
    assert message in str(raised.value)


class OtherRow:
    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, turn):
        pass


class Named:
    tools = ({"type": "function", "function": {"name": "add"}},)

    def __init__(self, row):
        pass

    def step(self, turn):
        pass


class Deaf:
    def __init__(self, row):
        pass

    def step(self):
        pass


class Agent(Named):
    """As OpenRLHF's and Gymnasium's."""

    def reset(self, states):
        pass


class Unrewarded:
    def reset(self, **row):
        pass


@pytest.mark.parametrize(
    "made, template, given, message",
    [
        (
            OtherRow,
            "qwen",
            "qwen",
            "the first row of the data (columns: prompt, target): KeyError: 'answer' (",
        ),
        (Deaf, "qwen", None, "step() has to take one argument, the turn"),
        (Agent, "qwen", "qwen", "let __init__(self, row) begin"),
        (Unrewarded, "qwen", "qwen", "it has no method get_reward(self) and no attribute reward"),
        (Sums, "qwen", None, "Give --response_template llama, qwen, qwen3.5 or a JSON file"),
        (Named, "qwen", None, "it has tools, and the tokenizer of the model has no response_template"),
        (Sums, "qwen", "llama", "the response template finds no tool call in what the chat template"),
        (Sums, "deaf", "qwen", "does not write what a tool returns"),
        (Sums, None, "qwen", "does not write what a tool returns"),
    ],
)
def test_environments_that_a_run_cannot_use(made, template, given, message):
    tokenizer = tokenizer_of(template)
    made = Environments(
        made,
        tokenizer,
        [{"prompt": "x", "target": 3}],
        tool_schemas(made),
        template=response_template(given, tokenizer),
    )
    with pytest.raises(UserError) as raised:
        made.check("--environment a.py:A")
    assert str(raised.value).startswith("--environment a.py:A: ") and message in str(raised.value)


def test_an_environment_without_a_reward_may_stand_beside_other_rewards():
    made = Environments(Unrewarded, tokenizer_of("qwen"), [{"prompt": "x"}], [])
    made.check("--environment a.py:A", alone=False)


def test_the_line_of_an_error_is_the_users():
    class Waits(OtherRow):
        async def step(self, turn):
            await asyncio.sleep(0)
            return turn.nothing

    made = environments(Waits, rows=[{"answer": "3"}])
    with pytest.raises(UserError, match=rf"{__file__}, line \d+: self.answer = row\["):
        environments(OtherRow).check("--environment a.py:A")
    with pytest.raises(AttributeError) as raised:
        made.episode(0, [1]).answer([1], 0, 9, True)
    assert f"({__file__}, line " in described(raised.value)
    assert described(raised.value).endswith(": return turn.nothing)")


def test_environments_that_a_run_can_use():
    environments(Sums).check("--environment a.py:A")
    environments(Named).check("--environment a.py:A")


def test_schemas_of_tools():
    def shout(text: str) -> str:
        """
        Say it loudly.

        Args:
            text: What is said.
        """
        return text.upper()

    given = {"type": "function", "function": {"name": "other", "parameters": {}}}
    own = type("Own", (Named,), {"tools": [shout, given]})
    properties = {"text": {"type": "string", "description": "What is said."}}
    parameters = {"type": "object", "properties": properties, "required": ["text"]}
    described = {"name": "shout", "description": "Say it loudly.", "parameters": parameters}
    schemas = tool_schemas(own)
    assert schemas[0]["function"].items() >= described.items() and schemas[1] == given
    assert [schema["function"]["name"] for schema in tool_schemas(Sums)] == ["add", "ask", "fail"]


def test_response_templates_of_the_tokenizer_and_of_files(tmp_path):
    tokenizer = tokenizer_of("qwen")
    assert response_template(None, tokenizer) is None
    content = '{"start_anchor": "ANCHOR", "fields": {"content": {}}}'
    tokenizer.response_template = json.loads(content)
    (tmp_path / "mine.json").write_text(content)
    for given in (None, str(tmp_path / "mine.json")):
        message = parsed("six<|im_end|>", response_template(given, tokenizer), "so ANCHOR", [])
        assert message == {"content": "six<|im_end|>"}
    assert known_templates() == ["llama", "qwen", "qwen3.5"]
    for content, message in (("{", "Expecting property name"), ('{"fields": {}}', "fields must be a non-empty dict")):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match=message):
            response_template(str(tmp_path / "broken.json"), tokenizer)
    with pytest.raises(UserError, match="--response_template mistral: .* Give llama, qwen, qwen3.5, or a JSON"):
        response_template("mistral", tokenizer)
