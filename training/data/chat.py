"""Turns messages into text with the tokenizer's chat template, a program that comes with the model.

For some messages a template may fail, leave texts out, never end, or take all memory. Therefore the template runs in a
separate, forked process, which renders one dialogue after the other. Each rendering has a time limit, and the process
has a memory limit. If the template ends the process, this program goes on, and the next rendering starts a new process.

`Turns` finds the positions at which a user's turn begins, in a dialogue that is given as one text.
"""

import contextlib
import functools
import gc
import json
import os
import queue
import resource
import signal
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from jinja2 import TemplateError

from engine.errors import UserError

SECONDS = 10  # limit of processor time for one dialogue; a good template takes milliseconds
WAIT = 120.0  # limit in seconds of real time for all renderings of one call, also on a busy machine
IDLE = 5.0  # seconds after which an idle process ends: it still holds memory that this process has freed since the fork
MEMORY = 2**30  # bytes that the process may take in addition to those that it has at the fork
LONGEST = 2**26  # limit in characters of a rendered text
REMEDY = "Mend chat_template in its tokenizer_config.json (or chat_template.jinja), or give --chat_template FILE."
TRIAL = "a question and its reply"
# The dialogue with which a template is tried.
TURNS = ({"role": "user", "content": "the-question"}, {"role": "assistant", "content": "the-reply"})


class Rendered(str):
    """A text made by a chat template. The template decides whether the text begins with a BOS; none is added to it."""


def render(tokenizer, messages: list[dict], where: str = "", **options) -> Rendered:
    """Render the messages as one text. options: arguments of apply_chat_template. The other arguments and the errors
    are those of `renderings`."""
    return renderings(tokenizer, [(messages, where, options)])[0]


def renderings(tokenizer, asked: Sequence[tuple[list[dict], str, dict]]) -> list[Rendered]:
    """Render several dialogues; returns their texts. One call for many dialogues is faster than many calls.

    asked: (messages, where, options of apply_chat_template) for each dialogue. `where` names the record and column of
    the messages, for error messages. It is empty for a made-up dialogue, whose texts the template may leave out.
    Raises: UserError if the template cannot render a simple question with its reply, if it cannot render these
    messages, or if it takes too much time or memory for them.
    """
    name = getattr(tokenizer, "name_or_path", None) or "the model"
    broken, lossy = _tried(tokenizer)
    problem = broken or (lossy if any(where for _, where, _ in asked) else None)
    if problem:
        raise UserError(f"the chat template of {name} {problem}. {REMEDY}")
    answers = _process(tokenizer).asked([(messages, options) for messages, _, options in asked], "these messages")
    for (_, where, _), (_, refused, problem) in zip(asked, answers, strict=True):
        place = f"{where}: " if where else ""
        if refused is not None:
            raise UserError(
                f"{place}the tokenizer's chat template refuses these messages ({refused}). Mend the record or take it "
                "out."
            )
        if problem is not None:
            raise UserError(f"{place}the chat template of {name} {problem}. {REMEDY}")
    return [Rendered(text) for text, _, _ in answers]


def template_key(tokenizer) -> str:
    """A key that identifies the tokenizer's chat template."""
    template = tokenizer.chat_template
    return template if isinstance(template, str) else json.dumps(template, default=repr)


_trials: dict[str, tuple[str | None, str | None]] = {}  # the results of `_tried`, by template_key


def _tried(tokenizer) -> tuple[str | None, str | None]:
    """(why the template cannot be used at all, why it cannot be used for the data's messages); each is None if it
    can."""
    template = template_key(tokenizer)
    if template not in _trials:
        ((_, lossy, broken),) = _process(tokenizer).asked([None], TRIAL)
        _trials[template] = broken, lossy
    return _trials[template]


def _loss(tokenizer) -> str | None:
    """A description of the texts that the template leaves out, or None. Dialogues of several kinds are rendered, which
    also shows whether the template ends for each of them."""

    def text(turns: list[dict], **options) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options)

    (question, reply), lossy = TURNS, None
    for turns, options in (([question, reply], {}), ([question], {"add_generation_prompt": True})):
        found = text(turns, **options)
        lost = [turn["content"] for turn in turns if not isinstance(found, str) or turn["content"] not in found]
        if lost:
            lossy = f"leaves texts out: of {' and '.join(lost)} nothing is in {_short(repr(found))}"
    for turns in (
        [{"role": "system", "content": "be-kind"}, question, reply],
        [question, reply] * 32,
        [{**question, "content": "the-question " * 1000}, reply],
    ):
        with contextlib.suppress(
            TemplateError, TypeError, ValueError
        ):  # the template may refuse a dialogue, but must end
            text(turns)
    return lossy


