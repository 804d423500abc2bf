"""Chat templates of the kinds that well-known models bring, in all three steps: ids beside transformers' own, and what
is lost; templates that are broken or leave texts out; and where turns begin, counted by hand.

The templates are written for these tests; each has the one habit of its kind that has led somebody astray.
"""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.errors import UserError
from tests.training.data.reading import rows_of
from tests.training.data.tiny_tokenizers import CHATML, EOS, chat_tokenizer, word_tokenizer
from training.data.chat import Rendered, Turns
from training.data.examples import PairExamples, Prompts, SFTExamples
from training.data.record_forms import PAIRS, PROMPTS, SFT
from training.data.tokens import TextEncoder, end_of_turn, stop_token_ids

EACH = "{% for m in messages %}"
ASKED = "{% endfor %}{% if add_generation_prompt %}"
CHATML_LINES = (
    EACH + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + ASKED + "<|im_start|>assistant\n{% endif %}"
)
THOUGHTS_CUT = (
    "{{ bos_token }}" + EACH + "{% if m.role == 'user' %}<|User|>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}" + ASKED + "<|Assistant|>OPENED{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML_LINES,
    "llama2": EACH + "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}",
    "llama3": "{{ bos_token }}" + EACH + "<|head|>{{ m.role }}<|headend|>\n\n{{ m.content | trim }}<|eot|>"
    + ASKED + "<|head|>assistant<|headend|>\n\n{% endif %}",
    # Writes EOS behind the end of the last turn.
    "phi3": EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + ASKED + "<|assistant|>\n{% else %}</s>{% endif %}",
    # Words behind the end of the last turn.
    "words": EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + ASKED + "<|assistant|>\n{% else %}Bye!{% endif %}",
    "r1": THOUGHTS_CUT.replace("OPENED", ""),
    "qwen": EACH + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and '</think>' in m.content %}"
    "{% if loop.last %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
    "{% endif %}"
    "{{ m.content.split('</think>')[-1].strip() }}{% elif m.reasoning_content and loop.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    + ASKED + "<|im_start|>assistant\n{% endif %}",
    "gemma": "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH
    + "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|turnend|>\n" + ASKED
    + "<|turn|>model\n{% endif %}",
    # Tools before the last question, and tool calls as JSON.
    "mistral": "{{ bos_token }}" + EACH + "{% if m.role == 'user' %}"
    "{% if tools and 'user' not in messages[loop.index0 + 1:] | map(attribute='role') | list %}"
    "[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULTS]{{ m.content | tojson }}[/RESULTS]"
    "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls | map(attribute='function') | list | tojson }}</s>"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
    # Passes over all but two roles in silence.
    "no_system": EACH + "{% if m.role in ('user', 'assistant') %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endif %}"
    + ASKED + "<|assistant|>\n{% endif %}",
}  # fmt: skip
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|headend|>", "<|eot|>", "<|end|>", "<|turn|>", "<|turnend|>"]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
QUESTION, ANSWER = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody."}
THOUGHT = {"role": "assistant", "content": "<think>\nSo.\n</think>\n\nIt is I."}


