"""What a reward model reads that has a tokenizer or a chat template of its own: texts, written by these.

    read = Reader(tokenizer, limit=1024, by_step_2=False)
    read.ids([Answer("Review : a film", None, " was great", ended=True)])

Messages are rendered by the reward model's template, with the response as the assistant's message. Other prompts are
texts: prompt + response + EOS. A response without an end is closed in the same way, because reward models learn from
whole texts. A model of our step 2, and one of OpenRLHF, gets what step 2 would make of the same record: the text ends
with the first token that ends a turn, and a response without an end has none.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.data import ConcatDataset
from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.errors import UserError
from engine.experience import Rollout
from engine.models.checking import own_tokenizer, reads_texts, step_end_of
from engine.reward.base import RewardModel, decoded
from engine.reward.steps import ProcessRewardModel, StepEnds
from engine.reward.texts import TextRewardModel
from training.data.chat import Rendered, render
from training.data.examples import Prompts
from training.data.files import quoted
from training.data.record_forms import any_of, left_out
from training.data.token_cache import Progress
from training.data.tokens import Fit, Lengths, end_of_turn

WHAT = "--reward_model_name_or_path"
MARK = "the-reply"  # a message that stands for the response


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What turns a rollout into texts.

    tokenizer: the policy's. stops: the ids that end a response. rows, dialogues: by the index of a prompt, its row and
    its `Row.dialogue`. messages: as `all_messages`. longest: the largest number of the policy's tokens of prompt +
    response. rows_at_once: the number of rows of full length in a forward pass. closing: the token that closes a
    response without an end, for a model that reads the policy's ids; None to leave it open.
    """

    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    rows: Sequence[dict]
    dialogues: Sequence[dict | None]
    messages: bool | None
    longest: int
    rows_at_once: int
    trust_remote_code: bool = False
    closing: int | None = None

    @classmethod
    def of(
        cls,
        parts: Sequence[Prompts],
        tokenizer: PreTrainedTokenizerBase,
        stops: Iterable[int],
        cut_responses: str = "open",
        **lengths,
    ) -> "Texts":
        """The Texts of these prompts, which are numbered one part after the other. cut_responses: the dialect's.
        lengths: the further fields."""
        rows, dialogues = (
            ConcatDataset([getattr(prompts, name) for prompts in parts]) for name in ("rows", "dialogues")
        )
        messages = all_messages(parts)
        return cls(
            tokenizer=tokenizer,
            stops=frozenset(stops),
            rows=rows,
            dialogues=dialogues,
            messages=messages,
            closing=closing_token(tokenizer, messages) if cut_responses == "closed" else None,
            **lengths,
        )

    def answers(self, rollout: Rollout) -> list["Answer"]:
        """The responses as texts, without the tokens that end them; other special tokens are spelled out. A response
        that was cut within a character loses this character. The prompts are whole, as the data have them."""
        mask, positions = rollout.response_mask, torch.arange(rollout.response_length, device=rollout.sequences.device)
        last = torch.where(mask, positions, 0).amax(-1, keepdim=True)
        stops = torch.tensor(sorted(self.stops), device=positions.device)
        ends = torch.isin(rollout.responses, stops) & (positions == last) & rollout.ended.unsqueeze(1)
        shown = rollout.cut(mask & ~ends, rollout.ended, self.tokenizer.pad_token_id)
        _, responses = decoded(shown, self.tokenizer, special_tokens=True)
        return [
            Answer(self.rows[index]["prompt"], self.dialogues[index], text if ended else text.rstrip("\ufffd"), ended)
            for index, text, ended in zip(rollout.indices.tolist(), responses, rollout.ended.tolist(), strict=True)
        ]


def all_messages(parts: Iterable[Prompts]) -> bool | None:
    """Whether all prompts were given as messages; None if some were and others were texts."""
    counts = [(prompts.messages, len(prompts)) for prompts in parts]
    messages, prompts = (sum(column) for column in zip(*counts))
    return {0: False, prompts: True}.get(messages)