def _process(tokenizer) -> "_Process":
    return _process_of(tokenizer, template_key(tokenizer), repr(tokenizer.special_tokens_map), os.getpid())


@functools.lru_cache(maxsize=16)
def _process_of(tokenizer, *as_it_is) -> "_Process":
    return _Process(tokenizer)


Request = tuple[list[dict], dict] | None  # messages and options; None for a trial
Answer = tuple[str | None, str | None, str | None]  # the text; why the template refuses or loses texts; other errors


class _Process:
    """The process in which a tokenizer's template runs. It is forked when needed, and again after it has ended."""

    def __init__(self, tokenizer):
        self.tokenizer, self._lock = tokenizer, threading.Lock()
        self._pipe: Connection | None = None

    def asked(self, requests: list[Request], what: str) -> list[Answer]:
        """The answer to each request; for a request without an answer: (None, None, what went wrong with `what`)."""
        with self._lock:
            answers, problem = self._told(requests, what)
        if problem is None:
            return answers
        if len(requests) > 1:  # ask one by one, to find the request at which the process ended
            return [answer for request in requests for answer in self.asked([request], what)]
        return [(None, None, problem)]

    def _told(self, requests: list[Request], what: str) -> tuple[list[Answer], str | None]:
        while True:
            kept = self._pipe is not None
            if not kept:
                self._pipe = self._begun()
            try:
                self._pipe.send((requests, what))
                if self._pipe.poll(WAIT):
                    return json.loads(self._pipe.recv_bytes()), None  # not a pickle, which could run code here
                os.kill(self._child, signal.SIGPROF)
            except RecursionError as error:
                return [], f"cannot be given {what} ({_line(error)})"
            except (EOFError, OSError):  # the process has ended meanwhile
                pass
            self._pipe, status = None, self._statuses.get()
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                return [], f"had not ended {what} after {SECONDS} seconds"
            if not kept:  # a process kept from an earlier call may have been ended by others: retry with a new one
                return [], "takes Python down with it"

    def _begun(self) -> Connection:
        ours, theirs = Pipe()
        with warnings.catch_warnings():  # Python warns of forks beside threads; the child waits for none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = child = os.fork()
        if child == 0:
            _answer_requests(self.tokenizer, theirs)
        theirs.close()
        self._statuses = statuses = queue.SimpleQueue[int]()
        threading.Thread(target=lambda: statuses.put(os.waitpid(child, 0)[1]), daemon=True).start()
        return ours


def _answer_requests(tokenizer, pipe: Connection) -> None:
    """The main loop of the process; it ends with status 0 when no more requests come."""
    status = 1
    try:
        gc.freeze()  # existing objects, such as tensors on the GPU, must not be destroyed in this process
        signal.set_wakeup_fd(-1)
        for each, handler in (("PROF", signal.SIG_DFL), ("TERM", signal.SIG_DFL), ("INT", signal.SIG_IGN)):
            signal.signal(getattr(signal, f"SIG{each}"), handler)
        os.closerange(
            3, pipe.fileno()
        )  # locks, and connections of the parent, which end only when all have closed them
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        with contextlib.suppress(OSError):  # raised on a system without /proc
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            most, (_, hard) = taken + MEMORY, resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        while pipe.poll(IDLE):
            requests, what = pipe.recv()
            answers = []
            for request in requests:
                signal.setitimer(signal.ITIMER_PROF, SECONDS)
                answers.append(_answer(tokenizer, request, what))
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(json.dumps(answers).encode())
        status = 0
    except (EOFError, OSError):  # the parent is gone
        status = 0
    finally:
        os._exit(status)


def _answer(tokenizer, request: Request, what: str) -> Answer:
    try:
        if request is None:
            return None, _loss(tokenizer), None
        messages, options = request
        try:
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except TemplateError as error:
            return None, _line(error), None
        if len(text) > LONGEST:
            return None, None, f"makes {len(text):,} characters of {what}; at most {LONGEST:,} are taken"
        return text, None, None
    except MemoryError:
        return None, None, f"takes more than {MEMORY >> 30} GB of memory for {what}"
    except Exception as error:  # a template's mistakes may raise anything
        return None, None, f"fails with {what} ({_line(error)})"


def _line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: object) -> str:
    line = str(text) if str(text).isprintable() and str(text) else repr(text)
    return line if len(line) <= 200 else line[:200] + "..."