def tokenizer_of(template: str, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte a token; <s> before each text, if it is said so."""
    vocabulary = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<pad>", "<s>", "</s>", *SPECIAL)])
    if adds_bos:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=template
    )


def theirs(tokenizer, messages: list[dict], **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]


def in_steps(tokenizer, messages: list[dict], **columns) -> tuple:
    """(step 1's example, step 2's pair, step 3's prompt) of a dialogue."""
    *context, last = messages
    worse = {**last, "content": "Not so. " + last["content"].rpartition("</think>")[2]}
    stops = stop_token_ids(tokenizer, None, None)
    records = {"messages": messages}, {"prompt": context, "chosen": [last], "rejected": [worse]}, {"prompt": context}
    sft, pair, prompt = (
        [form.row("chat.jsonl, line 1", record | columns, tokenizer)]
        for form, record in zip((SFT, PAIRS, PROMPTS), records)
    )
    return (
        SFTExamples(sft, tokenizer, 999, stops=stops)[0],
        PairExamples(pair, tokenizer, 999, stops=stops)[0],
        Prompts(prompt, tokenizer, 999)[0],
    )


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_steps_have_the_ids_of_apply_chat_template_up_to_the_first_stop(name, adds_bos):
    tokenizer = tokenizer_of(TEMPLATES[name], adds_bos)
    dialogue = [QUESTION, ANSWER, {"role": "user", "content": " And  why?"}, {"role": "assistant", "content": "So."}]
    example, pair, prompt = in_steps(tokenizer, dialogue)
    assert prompt == theirs(tokenizer, dialogue[:-1], add_generation_prompt=True)
    whole, stops = theirs(tokenizer, dialogue), stop_token_ids(tokenizer, None, None)
    end = next(place for place in range(len(prompt), len(whole)) if whole[place] in stops)
    assert example == (whole[: end + 1], len(prompt))
    assert pair.chosen == whole[: end + 1] and pair.rejected[: len(prompt)] == prompt
    for ids in pair:  # the score is read where step 3's responses end
        assert [token in stops for token in ids[len(prompt) :]] == [False] * (len(ids) - len(prompt) - 1) + [True]


@pytest.mark.parametrize(
    "behind, stops, kept",
    [
        ("<|im_end|>\n", (), "<|im_end|>"),
        ("<|im_end|>\n</s>", (), "<|im_end|>"),
        (" \n", (), " \n</s>"),
        ("</s>\n\n", (), "</s>"),
        ("<|eot|>\n", (), "<|eot|>\n</s>"),  # of which nobody says that it is a stop
        ("<|eot|>\n", ("<|eot|>",), "<|eot|>"),
        ("<|im_end|> more", (), "<|im_end|> more</s>"),
        ("", (), "</s>"),
    ],
)
def test_texts_that_were_rendered_before_end_where_generation_ends(behind, stops, kept):
    tokenizer = tokenizer_of(CHATML_LINES)
    ids = tokenizer.convert_tokens_to_ids(list(stops))
    record = {"prompt": "<|im_start|>user\nWho?<|im_end|>\n", "response": "Nobody." + behind}
    token_ids, learned = SFTExamples([record], tokenizer, 99, stops=ids)[0]
    assert tokenizer.decode(token_ids[learned:]) == "Nobody." + kept
    (token_ids, _) = SFTExamples([{"text": "Nobody." + behind}], tokenizer, 99, stops=ids)[0]
    assert tokenizer.decode(token_ids) == "<s>Nobody." + kept


def test_a_bos_that_the_template_does_not_write_is_left_out_and_told():
    tokenizer = tokenizer_of(CHATML_LINES)
    row = PROMPTS.row("here", {"prompt": [QUESTION]}, tokenizer)
    assert [note for note in row.notes if "messages do not begin with <s>" in note]
    assert not PROMPTS.row("here", {"prompt": [QUESTION]}, tokenizer_of(TEMPLATES["llama3"])).notes
    encoder = TextEncoder(tokenizer)
    assert encoder.prompt(str(row["prompt"])) == [1, *encoder.prompt(row["prompt"])]  # a text is opened as any other


def test_a_rendered_prompt_that_is_cut_keeps_to_its_template():
    """One token a byte: the second turn, 33 of them, has room; the BOS that texts get has not."""
    tokenizer = tokenizer_of(CHATML_LINES)
    last = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    room = len(tokenizer(last, add_special_tokens=False)["input_ids"])
    row = PROMPTS.row("here", {"prompt": [QUESTION, ANSWER, {"role": "user", "content": "Why?"}]}, tokenizer)
    assert isinstance(row["prompt"], Rendered)
    assert tokenizer.decode(Prompts([row], tokenizer, room)[0]) == last


@pytest.mark.parametrize("role", ["system", "developer", "narrator"])
def test_messages_that_the_template_passes_over_are_told(role):
    tokenizer = tokenizer_of(TEMPLATES["no_system"], adds_bos=False)
    messages = [{"role": role, "content": "Be kind."}, QUESTION, ANSWER]
    for form in (SFT, PROMPTS):
        (note,) = form.row("here", {"messages": messages}, tokenizer).notes
        assert f"leaves out messages of the role '{role}'" in note and "--chat_template FILE" in note
    assert not SFT.row("here", {"messages": messages}, tokenizer_of(CHATML_LINES, adds_bos=False)).notes
    with pytest.raises(UserError, match=rf"message that is to be answered, of the role '{role}' \('Be kind\.'\)"):
        PROMPTS.row("here", {"prompt": messages[:1]}, tokenizer)


def test_a_template_that_begins_no_answer_when_it_is_asked_to_is_told():
    heads = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    asked = "{% if add_generation_prompt %}assistant: {% endif %}"
    silent, begins = (tokenizer_of(template, adds_bos=False) for template in (heads, heads + asked))
    row = SFT.row("here", {"messages": [QUESTION, ANSWER]}, silent)
    (note,) = row.notes
    assert "does not begin an answer when it is asked to" in note and row["response"].startswith("assistant: ")
    assert not SFT.row("here", {"messages": [QUESTION, ANSWER]}, begins).notes
    headless = tokenizer_of(TEMPLATES["llama2"], adds_bos=False)  # begins answers with nothing
    assert not SFT.row("here", {"messages": [QUESTION, ANSWER]}, headless).notes


def test_notes_are_counted_kept_and_said(tmp_path):
    tokenizer = tokenizer_of(TEMPLATES["no_system"], adds_bos=False)
    with_system = {"prompt": [{"role": "system", "content": "Be kind."}, QUESTION]}
    rows = [PROMPTS.row("here", record, tokenizer) for record in ({"prompt": [QUESTION]}, with_system, with_system)]
    for _ in range(2):  # made, and found in the cache
        (line,) = Prompts(rows, tokenizer, 99, cache=tmp_path).note_lines()
        assert line.startswith(
            "in 66.7 % of these 3 rows, first in row 2: the chat template leaves out messages of the"
        )


USER, BOT = ({"role": role, "content": "a <|im_end|> b"} for role in ("user", "assistant"))


@pytest.mark.parametrize(
    "form, record, told",
    [
        (SFT, {"prompt": "a", "response": "b </s> c"}, ["</s> is spelt inside the answer, and what follows"]),
        (SFT, {"prompt": "a", "response": "b<|im_end|>\n</s> "}, []),  # its end
        (SFT, {"prompt": "a", "response": "b <s> <unk> c"}, ["<s> is spelt inside the answer."]),
        (SFT, {"prompt": "<|user|>\na</s>\n<|assistant|>\n", "response": "b"}, []),  # by another template
        (PROMPTS, {"prompt": [USER]}, ["<|im_end|> is spelt inside a message."]),
        (SFT, {"messages": [QUESTION, BOT]}, ["<|im_end|> is spelt inside the answer, and what follows is learned"]),
        (SFT, {"messages": [QUESTION, {**ANSWER, "content": "No.</s>"}]}, []),
        (PAIRS, {"prompt": "a", "chosen": "b", "rejected": "a b"}, ["answers begin with the prompt"]),
        (PAIRS, {"prompt": "a\n", "chosen": "a b", "rejected": "b </s> c"}, ["</s> is", "answers begin"]),
        (SFT, {"prompt": "a", "response": "b a"}, []),
    ],
)
def test_special_tokens_and_prompts_within_texts_are_told(form, record, told):
    notes = form.row("here", record, tokenizer_of(CHATML_LINES, adds_bos=False)).notes
    assert len(notes) == len(told) and all(words in note for words, note in zip(told, notes))


@pytest.mark.parametrize("names", [("human", "gpt"), ("User", "model"), ("user", "bot")])
def test_roles_by_their_other_names(names):
    dialogue = [{**message, "role": role} for message, role in zip((QUESTION, ANSWER), names)]
    tokenizer = tokenizer_of(TEMPLATES["no_system"])
    for form in (SFT, PROMPTS):
        assert form.row("here", {"messages": dialogue}, tokenizer) == (
            form.row("here", {"messages": [QUESTION, ANSWER]}, tokenizer)
            | ({"messages": dialogue} if form is PROMPTS else {})
        )


@pytest.mark.parametrize(
    "template, answer, message",
    [
        ("r1", THOUGHT, r"column messages: the chat template leaves out reasoning of the answer \('So\.'\)"),
        ("chatml", {**ANSWER, "reasoning_content": "So."}, r"leaves out reasoning of the answer \('So\.'\)"),
        ("chatml", {**ANSWER, "tool_calls": [{"function": TOOL["function"]}]}, "leaves out tool call of the answer"),
    ],
)
def test_what_would_be_learned_is_in_the_text_or_the_record_is_refused(template, answer, message):
    with pytest.raises(UserError, match=message):
        SFT.row("here", {"messages": [QUESTION, answer]}, tokenizer_of(TEMPLATES[template]))


def test_what_a_template_writes_otherwise_is_not_lost():
    falcon = tokenizer_of(
        CHATML_LINES.replace("{{ m.content }}", r"{{ m.content.replace('\n\n', '\n') }}"), adds_bos=False
    )
    row = SFT.row("here", {"messages": [{"role": "user", "content": "Mend:\n\nx\r\ny"}, ANSWER]}, falcon)
    assert "Mend:\nx\r\ny" in row["prompt"] and not row.notes
    text = json.dumps({"code": 'a\n"b" é\\c', "inner": json.dumps({"d": "e\tf"})})
    for arguments in (text, json.loads(text)):
        call = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "run", "arguments": arguments}}],
        }
        row = SFT.row("here", {"messages": [QUESTION, call]}, tokenizer_of(TEMPLATES["mistral"]))
        assert '"run"' in row["response"] and not row.notes