def closing_token(tokenizer: PreTrainedTokenizerBase, messages: bool | None) -> int | None:
    """The token at the end of a text as step 2 learns it: for messages the one that ends a turn, else EOS. None if the
    tokenizer has none. messages: as `all_messages`."""
    turn = end_of_turn(tokenizer) if messages else None
    return tokenizer.eos_token_id if turn is None else turn


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with its prompt. prompt: the prompt's text. dialogue: its `Row.dialogue`. ended: whether the response
    reached its end."""

    prompt: str
    dialogue: dict | None
    response: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Parts:
    """A text in parts. prompt: what stands before the assistant's turn. lead: what the template writes between the
    prompt and the response. tail: what it writes after the response."""

    prompt: str
    lead: str
    response: str
    tail: str

    @property
    def answer(self) -> str:
        return self.lead + self.response + self.tail


@dataclass
class Reader:
    """Turns answers into the ids that a reward model scores.

    limit: the largest number of ids. by_step_2: whether to write texts as step 2 does. counts: {what was done to a
    response: number of responses}; "read" counts all responses. told: {what was done: digits of the number last told}.
    """

    tokenizer: PreTrainedTokenizerBase
    limit: int
    by_step_2: bool = False
    counts: Counter = field(default_factory=Counter)
    told: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lengths = Lengths(self.tokenizer, self.limit)
        self.control = control_tokens(self.tokenizer)
        closing = end_of_turn(self.tokenizer)
        self.closing = None if closing is None else self.tokenizer.convert_ids_to_tokens(closing)

    def ids(self, answers: Sequence[Answer]) -> list[list[int]]:
        """The ids of each answer. Raises: UserError if the template refuses a dialogue."""
        parts = [self.parts(answer) for answer in answers]
        encoder = self.lengths.encoder
        heads = [part.prompt for part in parts if self.by_step_2]
        encoder.ahead([*heads, *(part.prompt + part.answer for part in parts)])
        found = [self._read(*pair) for pair in zip(answers, parts, strict=True)]
        encoder.ahead([])
        return found

    def parts(self, answer: Answer) -> Parts:
        """The text of an answer with its prompt. Raises: UserError if the template refuses the dialogue."""
        if answer.dialogue is None:
            return Parts(answer.prompt, "", answer.response, "")
        before, _, after = self.rendered(answer.dialogue, MARK).rpartition(MARK)
        try:
            text = self.rendered(answer.dialogue, answer.response)
        except UserError:
            if answer.response.strip():
                raise
            text = before + answer.response + after  # some templates refuse a message without a text
        start = len(os.path.commonprefix([before, text]))
        end = len(text) - len(os.path.commonprefix([after[::-1], text[start:][::-1]]))
        response, tail = text[start:end], text[end:]
        if not _squeezed(text).endswith(_squeezed(answer.response) + _squeezed(tail)):
            self.counts[CHANGED] += 1
        prompt = text[:start]
        if self.by_step_2:
            begun = self.rendered(answer.dialogue, None)
            prompt = begun if prompt.startswith(begun) else prompt
            cut = tail.rfind(self.closing) if self.closing else -1
            tail = tail[: cut + len(self.closing)] if cut >= 0 else tail.rstrip()
            tail = tail if answer.ended else ""
            if answer.ended and not tail:
                response = response.rstrip()
        return Parts(Rendered(prompt), text[len(prompt) : start], response, tail)

    def rendered(self, dialogue: dict, response: str | None, where: str = "the dialogue") -> str:
        """The dialogue with the response; without one (None), up to where the response begins. Raises: UserError, which
        names `where`, if the template refuses the dialogue."""
        messages, options = list(dialogue["messages"]), {"tools": dialogue["tools"]} if dialogue["tools"] else {}
        begun = messages[-1] if messages[-1]["role"] == "assistant" else None  # the response continues this message
        if response is None:
            asked = {"continue_final_message": True} if begun else {"add_generation_prompt": True}
            return render(self.tokenizer, messages, where, **asked, **options)
        if begun:
            said = {**messages.pop(), "content": (begun["content"] or "") + response}
        else:
            said = {"role": "assistant", "content": response}
        return render(self.tokenizer, [*messages, said], where, **options)

    def spelt(self, prompt: str, dialogue: dict | None) -> str | None:
        """The first control token that a prompt spells, apart from a BOS at the start of a text; None if it spells
        none."""
        text = prompt.removeprefix(self.lengths.encoder.spelt_bos(prompt))
        match = self.control.search(text if dialogue is None else json.dumps(dialogue, ensure_ascii=False))
        return match and match[0]

    def _read(self, answer: Answer, parts: Parts) -> list[int]:
        self.counts[READ] += 1
        encoder, spelt = self.lengths.encoder, self.control.search(answer.response) is not None
        self.counts[SPELT] += spelt
        eos = self.tokenizer.eos_token_id
        end = [eos] if answer.dialogue is None and not self.by_step_2 and eos is not None else []
        whole = encoder.prompt(type(parts.prompt)(parts.prompt + parts.answer)) + end
        if len(whole) <= self.limit and not spelt and not self.by_step_2:
            return whole
        head, spanned = encoder.prompt(parts.prompt), 0
        tail = [] if self.by_step_2 else encoder.continuation("\n", parts.tail) + end
        if spelt:
            rest = self._plain(parts) + end
        elif self.by_step_2:
            rest = encoder.continuation(parts.prompt, parts.answer)
        else:
            same = len(os.path.commonprefix([head, whole]))
            rest, spanned = whole[same:], len(head) - same  # a token may span the border
        if self.by_step_2 and answer.ended:
            rest = encoder.ended(rest)
        return self._fitted(parts.prompt, head, rest, tail, spanned)

    def _plain(self, parts: Parts) -> list[int]:
        """The ids of an answer in whose response nothing is a control token."""
        lead, tail = (self.lengths.encoder.continuation("\n", text) for text in (parts.lead, parts.tail))
        for before in ("\n", ""):  # as in `continuation`: a token may span the border
            head, both = (
                self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
                for text in (before, before + parts.response)
            )
            if both[: len(head)] == head:
                break
        return lead + both[len(head) :] + tail

    def _fitted(self, prompt: str, head: list[int], rest: list[int], tail: list[int], spanned: int = 0) -> list[int]:
        """The ids of a prompt and of the rest, cut as `cut_prompt` of training/data/tokens.py says. tail: the ids at
        the end of the rest that stay. spanned: the number of ids at the end of the prompt that belong to the rest."""
        own = len(head) - spanned
        if own + len(rest) <= self.limit:
            return head[:own] + rest
        room = self.lengths.room(Fit(head, [rest], 0))
        shorter, _ = self.lengths.shorter(prompt, head, room + spanned)
        shorter = shorter[: len(shorter) - spanned]
        self.counts[CUT] += len(shorter) < own
        left = self.limit - len(shorter)
        if len(rest) > left:
            if left <= len(tail):
                raise UserError(
                    f"{self.limit} tokens (--max_reward_seq_len) hold nothing of a response, because {len(tail)} "
                    "tokens follow it. Raise the limit, or shorten the chat template."
                )
            self.counts[END_CUT] += 1
            rest = rest[: left - len(tail)] + tail
        return shorter + rest

    def tell(self, name: str) -> None:
        """Print what was done to responses: at the first of each kind, the tenth, the hundredth, and so on. All ranks
        call this together, rank 0 prints. name: the reward model's."""
        counts = sum(distributed.data_parallel_objects(self.counts), Counter())
        for kind in (CUT, END_CUT, SPELT, CHANGED):
            if counts[kind] >= 10 ** self.told[kind]:
                self.told[kind] = len(str(counts[kind]))
                fit = f", to fit {self.limit} tokens (--max_reward_seq_len)" if kind in (CUT, END_CUT) else ""
                if distributed.is_main():
                    print(f"{name}: in {counts[kind]:,} of {counts[READ]:,} responses {kind}{fit}", flush=True)


