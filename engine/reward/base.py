"""Sources of scores: the base class `RewardSource`, a frozen reward model, and a weighted sum of several sources.

    reward = CombinedReward({"model": (models.rewards[0], 1.0), "function": (FunctionReward(f, tokenizer), 0.5)},
                            length_penalty=0.01)

`AgreedReward` wraps a user's source so that, if it fails on one rank, all ranks stop. `EarlyCalls` calls functions and
servers in threads before their results are needed.
"""

import contextlib
import math
import traceback
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import distributed
from engine.algo.masked import mean_and_variance, moments
from engine.errors import RunStopped, shortened
from engine.experience import Rollout, joined_pieces, position_ids
from engine.trace import traced
from engine.zero.engines import FrozenModel, FrozenRole

ENGINE = Path(__file__).parents[1]
COLUMNS = ("prompt", "response", "turns", "score", "kl", "tokens")
HELD_OUT = (
    *("score", "kl", "response_length", "new_words"),
    *("score_std", "distinct_responses", "distinct_bigrams", "compressed_bytes"),
)
IN_CONVERSATIONS = ("inserted_tokens", "turn_limit", "token_limit", "environment_errors", "unparsed_calls")
LIKELIHOOD = "likelihood"
"""Held-out metrics eval/NAME: of every run; with an environment; with a likelihood_coef."""
OBJECTIVE = (
    *("kl", "kl_per_token", "kl_coef", "entropy", "rlhf_reward", "non_score_reward"),
    *("missing_eos_penalty", "overlong_penalty", "scores_learned", "reward_changed", "scores_histogram", "clipped"),
    *("reference_moves", "likelihood", "likelihood_part"),
)
TAKEN = frozenset(
    [*COLUMNS, *OBJECTIVE]
    + [
        f"{ema}{name}{ending}"
        for ema in ("", "ema_")
        for name in (*HELD_OUT, *IN_CONVERSATIONS, LIKELIHOOD)
        for ending in ("", "_se", "_change", "_change_se")
    ]
)
"""Names that parts of a score cannot have, because a column of the sample tables, or a metric eval/NAME or
objective/NAME, already has the name."""