def test_an_answer_goes_to_the_end_of_its_last_turn():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "run", "arguments": "6*7"}}]}
    heads = CHATML_LINES.replace(
        "{{ m.content }}", "{{ m.content }}{{ m.tool_calls[0].function if m.tool_calls else '' }}"
    )
    chosen = [call, {"role": "tool", "content": "42"}, {"role": "assistant", "content": "42"}]
    row = PAIRS.row(
        "here",
        {"prompt": [QUESTION], "chosen": chosen, "rejected": [ANSWER]},
        tokenizer_of(heads, adds_bos=False),
    )
    assert row["chosen"].endswith("<|im_start|>assistant\n42<|im_end|>")


def test_a_line_break_ends_no_turn():
    tokenizer = tokenizer_of(CHATML_LINES.replace("<|im_end|>", "\n<|im_end|>"), adds_bos=False)
    tokenizer.add_tokens("\n")
    assert tokenizer.convert_ids_to_tokens(end_of_turn(tokenizer)) == "<|im_end|>"


def test_thoughts_of_earlier_answers_may_be_left_out():
    tokenizer = tokenizer_of(TEMPLATES["qwen"], adds_bos=False)
    dialogue = [QUESTION, THOUGHT, QUESTION, {**ANSWER, "reasoning_content": "Hm."}]
    row = SFT.row("here", {"messages": dialogue}, tokenizer)
    assert row["response"] == "<think>\nHm.\n</think>\n\nNobody.<|im_end|>"
    assert row.notes == ("the chat template leaves out the reasoning of earlier answers",)
    pair = {"prompt": [QUESTION], "chosen": [THOUGHT], "rejected": [ANSWER]}
    assert PAIRS.row("here", pair, tokenizer)["chosen"] == THOUGHT["content"] + "<|im_end|>"