# (mark before a user's turn, mark before an answer) in dialogues that are written as one text: in Anthropic/hh-rlhf and
# similar data sets, and in data sets whose lines were joined.
FORMS = (("\n\nHuman:", "\n\nAssistant:"), (" Human:", " Assistant:"))
SYSTEM = "the-system-message"


class Turns:
    """Finds where users' turns begin in a text: at the mark that the tokenizer's chat template writes before each of
    them, or at words such as "Human:" in plain texts.

    mark: the template's mark, if it has one. around_system: the texts that the template writes before and after the
    system message, if it writes the system message within the first user's turn, as Llama-2's template does. None if
    the template writes the system message elsewhere, or if the system message cannot be told apart from the user's
    words.
    """

    def __init__(self, tokenizer):
        self.mark = _mark_of_template(tokenizer)
        self.around_system = _around_system(tokenizer, self.mark) if self.mark else None

    def borders(self, text: str) -> list[int]:
        """The positions at which users' turns (with their marks) begin, in rising order; empty if there are no turns.

        Only marks of one form count, since marks of another form may be quotations. This is the form whose mark begins
        the text; otherwise the template's form if its mark occurs; otherwise the form with the most turns.
        """
        found = [
            (text.lstrip(" ").startswith(form[0]) or text.startswith(form[0]), _alternating(text, *form))
            for form in FORMS
        ]
        begun = [borders for begins, borders in found if begins and borders]
        if begun:
            return begun[0]
        # A template's mark does not occur as a word of a text, so the marks before answers need not be looked for.
        if self.mark and (borders := _alternating(text, self.mark, "")):
            return borders
        return max((borders for _, borders in found), key=len)

    def head(self, text: str) -> tuple[str, list[int]]:
        """(the head, which is the text before the first turn; the positions at which the rest of the text may begin
        when the text is cut).

        A system message within the first turn, and the mark before the system message, belong to the head. The rest may
        then begin right after the system message, or right after the mark of a later turn.
        """
        borders = self.borders(text)
        if not borders:
            return "", []
        if self.around_system and text.startswith(self.mark, borders[0]):
            before, behind = self.around_system
            first = borders[0] + len(self.mark)
            end = text.find(behind, first + len(before)) if text.startswith(before, first) else -1
            if end >= 0:
                end += len(behind)
                return text[:end], [end, *(border + len(self.mark) for border in borders[1:])]
        return text[: borders[0]], borders


def _alternating(text: str, user: str, answerer: str) -> list[int]:
    """The positions of the user's marks that begin a turn: the first mark of a user, and the next one after each mark
    of an answer.

    Empty if no mark of an answer follows a user's mark: the user's mark is then an ordinary word of the text.
    """
    found, answered = [], False
    place = 0 if text.lstrip(" ").startswith(user.lstrip()) else text.find(user)
    while place >= 0:
        found.append(place)
        answer = text.find(answerer, place + 1)
        answered |= answer >= 0
        place = text.find(user, answer) if answer >= 0 else -1
    return found if answered else []


def _mark_of_template(tokenizer) -> str | None:
    """The text that the chat template writes before a user's message; None without a template, or if the template
    writes nothing there."""
    if not tokenizer.chat_template:
        return None
    question, reply = TURNS
    following = {**question, "content": "the-next-one"}
    try:
        text, ended = render(tokenizer, [question, reply, following]), render(tokenizer, [question, reply])
    except UserError:  # the template refuses a third message
        return None
    before, _, rest = text.partition(question["content"])
    between, found, _ = rest.partition(reply["content"])[2].partition(following["content"])
    if not found:
        return None
    # What stands before the first question may include a system message; what stands before the next question includes
    # the end of the reply. The mark is the part that both have in common.
    mark = os.path.commonprefix([before[::-1], between[::-1]])[::-1]
    end = ended.rpartition(reply["content"])[2]
    if between.startswith(end):
        mark = mark[-(len(between) - len(end)) :] if len(between) > len(end) else ""
    return mark if mark.strip() else None


def _around_system(tokenizer, mark: str) -> tuple[str, str] | None:
    """(the text before, the text after) the system message, if the template writes the system message after the first
    user's mark; else None."""
    try:
        text = render(tokenizer, [{"role": "system", "content": SYSTEM}, *TURNS])
    except UserError:  # the template refuses a system message
        return None
    before, found, behind = text.partition(SYSTEM)
    behind, asked, _ = behind.partition(TURNS[0]["content"])
    _, marked, before = before.rpartition(mark)
    inside = found and asked and marked and mark not in behind
    return (before, behind) if inside and before.strip() and behind.strip() else None