@runtime_checkable
class RewardSource(Protocol):
    """Scores responses: a reward model, a function, a server, or several of these together.

    A source of your own inherits from this class and implements `score`.
    """

    def score(self, rollout: Rollout) -> Tensor:
        """Returns one score for each response, (B,) float32, or one for each token, (B, T) float32 with T the
        responses' width in this rollout. Numbers at tokens outside the response mask are ignored. The score of a
        response is then the sum over its tokens. All ranks call this together, each with its own responses."""

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """Returns the parts of the score, as {name in metrics and sample tables: (B,) or (B, T) float32}. The score is
        the sum of the parts, each multiplied by its weight in `weights`. Names in `TAKEN` are not allowed.
        """
        return {"scores": self.score(rollout).float()}

    def weights(self) -> Mapping[str, float]:
        """Returns {name of a part: weight} for the parts that have to be multiplied by a weight. By default no part has
        a weight. If a part "scores_NAME" has a weight, the metric reward/NAME reports the part without its weight."""
        return {}

    def measured(self, rollout: Rollout, passes: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns `parts` for all responses of this rank, computed in pieces (all ranks call this together).

        passes: the rows of each piece: int64 tensors that hold each row once, equally many on all ranks.
        """
        return self.in_pieces(self.parts, rollout, passes)

    def in_pieces(
        self, call: Callable[[Rollout], dict[str, Tensor]], rollout: Rollout, passes: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """The results of `call` for the pieces of a rollout, in the order of the rollout's rows. Results (B, T) have
        the rollout's width, and zeros outside the response mask. Only during these calls the source's weights are on
        the device and gathered."""
        with self.on_device(), self.inferring():
            found = [call(rollout.select(rows)) for rows in passes]
        width, mask = rollout.response_length, rollout.response_mask
        joined = {name: joined_pieces([piece[name] for piece in found], passes, width) for name in found[0]}
        return {
            name: part if part.dim() == 1 else torch.where(mask, part, torch.zeros_like(part))
            for name, part in joined.items()
        }

    def begin(self, rollout: Rollout) -> None:
        """Called with finished responses while others are still being drawn. A source may begin to score them here;
        `score` is called later for all responses, in any order. Each rank calls this method on its own. By default the
        method does nothing."""
        return

    def prepare(self, rollout: Rollout) -> None:
        """Called with all responses of this rank before `score` is called for them, in any order and in pieces. A
        source may begin slow work on another machine here; that work goes on while the other models compute. All ranks
        call this together. By default the method does nothing."""
        return

    def on_device(self) -> contextlib.AbstractContextManager:
        """A context in which the source's weights are on the device. By default entering it does nothing."""
        return contextlib.nullcontext()

    def inferring(self) -> contextlib.AbstractContextManager:
        """A context for several calls of `parts`. By default entering it does nothing."""
        return contextlib.nullcontext()


def of_responses(part: Tensor) -> Tensor:
    """A part's number for each response, (B,) float32: of a part (B, T) the sum over the tokens."""
    return part if part.dim() == 1 else part.sum(-1)


def at_once(passes: Sequence[Tensor]) -> list[Tensor]:
    """One pass of all rows, in place of these passes."""
    return [torch.cat(list(passes)).sort().values]


def keys_of(rollout: Rollout) -> list[tuple[int, int]]:
    """A key for each response: (index of the prompt, number of the prompt's sample). It is unique within a PPO step."""
    return list(zip(rollout.indices.tolist(), rollout.samples.tolist(), strict=True))


def decoded(rollout: Rollout, tokenizer, special_tokens: bool = False) -> tuple[list[str], list[str]]:
    """Returns (the texts of the prompts, the texts of the responses). The prompts are those that the policy got, so a
    long prompt has lost its beginning.

    Padding is left out. Special tokens, such as EOS or those of a chat template, are left out unless special_tokens is
    True. If a stop string ended a response, the string is part of the response.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=not special_tokens)
    real = rollout.attention_mask[:, : rollout.prompt_length].bool()
    prompts, responses = [], []
    for row in range(len(rollout)):
        prompt, response = rollout.prompts[row][real[row]], rollout.responses[row][rollout.response_mask[row]]
        text = decode(prompt)
        prompts.append(text)
        responses.append(text_behind(decode, prompt, text, response))
    return prompts, responses


def text_behind(decode: Callable[[Tensor], str], before: Tensor, text: str, tokens: Tensor) -> str:
    """The text of tokens, (N,) int64, that stand behind others, as a response behind its prompt. Both are decoded
    together, because many tokenizers drop the space at the beginning of a text. before, text: the tokens before, and
    the same decoded."""
    whole = decode(torch.cat([before, tokens]))
    return whole[len(text) :] if whole.startswith(text) else decode(tokens)


def positions_of(rollout: Rollout, row: int, tokenizer, ends: Sequence[int]) -> list[int]:
    """The response positions of the tokens in which steps end.

    ends: where each step ends, in characters of the response's text in `decoded`. The step's token is the one that
    completes the character before the end; for 0 it is the first token. A response without tokens has position 0.
    """
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    prompt = rollout.prompts[row][rollout.attention_mask[row, : rollout.prompt_length].bool()].cpu()
    mask = rollout.response_mask[row].cpu()
    response, places, text = rollout.responses[row].cpu()[mask], mask.nonzero().flatten().tolist(), decode(prompt)
    whole = text_behind(decode, prompt, text, response)

    def complete(count: int, end: int) -> bool:
        # A character of which only some bytes are there is decoded as another one.
        return text_behind(decode, prompt, text, response[:count])[:end] == whole[:end]

    def place_of(end: int) -> int:
        count = 1 + bisect_left(range(1, len(places)), True, key=lambda count: complete(count, end))
        # Where each byte is a token, the bytes of an incomplete character also spoil complete ones before it. A
        # character has at most four.
        while earlier := next((one for one in range(count - 1, max(count - 5, 0), -1) if complete(one, end)), 0):
            count = earlier
        return places[count - 1]

    return [place_of(end) if places else 0 for end in ends]


class AgreedReward(RewardSource):
    """Wraps a user's source, so that an exception on one rank stops the run on all ranks before any weight changes.

    name: the source's name in messages.
    """

    def __init__(self, source: RewardSource, name: str):
        self.source, self.name = source, name
        self._kinds: set[tuple[str, int]] = set()

    @classmethod
    def made(cls, source: Callable[[Any], RewardSource], tokenizer, name: str) -> "AgreedReward":
        """The AgreedReward that wraps source(tokenizer). Raises: RunStopped on all ranks if creating the source fails
        on one rank."""
        made, problem = _called(partial(source, tokenizer))
        stop_all_ranks(
            problem and f"{problem} as it was made",
            name,
            "It is made of the tokenizer, once on each rank. Fix its constructor.",
        )
        return cls(made, name)

    def score(self, rollout: Rollout) -> Tensor:
        """The source's score, (B,) or (B, T) float32. Raises: RunStopped on all ranks if the source fails on one
        rank."""
        return self._agreed(self.source.score, rollout)["scores"]

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """The source's parts. Raises: RunStopped on all ranks if the source fails on one rank."""
        whole = type(self.source).parts is RewardSource.parts
        return self._agreed(self.source.score if whole else self.source.parts, rollout)

    def weights(self) -> Mapping[str, float]:
        """The source's weights."""
        return self.source.weights()

    def prepare(self, rollout: Rollout) -> None:
        """Calls the source's `prepare`, if it has one. Raises: RunStopped on all ranks if `prepare` fails on one
        rank."""
        if type(self.source).prepare is RewardSource.prepare:
            return
        _, problem = _called(partial(self.source.prepare, rollout))
        stop_all_ranks(problem, self.name, "It is told which responses come next. Fix its method prepare.")

    def in_pieces(self, call, rollout: Rollout, passes: Sequence[Tensor]) -> dict[str, Tensor]:
        """As in RewardSource. A source is never called without responses: if a rank has none in some pass, because
        ranks compute rows together, all are scored in one call."""
        if distributed.any_rank(not all(map(len, passes))):
            passes = at_once(passes)
        return super().in_pieces(call, rollout, passes)

    def on_device(self) -> contextlib.AbstractContextManager:
        """The source's context."""
        return self.source.on_device()

    def _agreed(self, call: Callable, rollout: Rollout) -> dict[str, Tensor]:
        returned, problem = _called(partial(call, rollout))
        parts = returned if isinstance(returned, dict) else {"scores": returned}
        if problem is None:  # an object of a user's class may raise when its attributes are read
            wrong, raised = _called(partial(_misshapen, parts, rollout.response_mask.shape))
            problem = wrong or raised
        contract = "Have its score return one number a response, a tensor (B,), or one a token, (B, T)."
        stop_all_ranks(problem, self.name, contract)
        stop_if_mixed(self._kinds, {(name, values.dim()) for name, values in parts.items()}, self.name)
        return {name: values.float() for name, values in parts.items()}


def _called(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Returns (the result of the user's code, None), or (None, a description of the exception that it raised).
    RunStopped is not caught, because all ranks raise it."""
    try:
        return call(), None
    except RunStopped:
        raise
    except BaseException as error:  # the user's code may raise anything, also SystemExit
        return None, f"raised {described(error)}"


def _misshapen(parts: dict, shape: torch.Size) -> str | None:
    for name, values in parts.items():
        if name in TAKEN or (name == "scores" and len(parts) > 1):
            return f"calls a part of its score {name!r}, which is the name of something else that is measured"
        if not isinstance(values, Tensor):
            return f"returned {shortened(values)}, which is not a tensor"
        if values.shape not in (shape[:1], shape):
            width = "" if values.dim() < 2 else f" of {shape[1]} positions"
            return f"returned a tensor of shape {tuple(values.shape)} for {shape[0]} responses{width}"
    return None if parts else "returned nothing"


def stop_all_ranks(problem: str | None, name: str, contract: str) -> None:
    """Raise RunStopped on all ranks if one of them has a problem with the user's code (all ranks call this together).

    problem: what went wrong on this rank, or None if nothing did. name, contract: the beginning and the end of the
    message.
    """
    problems = [text for text in distributed.all_gather_objects(problem) if text is not None]
    if problems:
        raise RunStopped(f"{name} {problems[0]}. {contract}", good_until=math.inf)


def stop_if_mixed(kinds: set[tuple[str, int]], found: set[tuple[str, int]], name: str) -> None:
    """Raise RunStopped on all ranks if a part of the score has one number a response here and numbers of tokens there
    (all ranks call this together): a run treats the two differently.

    kinds: pairs (name of a part, number of dimensions) of all calls so far on all ranks; those in `found` are added.
    """
    kinds.update(*distributed.all_gather_objects(found))
    if len(kinds) > len({part for part, _ in kinds}):
        raise RunStopped(
            f"{name} returned one number for some responses, and numbers of steps or tokens for others. Have it return "
            "the same for all: a response without steps has an empty list, or zeros.",
            good_until=math.inf,
        )


def described(error: BaseException) -> str:
    """A description of the exception that the user's code raised, with the deepest line in the user's file. No line is
    named if this package raised it. It can be printed, whatever the exception says."""
    frames = list(traceback.extract_tb(error.__traceback__))
    inside = [place for place, frame in enumerate(frames, start=1) if Path(frame.filename).is_relative_to(ENGINE)]
    frames = frames[max(inside, default=1) :]  # the function that caught it stands first
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    place = f" ({own[-1].filename}, line {own[-1].lineno}: {own[-1].line})" if own else ""
    try:
        said = str(error)[:300]
    except Exception:  # the user's class fails in this, too
        said = "(without a text)"
    return f"{type(error).__name__}: {said.encode(errors='backslashreplace').decode()}{place}"


Steps = list[tuple[int, float]]  # (end of a step in characters of the response's text, its number)
Numbers = tuple[Sequence[float | Steps], str | None]  # (what each response got, None), or ([], what went wrong)


class EarlyCalls:
    """Scores responses in threads before the scores are needed.

    threads: the largest number of calls that run at the same time.
    """

    def __init__(self, threads: int = 1) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="reward")
        self._begun: dict[Hashable, tuple[Any, Future[Numbers], int]] = {}

    def begin(self, keys: Sequence[Hashable], texts: Sequence[Any], call: Callable[[], Numbers]) -> None:
        """Begin `call`, which scores responses, in a thread. keys, texts: a key and the texts of each response. `taken`
        returns a response's score if it gets the same key and texts. call: a function that must not raise."""
        future = self._pool.submit(call)
        self._begun |= {key: (text, future, place) for place, (key, text) in enumerate(zip(keys, texts, strict=True))}

    def left(self, keys: Sequence[Hashable], texts: Sequence[Any]) -> list[int]:
        """The positions of the responses whose score has to be computed: no call has begun with the same key and texts,
        or `taken` has already returned the score."""
        pairs = enumerate(zip(keys, texts, strict=True))
        return [place for place, (key, text) in pairs if key not in self._begun or self._begun[key][0] != text]

    def taken(self, keys: Sequence[Hashable], texts: Sequence[Any]) -> tuple[dict[int, float | Steps], str | None]:
        """Wait for the calls that were begun with the same keys and texts, and forget them. Returns: {position of a
        response: its score}, and a text that says what went wrong in one of the calls, or None."""
        found: dict[int, float | Steps] = {}
        problem = None
        for place, (key, text) in enumerate(zip(keys, texts, strict=True)):
            begun, future, position = self._begun.pop(key, (None, None, 0))
            if future is None or begun != text:
                continue
            values, wrong = future.result()
            problem = problem or wrong
            if not wrong:
                found[place] = values[position]
        return found, problem


def closed(rollout: Rollout, token: int) -> tuple[Tensor, Tensor]:
    """(token ids, attention mask) of a rollout in which `token` stands behind every response that has no end, unless
    its last token is that already: (B, S + 1) int64 each."""
    ids, mask = F.pad(rollout.sequences, (0, 1), value=token), F.pad(rollout.attention_mask, (0, 1))
    behind = rollout.prompt_length + rollout.response_mask.sum(-1, keepdim=True)
    cut = ~rollout.ended.unsqueeze(-1) & (ids.gather(1, behind - 1) != token)
    ids = ids.scatter(1, behind, torch.where(cut, token, ids.gather(1, behind)))
    return ids, mask.scatter(1, behind, torch.where(cut, 1, mask.gather(1, behind)))


class RewardModel(RewardSource):
    """The frozen reward model, in its own engine or as a role in another model's engine. A score is read at the token
    at which the model was trained to score.

    models: the reward model's own engine, in a list; empty if it has none. closing: the token that closes a response
    without an end; None to leave such a response open.
    """

    def __init__(self, model: FrozenModel | FrozenRole, closing: int | None = None):
        self.model, self.closing = model, closing
        self.models = [model] if isinstance(model, FrozenModel) else []

    @property
    def normalised(self) -> bool:
        """Whether the model's folder normalises its scores. Step 2 writes the offset that brings their mean to 0."""
        return self.model.module.offset != 0

    @traced("reward model")
    def score(self, rollout: Rollout) -> Tensor:
        """The scores, (B,) float32, normalised as the reward model's folder says."""
        ids, mask = rollout.sequences, rollout.attention_mask
        if self.closing is not None:
            ids, mask = closed(rollout, self.closing)
        return self.model.module.sequence_scores(self.model(ids, mask, position_ids(mask)), ids, mask)

    def on_device(self):
        """A context in which the weights are on the device."""
        return self.model.on_device()

    def inferring(self):
        """A context in which the weights are gathered once."""
        return self.model.inferring()


class EnvironmentReward(RewardSource):
    """What the environment gave for the turns of its conversations (engine/rollout/conversations.py)."""

    def score(self, rollout: Rollout) -> Tensor:
        """The rewards of turns, (B, T) float32, each at the last token that the policy drew in its turn."""
        assert rollout.turn_rewards is not None, "no environment has answered these responses"
        return rollout.turn_rewards


def sum_in_words(terms: Sequence[tuple[str, float]], length_penalty: float = 0.0) -> str:
    """The formula of a CombinedReward as a text: "0.5 reward model + 0.5 right - 0.01 a token".

    terms: a pair (description, weight) for each source.
    """
    if length_penalty:
        terms = [*terms, ("a token", -length_penalty)]
    (first, weight), *others = terms
    if not others and weight == 1.0:
        return first
    signed = [f"{'-' if number < 0 else '+'} {abs(number):g} {what}" for what, number in others]
    return " ".join([f"{weight:g} {first}", *signed])


class CombinedReward(RewardSource):
    """sum over sources of weight * score - length_penalty * tokens

    The dialect later scales and clips this sum, and changes it for responses without an end. The sources score one
    after the other, so the weights of at most one are on the device.

    Args:
        sources: {name: (source, weight)}.
        length_penalty: subtracted for each sampled token, EOS included.
        standardised: {name of a source that scores whole responses: the Standardisation of its scores}. The other
            sources' scores are taken as they are.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[RewardSource, float]],
        *,
        length_penalty: float = 0.0,
        standardised: Mapping[str, "Standardisation"] | None = None,
    ):
        assert sources, "a score needs at least one source"
        self.sources, self.length_penalty = dict(sources), length_penalty
        self.standardised = dict(standardised or {})

    def score(self, rollout: Rollout) -> Tensor:
        """The weighted sum of the scores, with the length penalty: (B,) float32. Numbers of tokens are added up."""
        weights = self.weights()
        parts = [weights.get(name, 1.0) * of_responses(part) for name, part in self.parts(rollout).items()]
        return torch.stack(parts).sum(0)

    def parts(self, rollout: Rollout) -> dict[str, Tensor]:
        """{name: (B,) or (B, T) float32}: "scores_NAME" is the score of the source NAME without its weight;
        "length_penalty", if a length penalty is set, is the penalty as a negative number.
        """
        return self.measured(rollout, [torch.arange(len(rollout), device=rollout.sequences.device)])

    def measured(self, rollout: Rollout, passes: Sequence[Tensor]) -> dict[str, Tensor]:
        """As `parts`, with the sources' calls in pieces."""
        parts = {}
        for name, (source, _) in self.sources.items():
            scores = source.in_pieces(partial(RewardSource.parts, source), rollout, passes)["scores"]  # as one part
            if name in self.standardised:
                scores = self.standardised[name](scores, rollout)
            parts[f"scores_{name}"] = scores
        if self.length_penalty:
            parts["length_penalty"] = -self.length_penalty * rollout.actions.sum(-1).float()
        return parts

    def state_dict(self) -> dict:
        """The state of each Standardisation, by its place: names may change when folders move."""
        return {"standardised": [one.state_dict() for one in self.standardised.values()]}

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned."""
        for one, kept in zip(self.standardised.values(), state["standardised"], strict=True):
            one.load_state_dict(kept)

    def weights(self) -> Mapping[str, float]:
        """{name of a part: weight of its source}. A source with weight 0 does not change the score and is only
        reported."""
        return {f"scores_{name}": weight for name, (_, weight) in self.sources.items()}

    def begin(self, rollout: Rollout) -> None:
        """Call `begin` of each source."""
        for source, _ in self.sources.values():
            source.begin(rollout)

    def prepare(self, rollout: Rollout) -> None:
        """Call `prepare` of each source."""
        for source, _ in self.sources.values():
            source.prepare(rollout)


SMALLEST_DEVIATION = 1e-6
"""Of a mean of 1: a smaller standard deviation of float32 scores is rounding."""


class Standardisation:
    """Makes scores comparable: (score - mean) / standard deviation. Mean and deviation are those of the first batch of
    scores, over all ranks. The deviation is computed with n - 1.

    name: the name of what gives the scores, for messages.
    """

    def __init__(self, name: str):
        self.name = name
        self.totals: Tensor | None = None  # (3,) float64: count, sum and sum of squares of the first batch

    def __call__(self, scores: Tensor, rollout: Rollout) -> Tensor:
        """The standardised scores, (B,) float32 (all ranks call this together). A response that several ranks have
        counts once: an evaluation may need it to give all ranks equally many.

        If a score of the first batch is NaN or infinite, the scores stay as they are: the run ends with them. Raises:
        RunStopped on all ranks if all scores of the first batch are equal.
        """
        if self.totals is None:
            own = dict(zip(keys_of(rollout), scores.tolist(), strict=True))
            found = {key: score for rank in distributed.data_parallel_objects(own) for key, score in rank.items()}
            first = torch.tensor([found[key] for key in sorted(found)])
            totals = moments(first, torch.ones_like(first, dtype=torch.bool))
            if not totals.isfinite().all():
                return scores
            self._begin(totals)
        assert self.totals is not None
        mean, variance = mean_and_variance(self.totals, unbiased=True)
        return ((scores.double() - mean.item()) / variance.sqrt().item()).float()

    def _begin(self, totals: Tensor) -> None:
        mean, variance = (number.item() for number in mean_and_variance(totals, unbiased=True))
        count = int(totals[0])
        if not variance > SMALLEST_DEVIATION**2 * mean**2 or count < 2:
            raise RunStopped(
                f"{self.name} gave the first {count} responses the same score, {mean:g}: without a standard deviation "
                "its scores cannot be made comparable to those of other reward models. Give --raw_reward_scores, or "
                "larger batches (--per_device_generation_batch_size, --num_eval_prompts).",
                good_until=math.inf,
            )
        self.totals = totals
        if distributed.is_main():
            scale = f"(score {'-' if mean >= 0 else '+'} {abs(mean):.6g}) / {variance**0.5:.6g}"
            print(f"{self.name}: its scores become {scale}, by the first {count} responses", flush=True)

    def state_dict(self) -> dict:
        """The sums of the first batch, for a checkpoint."""
        return {"totals": None if self.totals is None else self.totals.tolist()}

    def load_state_dict(self, state: dict) -> None:
        """Restore the sums that `state_dict` returned."""
        self.totals = None if state["totals"] is None else torch.tensor(state["totals"], dtype=torch.float64)