def test_a_template_that_asks_with_a_thought_names_the_way_out():
    tokenizer = tokenizer_of(THOUGHTS_CUT.replace("OPENED", "<think>\n"))
    for form, record in (
        (SFT, {"messages": [QUESTION, ANSWER]}),
        (PAIRS, {"prompt": [QUESTION], "chosen": "a", "rejected": "b"}),
    ):
        with pytest.raises(
            UserError, match=r"asks for an answer with .*<think>\\n' and writes an answer that is there"
        ):
            form.row("here", record, tokenizer)
    assert PROMPTS.row("here", {"prompt": [QUESTION]}, tokenizer)["prompt"].endswith("<|Assistant|><think>\n")


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL])])
def test_tools_and_arguments_reach_the_template(given):
    tokenizer = tokenizer_of(TEMPLATES["mistral"])
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "look_up", "arguments": {"word": 'a "b"'}}}],
    }
    messages = [QUESTION, call, {"role": "tool", "content": '{"found": "yes"}'}, ANSWER, QUESTION, ANSWER]
    row = SFT.row("here", {"messages": messages, "tools": given}, tokenizer)
    assert row["prompt"] == tokenizer.apply_chat_template(messages[:-1], tools=[TOOL], tokenize=False)
    assert "look_up" in row["prompt"].split("[TOOLS]")[1] and not row.notes
    plain = PROMPTS.row("here", {"prompt": [QUESTION], "tools": given}, tokenizer_of(CHATML_LINES, adds_bos=False))
    assert [note for note in plain.notes if "leaves out `tools`" in note]
    loud = tokenizer_of(
        CHATML_LINES.replace("{{ m.content }}", "{{ m.content | upper if loud else m.content }}"), False
    )
    quiet = {"prompt": [QUESTION], "chat_template_kwargs": {"loud": False}}
    assert "Who?" in PROMPTS.row("here", quiet, loud)["prompt"]
    with pytest.raises(UserError, match="the message that is to be answered"):  # "WHO?" is not what was given
        PROMPTS.row("here", {"prompt": [QUESTION], "chat_template_kwargs": {"loud": True}}, loud)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"tools": "look_up"}, r"column tools: found a string \('\"look_up\"'\); needed a list of objects"),
        ({"tools": ["look_up"]}, "column tools: found a list"),
        ({"chat_template_kwargs": [1]}, "column chat_template_kwargs: found a list"),
        ({"chat_template_kwargs": {"tokenize": True}}, "column chat_template_kwargs: found tokenize; needed"),
    ],
)
def test_mistakes_in_tools_and_arguments(columns, message):
    with pytest.raises(UserError, match=f"here, {message}"):
        PROMPTS.row("here", {"prompt": [QUESTION], **columns}, tokenizer_of(CHATML_LINES))


