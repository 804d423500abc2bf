"""What is sent to a reward server, and what it answers: JSON in one of two forms. Computation alone; no network.

    body = encoded("items", [Item("7.0", "What is 2 + 2?", " 4", {"answer": "4"})])
    scores = decoded("items", b'{"scores": [{"id": "7.0", "score": 1.0}]}', items)

items is a form of ours, in which ids say which score is whose:

    {"items": [{"id": "7.0", "prompt": "...", "response": "...", "ended": true, "answer": "4"}, ...]}
    {"scores": [{"id": "7.0", "score": 1.0}, ...]}            in any order

openrlhf is what OpenRLHF's trainer sends, so that servers which were written for it serve here:

    {"query": ["prompt and response", ...], "prompts": ["...", ...], "labels": ["...", ...]}
    {"rewards": [1.0, ...], "scores": [...], "extra_logs": {...}}      rewards in the order of the queries

Sources: OpenRLHF/OpenRLHF db825a24, openrlhf/utils/agent.py, `SingleTurnAgentExecutor._fetch_rewards_via_http` (queries
are texts with their special tokens, without padding; labels are "" where the data have none: `preprocess_data` in
openrlhf/datasets/prompts_dataset.py of the same commit), and 58ec6ffd, openrlhf/cli/serve_rm.py, `get_reward`. Of its
answer `rewards` is what is learned from there, and here. Its `scores`, by which it leaves groups out, and `extra_logs`
are not read.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.errors import shortened
from engine.json_objects import RepeatedName, unique

OWN_FIELDS = ("id", "prompt", "response", "ended")
"""Names of an item's fields that no column of the data can have."""
LARGEST = 3.4028234663852886e38  # of float32


@dataclass(frozen=True, slots=True)
class Item:
    """A response that is to be scored.

    id: unlike those of all others of a request. columns: of the data's row that the prompt came from. ended: whether
    the response came to an end of its own, which its text does not say: a model that scores reads that end, too.
    """

    id: str
    prompt: str
    response: str
    columns: Mapping[str, object]
    ended: bool = True


class WrongAnswer(ValueError):
    """An answer that is none: its message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Form:
    """How items become a request's JSON, and how an answer's JSON becomes scores in their order.

    health: a name beside the URL's last part which GET answers where the server is well; None where there is none.
    special_tokens: whether texts hold them. most_columns: of the data, that a request has room for; None for any.
    """

    request: Callable[[Sequence[Item]], dict]
    scores: Callable[[dict, Sequence[Item]], list]
    health: str | None
    special_tokens: bool
    most_columns: int | None


def encoded(form: str, items: Sequence[Item]) -> bytes:
    """The request's body. Raises: ValueError for a column that holds what JSON cannot say, NaN say."""
    try:
        return json.dumps(FORMS[form].request(items), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise ValueError(f"a column of the data holds what JSON cannot say ({error})") from None


def decoded(form: str, body: bytes, items: Sequence[Item]) -> list[float]:
    """The score of each item, in the items' order. Raises: WrongAnswer, which says what the answer is instead."""
    answer = parsed(body)
    if not isinstance(answer, dict):
        raise WrongAnswer(f"answered {shortened(answer)}, which is no JSON object")
    found = FORMS[form].scores(answer, items)
    for place, value in enumerate(found):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise WrongAnswer(f"answered {shortened(value)} for response {place} of {len(items)}, which is no number")
        if not abs(value) <= LARGEST:
            raise WrongAnswer(f"answered {shortened(value)} for response {place} of {len(items)}, which is not finite")
    return [float(value) for value in found]


def parsed(body: bytes) -> object:
    """What the JSON says. Raises: WrongAnswer where it is none, or says a thing twice."""
    try:
        return json.loads(body, object_pairs_hook=unique)
    except RepeatedName as error:
        what = f"{shortened(error.fields)}, in which {shortened(error.name)} stood {error.count} times"
        raise WrongAnswer(f"answered {what}") from None
    except (ValueError, RecursionError):
        raise WrongAnswer(f"answered {shortened(body[:200])}, which is no JSON") from None


def _items_request(items: Sequence[Item]) -> dict:
    return {
        "items": [{name: getattr(item, name) for name in OWN_FIELDS} | dict(item.columns) for item in items],
    }


def _items_scores(answer: dict, items: Sequence[Item]) -> list:
    entries = _list(answer, "scores")
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str) or "score" not in entry:
            raise WrongAnswer(
                f'answered {shortened(entry)} among its scores; needed {{"id": a text, "score": a number}}'
            )
    given, asked = Counter(entry["id"] for entry in entries), {item.id for item in items}
    for id in given:
        if id not in asked:
            raise WrongAnswer(f"answered a score for the id {shortened(id)}, which it was not asked for")
        if given[id] > 1:
            raise WrongAnswer(f"answered {given[id]} scores for the id {shortened(id)}")
    missing = [item.id for item in items if item.id not in given]
    if missing:
        raise WrongAnswer(
            f"answered {len(entries)} scores for {len(items)} responses; the first id without one is {missing[0]!r}"
        )
    by_id = {entry["id"]: entry["score"] for entry in entries}
    return [by_id[item.id] for item in items]


def _openrlhf_request(items: Sequence[Item]) -> dict:
    labels = [next(iter(item.columns.values()), "") for item in items]
    return {
        "query": [item.prompt + item.response for item in items],
        "prompts": [item.prompt for item in items],
        "labels": labels,
    }


def _openrlhf_scores(answer: dict, items: Sequence[Item]) -> list:
    rewards = _list(answer, "rewards")
    if len(rewards) != len(items):
        raise WrongAnswer(f"answered {len(rewards)} rewards for {len(items)} responses: {shortened(rewards)}")
    return rewards


def _list(answer: dict, name: str) -> list:
    found = answer.get(name)
    if not isinstance(found, list):
        raise WrongAnswer(f'answered {shortened(answer)}; needed an object with a list "{name}"')
    return found


FORMS = {
    "items": Form(_items_request, _items_scores, health="health", special_tokens=False, most_columns=None),
    "openrlhf": Form(_openrlhf_request, _openrlhf_scores, health=None, special_tokens=True, most_columns=1),
}
