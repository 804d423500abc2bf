"""Messages as text, by the tokenizer's chat template: a program that came with the model.

It may be broken, leave texts out, never end, or take all memory. So it is tried before it is used, in a process of its
own that may be stopped, and each use has a limit of time.
"""

import contextlib
import functools
import json
import os
import resource
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from jinja2 import TemplateError

from engine.errors import UserError

SECONDS = 10  # of processor time for one dialogue; a good template takes milliseconds
WAIT = 120.0  # seconds, for the trial as a whole, on however busy a machine
MEMORY = 2**30  # bytes that a trial may take
REMEDY = "Mend chat_template in its tokenizer_config.json (or chat_template.jinja), or give --chat_template FILE."
# A question and its reply, with which a template is tried.
TURNS = ({"role": "user", "content": "the-question"}, {"role": "assistant", "content": "the-reply"})


class Rendered(str):
    """A text that a chat template made: whether it begins with a BOS, the template has decided."""


class _Endless(BaseException):
    """What ends a rendering; no Exception, so that nothing on the way takes it for one of its own."""


def render(tokenizer, messages: list[dict], where: str = "", **options) -> Rendered:
    """The text of the messages; `options` as of apply_chat_template.

    where: the record and column that they stand in; none for an example, of which a template may leave texts out.
    Raises: UserError for a template that cannot render a question and its reply, or these messages, or does not end.
    """
    name = getattr(tokenizer, "name_or_path", None) or "the model"
    broken, lossy = _tried(tokenizer)
    problem = broken or (lossy if where else None)
    if problem:
        raise UserError(f"the chat template of {name} {problem}. {REMEDY}")
    place = f"{where}: " if where else ""
    try:
        with _limited_time():
            return Rendered(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except TemplateError as error:
        raise UserError(
            f"{place}the tokenizer's chat template refuses these messages ({_line(error)}). Mend the record or take "
            "it out."
        ) from None
    except _Endless:
        raise UserError(
            f"{place}the chat template of {name} had not ended these messages after {SECONDS} seconds. {REMEDY}"
        ) from None
    except Exception as error:  # whatever a template's own mistakes lead to
        raise UserError(
            f"{place}the chat template of {name} fails with these messages ({_line(error)}). {REMEDY}"
        ) from (None)


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    """Raises _Endless in what is done within after SECONDS of processor time; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, 1)  # again and again: Python swallows what a destructor raises
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


Found = tuple[str | None, str | None]  # why a template cannot be used, and why not for data, or None
_found: dict[str, Found] = {}  # by the template's text


def template_key(tokenizer) -> str:
    """By which chat templates are told apart."""
    return json.dumps(tokenizer.chat_template, default=repr)


def _tried(tokenizer) -> Found:
    template = template_key(tokenizer)
    if template not in _found:
        _found[template] = _in_child(functools.partial(_problems, tokenizer))
    return _found[template]


def _problems(tokenizer) -> Found:
    """What is wrong with the template, as dialogues of several kinds show it."""

    def text(turns: list[dict], **options) -> str:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options)

    (question, reply), lossy = TURNS, None
    try:
        for turns, options in (([question, reply], {}), ([question], {"add_generation_prompt": True})):
            found = text(turns, **options)
            lost = [turn["content"] for turn in turns if not isinstance(found, str) or turn["content"] not in found]
            if lost:
                lossy = f"leaves texts out: of {' and '.join(lost)} nothing is in {_short(repr(found))}"
    except MemoryError:
        raise
    except Exception as error:  # whatever a template's own mistakes lead to
        return f"cannot render a question and its reply ({_line(error)})", None
    for turns in (
        [{"role": "system", "content": "be-kind"}, question, reply],
        [question, reply] * 32,
        [{**question, "content": "the-question " * 1000}, reply],
    ):
        with contextlib.suppress(TemplateError, TypeError, ValueError):  # not all have to be admitted, only to end
            text(turns)
    return None, lossy


def _in_child(find: Callable[[], Found]) -> Found:
    """What `find()` returns in a process with limits of time and memory, or that it came to these."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # Python's, of threads: the child calls nothing that waits for one
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _child(find, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read() if select.select([pipe], [], [], WAIT)[0] else b""
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if answer:
        return tuple(json.loads(answer))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        return f"had not ended a question and its reply after {SECONDS} seconds", None
    return "takes Python down with it", None


def _child(find: Callable[[], Found], writing: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CPU, int(sum(os.times()[:2])) + SECONDS)
        with contextlib.suppress(OSError):  # of a system without /proc
            _limit(resource.RLIMIT_AS, _taken() + MEMORY)
        try:
            answer = find()
        except MemoryError:
            answer = f"takes more than {MEMORY >> 30} GB of memory for a question and its reply", None
        os.write(writing, json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _taken() -> int:
    """Bytes of addresses that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: object) -> str:
    line = str(text) if str(text).isprintable() and str(text) else repr(text)
    return line if len(line) <= 200 else line[:200] + "..."