def test_an_answer_that_the_prompt_begins_is_gone_on_with():
    tokenizer = tokenizer_of(CHATML_LINES, adds_bos=False)
    begun = [QUESTION, {"role": "assistant", "content": "It is"}]
    asked = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nIt is"
    assert PROMPTS.row("here", {"prompt": begun}, tokenizer)["prompt"] == asked
    for chosen in (" I.", [{"role": "assistant", "content": " I."}]):
        row = PAIRS.row("here", {"prompt": begun, "chosen": chosen, "rejected": " he."}, tokenizer)
        assert row == {"prompt": asked, "chosen": " I.<|im_end|>", "rejected": " he.<|im_end|>"}


def test_pairs_end_with_the_assistants_turn():
    thanks = {"role": "user", "content": "Thanks."}
    for record in (
        {"chosen": [QUESTION, ANSWER, thanks], "rejected": [QUESTION, {**ANSWER, "content": "I."}, thanks]},
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER, thanks]},
    ):
        with pytest.raises(UserError, match="its last message is of the role 'user'. An answer ends with a message"):
            PAIRS.row("here", record, tokenizer_of(CHATML_LINES))


def test_messages_are_the_same_whatever_their_ids():
    sides = {
        name: [{**QUESTION, "id": number}, {**ANSWER, "content": name, "time": number}]
        for number, name in enumerate(("chosen", "rejected"))
    }
    row = PAIRS.row("here", sides, tokenizer_of(CHATML_LINES, adds_bos=False))
    assert row["prompt"].count("Who?") == 1 and row["rejected"] == "rejected<|im_end|>"


GOOD = "{% for m in messages %}{{ m.role }} : {{ m.content }}<|im_end|>{% endfor %}"
BROKEN = {
    "syntax": ("{% for m in messages %}", r"fails with a question and its reply \(.*Unexpected end of template"),
    "raise": ("{{ raise_exception('not me') }}", r"fails with .*\(not me\)"),
    "names": ({"tool_use": GOOD}, r"fails with .*default"),
    "sandbox": ("{{ messages.__class__.__mro__[1].__subclasses__() }}", r"fails with .*unsafe"),
}