READ = "read"
CUT = "the prompt lost its beginning"
END_CUT = "the response lost its end"
SPELT = "the response spells a control token of the reward model, which is read as plain text"
CHANGED = "the reward model's chat template leaves out or changes a part of the response"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern:
    """A pattern of the texts of which the tokenizer makes special tokens. The unknown token is none of them: texts may
    contain <unk>."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    return any_of((special | {*tokenizer.all_special_tokens}) - {tokenizer.unk_token})


def check_prompts(prompts: Prompts, reader: Reader, which: str, model: str) -> list[str]:
    """Check that a reward model can read the prompts. Returns a line for the prompts of which its template leaves out
    messages; [] if there are none.

    which: what messages call the prompts. model: what they call the reward model.
    Raises: UserError if there are messages and the model has no chat template, if its template refuses a prompt or
    leaves out the message to be answered, or if the text of a prompt spells one of its control tokens; or if what it
    writes leaves no room for a response.
    """
    tokenizer, spelt, lossy = reader.tokenizer, [], []
    for index in Progress(len(prompts), f"checking {which}").over(range(len(prompts))):
        dialogue = prompts.dialogues[index]
        if dialogue is not None and not tokenizer.chat_template:
            raise UserError(
                f"{model}: it has no chat template, and {which} are messages. Set chat_template in its "
                "tokenizer_config.json to the one that it was trained with, or give texts instead of messages."
            )
        if dialogue is not None:
            messages = dialogue["messages"]
            text = reader.rendered(dialogue, MARK, f"{model}, prompt {index + 1} of {which}")
            lost = [message for message, what, _ in left_out(text, messages)[0] if what != "reasoning"]
            if any(message is messages[-1] for message in lost):
                raise UserError(
                    f"{model}: its chat template leaves out the message that is to be answered, in prompt {index + 1} "
                    f"of {which} ({quoted(str(messages[-1]))}). Correct the record, or the template."
                )
            if lost:
                lossy.append((index, lost[0]["role"]))
        if token := reader.spelt(prompts.rows[index]["prompt"], dialogue):
            spelt.append((index, token))
    if spelt:
        (index, token), count = spelt[0], len(spelt)
        raise UserError(
            f"{model}: {count:,} of {len(prompts):,} of {which} spell its control tokens, first prompt {index + 1}: "
            f"{quoted(token)}. It would read them as turns that nobody took. Give prompts that a chat template was "
            "applied to as messages; elsewhere take these words out."
        )
    try:
        reader.ids([Answer(prompts.rows[0]["prompt"], prompts.dialogues[0], MARK, ended=True)])
    except UserError as error:
        raise UserError(f"{model}: {error}") from None
    if not lossy:
        return []
    (index, role), count = lossy[0], len(lossy)
    return [
        f"WARNING: {model}: its chat template leaves out messages in {count:,} of {len(prompts):,} of {which}, first "
        f"in prompt {index + 1}, of the role {role!r}: it scores without them"
    ]


def reading_limit(config, limit: int | None, longest: int) -> int:
    """The largest number of tokens that a reward model of its own tokenizer reads: the value of --max_reward_seq_len,
    or room for any other tokenizer and template, but never more than the model has positions."""
    wanted = limit or 2 * longest + 64
    return min(wanted, getattr(config.get_text_config(), "max_position_embeddings", None) or wanted)


def step_ends(path: str, tokenizer, given: str | None, trust_remote_code: bool = False) -> StepEnds | None:
    """What ends a step for the reward model at `path`; None if it is not a process reward model.

    tokenizer: the policy's. given: the value of --reward_step_end.
    Raises: UserError if the tokenizer cannot write the text that ends a step.
    """
    found = step_end_of(path, WHAT, trust_remote_code)
    if found is None:
        return None
    text, at_end = found
    what = f"--reward_step_end, or the process reward model {path}"
    return StepEnds(tokenizer, text if given is None else given.replace("\\n", "\n"), at_end, what)


def reward_source(
    model: RewardModel, path: str, texts: Texts, limit: int | None, step_end: str | None = None
) -> RewardModel:
    """The source of a reward model's scores: `model` itself if it reads the policy's ids and leaves cut responses open,
    or one that closes them, or one that gets texts; for a process reward model one that scores steps.

    path: the model's folder. limit, step_end: the values of --max_reward_seq_len and --reward_step_end.
    """
    ends = step_ends(path, texts.tokenizer, step_end, texts.trust_remote_code)
    if ends is not None:
        return ProcessRewardModel(model.model, ends)
    if not reads_texts(texts.tokenizer, path, WHAT, texts.trust_remote_code, texts.messages):
        return model if texts.closing is None else RewardModel(model.model, texts.closing)
    tokenizer = own_tokenizer(path, WHAT, texts.trust_remote_code)
    return text_reward_model(model, tokenizer, texts, limit, f"the reward model {path}")


def text_reward_model(
    model: RewardModel, tokenizer: PreTrainedTokenizerBase, texts: Texts, limit: int | None, name: str
) -> TextRewardModel:
    """The reward model, which gets texts by this tokenizer, its own. name: what messages call it."""
    scorer = model.model.module
    most = reading_limit(scorer.model.config, limit, texts.longest)
    reader = Reader(tokenizer, most, scorer.score_position == "last")
    return TextRewardModel(
        model.model,
        read=lambda rollout: reader.ids(texts.answers(rollout)),
        tell=lambda: reader.tell(name),
        tokens=texts.rows_at_once * most,
        name=name,
    )