def encoder(template) -> TextEncoder:
    """What all three programs make first of a tokenizer, whether their data hold messages or not."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return TextEncoder(tokenizer)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template(name):
    template, message = BROKEN[name]
    with pytest.raises(UserError, match=rf"the chat template of the model {message}.*\. Correct chat_template in its"):
        encoder(template)


@pytest.mark.parametrize(
    "template, message",
    [
        ("", "of the-question and the-reply nothing is in ''|has no chat template"),
        (" ", "leaves texts out"),
        ("{% for m in messages %}{{ m.role }} : hi {% endfor %}", "leaves texts out: of the-question .*'user : hi '"),
        ("{{ messages[0].content }}", "leaves texts out: of the-reply nothing is in 'the-question'"),
    ],
)
def test_a_template_that_leaves_texts_out_is_for_no_messages(tmp_path, template, message):
    path = tmp_path / "rows.jsonl"
    dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": dialogue}))
    tokenizer = chat_tokenizer(template)
    assert TextEncoder(tokenizer).stops == {EOS}  # texts can do without
    for form in (SFT, PROMPTS):
        with pytest.raises(UserError, match=message):
            rows_of(path, form, tokenizer)


def dialogue_file(tmp_path, content: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}]}))
    return path


@pytest.mark.parametrize(
    "then, message",
    [
        (
            "{{ raise_exception('no z') }}",
            r"line 1, column messages: .*refuses these messages \(no z\)\. Correct the rec",
        ),
        ("{{ 1 + 'a' }}", r"line 1, column messages: the chat template of the model fails with these messages \(unsup"),
    ],
)
def test_a_template_that_fails_with_one_record(tmp_path, then, message):
    tokenizer = chat_tokenizer("{% if messages[0].content == 'z' %}" + then + "{% endif %}" + GOOD)
    assert rows_of(dialogue_file(tmp_path, "a"), PROMPTS, tokenizer)[0]["prompt"] == "user : a<|im_end|>"
    with pytest.raises(UserError, match=message):
        rows_of(dialogue_file(tmp_path, "z"), PROMPTS, tokenizer)
    assert rows_of(dialogue_file(tmp_path, "b"), PROMPTS, tokenizer)[0]["prompt"] == "user : b<|im_end|>"


@pytest.mark.parametrize(
    "template, mark",
    [
        (CHATML, "<|im_start|> user "),
        ("{% for m in messages %}{{ m.role }} : {{ m.content }}<|im_end|>{% endfor %}", "user : "),
        (  # the BOS and a system message of its own before the first turn, </s> behind a reply
            "<s>[SYS] be kind [/SYS]{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
            "[INST] ",
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", None),  # nothing but a line's end
        ("{% if messages|length > 2 %}{{ raise_exception('two') }}{% endif %}{{ messages[0].content }}", None),
    ],
)
def test_what_a_template_writes_before_a_users_turn(template, mark):
    assert Turns(chat_tokenizer(template)).mark == mark


@pytest.mark.parametrize(
    "text, borders",
    [
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [0, 24]),
        ("Human: a\n\nAssistant: b\n\nHuman: say Human: c\n\nAssistant:", [0, 22]),  # a quoted mark is none
        (" Human: a Assistant: b Human: c Assistant:", [0, 22]),
        ("Human: a Assistant: b Human: c Assistant:", [0, 21]),
        ("x\n\nHuman: a\n\nAssistant:", [1]),
        ("Human: a Assistant:", [0]),
        (" \n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [1, 25]),  # with DeepSpeed-Chat's space
        (" Human: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [0, 23]),
        # What is quoted: of the same form within one turn, and of the other one
        ("\n\nHuman: a\n\nAssistant: b\n\nHuman: c '\n\nHuman: d\n\nAssistant: e'\n\nAssistant:", [0, 24]),
        (" Human: a Assistant: b Human: the film Human: c Assistant:", [0, 22]),
        (" Human: a Assistant: b Human: '\n\nHuman: c\n\nAssistant: d' Assistant:", [0, 22]),
        ("\n\nHuman: ' Human: a Assistant: b Human: c'\n\nAssistant:", [0]),
        # Behind an instruction
        ("x Human: y\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:", [10, 34]),
        # Prose
        ("a b", []),
        ("Review of the film Human: Nature", []),
        ("\n\nHuman: a", []),
        ("She said she was Human: that was all .\n\nSummary:", []),
        ("class A: pass # class Human: pass", []),
        ("An Assistant: helps a Human: being", []),
    ],
)
def test_where_turns_begin(text, borders):
    assert Turns(word_tokenizer()).borders(text) == borders


@pytest.mark.parametrize(
    "system, around",
    [
        ("[INST] <<SYS>> {{ m.content }} <</SYS>> ", ("<<SYS>> ", " <</SYS>>  ")),
        ("[INST] {{ m.content }}\n\n", None),  # where it ends cannot be seen
        ("<<SYS>> {{ m.content }} <</SYS>> [INST] ", None),  # before the turn
        ("", None),
        ("{{ raise_exception('no system messages') }}", None),
    ],
)
def test_what_a_template_writes_around_a_system_message_within_the_first_turn(system, around):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}" + system + "{% elif m.role == 'user' %}"
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'system' %}[INST]{% endif %} {{ m.content }} "
        "[/INST]{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    turns = Turns(chat_tokenizer(template))
    assert turns.mark == "[INST] " and turns.around_system == around
