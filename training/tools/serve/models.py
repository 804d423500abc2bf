"""Checks and loads the models of the service, draws their responses and computes scores. All models are checked before
the first one is loaded.

Each response is a batch of one row without padding. Tokens are drawn and responses end as in a run, by the same code.
"""

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.errors import UserError
from engine.experience import PromptBatch, Rollout, position_ids
from engine.models.attention import Attention
from engine.models.checking import (
    check_decoding,
    check_policy,
    check_rows,
    check_scorer,
    check_vocabularies,
    own_tokenizer,
    reads_texts,
    step_end_of,
)
from engine.models.config_and_tokenizer import read_config, vocabulary_size
from engine.models.loading import DTYPES, load_policy, load_scorer
from engine.models.policy import Scorer
from engine.rollout.base import SamplingConfig
from engine.rollout.request import Draws, Ends
from engine.zero import accelerator
from training.checkpoints.files import holds_checkpoint
from training.data.chat import render
from training.data.record_forms import PROMPTS
from training.data.tokens import TextEncoder, padded
from training.reward_texts import Answer, Reader, Texts, reading_limit
from training.runtime.models import generation_stops
from training.tools.models import SCORERS, Model, exported, located, named
from training.tools.serve.flags import ServeFlags
from training.tools.serve.requests import Comparison, RequestError

REWARD = "--reward_model_name_or_path"
ROWS = 16  # number of texts in one forward pass of the reward model
CHARACTERS = (
    100  # a text with more characters per token of the context is not tokenised: it may take long, and is too long
)
BEFORE = 8  # prompt tokens that are decoded together with a response: many tokenizers drop a text's first space


@dataclass(slots=True)
class Response:
    """A response that is being drawn. text: without special tokens. reason: None while it is being drawn; then "stop"
    (ended by an end token or a stop text) or "length"."""

    prompt_ids: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers prompts. ends: ids of the tokens that end its responses. gives_texts: whether the reward
    model gets texts in place of this model's ids: (if the prompt is a text, if it is a chat)."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: TextEncoder
    ends: tuple[int, ...]
    gives_texts: tuple[bool, bool] = (False, False)

    @property
    def has_template(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def prompt_ids(self, asked: Comparison, context: int) -> list[int]:
        """The token ids of a request's prompt; a chat is rendered with the chat template. Raises: RequestError."""
        if asked.messages is None:
            text = asked.prompt or ""
        else:
            if not self.has_template:
                told = (
                    f"the tokenizer of {self.name} has no chat template to make a prompt of the messages. Send a "
                    "prompt, which is text, or start the service with --chat_template FILE"
                )
                raise RequestError(400, told, "messages")
            text = render(self.tokenizer, asked.messages, "messages", add_generation_prompt=True)
        check_length(text, context, asked.field)
        ids = self.encoder.prompt(text)
        if not ids:
            raise RequestError(400, f"{asked.field}: the tokenizer makes no tokens of it", asked.field)
        return ids

    def settings(self) -> dict:
        """The fields of SamplingConfig that depend on the model."""
        return {
            "pad_token_id": self.tokenizer.pad_token_id,
            "stop_token_ids": self.ends,
            "vocabulary_size": vocabulary_size(self.tokenizer),
        }

    @torch.inference_mode()
    def drawn(self, prompt_ids: list[int], sampling: SamplingConfig) -> Iterator[Response]:
        """Draw a response; yields it after each token."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        first = torch.zeros(1, dtype=torch.int64, device=ids.device)
        most = sampling.max_new_tokens
        draws = Draws(PromptBatch(ids, torch.ones_like(ids), first, first), sampling, most)
        ends = Ends(self.tokenizer, sampling.stop_token_ids, sampling.stop_strings)
        before = prompt_ids[-BEFORE:]
        known = len(self.tokenizer.decode(before, skip_special_tokens=True))
        response, cache = Response(prompt_ids), {}
        for place in range(most):
            output = self.model(input_ids=ids, **cache, use_cache=True, logits_to_keep=1)
            cache = {name: output[name] for name in ("past_key_values", "cache_params") if name in output}  # or Mamba's
            ids = draws.draw(output.logits[:, -1], first, first + place)
            response.tokens.append(int(ids.item()))
            response.text = self.tokenizer.decode(before + response.tokens, skip_special_tokens=True)[known:]
            ended = ends.first(response.tokens, place) is not None
            response.reason = "stop" if ended else "length" if place + 1 == most else None
            yield response
            if ended:
                return


@dataclass(frozen=True, slots=True)
class ServedScorer:
    """The reward model, and what makes its ids of texts."""

    scorer: Scorer
    reader: Reader

    def scores(self, sequences: Sequence[Sequence[int]], between: Callable[[], None]) -> list[float]:
        """The score of each sequence of token ids (a prompt and its response). As in step 3, the score is read at the
        token at which the reward model was trained to give it, and includes the normalisation that is stored with the
        model.

        between: a function that is called before each forward pass. Raises: RequestError if a score is not finite.
        """
        found: list[float] = []
        device = next(self.scorer.parameters()).device
        for start in range(0, len(sequences), ROWS):
            between()
            rows = [list(ids) for ids in sequences[start : start + ROWS]]
            ids, mask = (tensor.to(device) for tensor in padded(rows, self.reader.tokenizer.pad_token_id))
            with torch.inference_mode():
                scores = self.scorer.sequence_scores(self.scorer(ids, mask, position_ids(mask)), ids, mask)
            found += scores.tolist()
        if not all(map(math.isfinite, found)):
            raise RequestError(500, "the reward model's score is not finite")
        return found

    def item_ids(self, item: dict, place: str) -> list[int]:
        """The token ids of an item of POST /v1/scores, never shortened. Raises: UserError, with the item's place, also
        if its prompt spells a control token."""
        tokenizer, has_messages = self.reader.tokenizer, item.get("messages") is not None
        dialogue = PROMPTS.row(place, item, tokenizer).dialogue if has_messages else None
        self._check_spelt(item["prompt"], dialogue, place)
        answer = Answer(item["prompt"], dialogue, item["response"], item["ended"])
        return replace(self.reader, limit=sys.maxsize).ids([answer])[0]

    def response_ids(self, model: ServedModel, asked: Comparison, response: Response) -> list[int]:
        """The token ids of a response of this model with its prompt, as in a run."""
        if not model.gives_texts[asked.messages is not None]:
            return response.prompt_ids + response.tokens
        texts = Texts(
            tokenizer=model.tokenizer,
            stops=frozenset(model.ends),
            rows=[{"prompt": asked.prompt}],
            dialogues=[None if asked.messages is None else {"messages": asked.messages, "tools": None}],
            messages=asked.messages is not None,
            longest=self.reader.limit,
            rows_at_once=1,
        )
        ids, only = torch.tensor([response.prompt_ids + response.tokens]), torch.zeros(1, dtype=torch.int64)
        mask = torch.ones_like(ids)
        drawn = mask[:, len(response.prompt_ids) :].bool()
        rollout = Rollout(ids, mask, drawn, torch.tensor([response.reason == "stop"]), only, only)
        return self.reader.ids(texts.answers(rollout))[0]

    def check_prompt(self, model: ServedModel, asked: Comparison) -> None:
        """Raise RequestError if a response of this model could not be scored."""
        if not model.gives_texts[asked.messages is not None]:
            return
        if asked.messages is not None and not self.reader.tokenizer.chat_template:
            told = "the reward model has no chat template, and could not score the responses to messages. Send a prompt"
            raise RequestError(400, told, "messages")
        dialogue = None if asked.messages is None else {"messages": asked.messages}
        self._check_spelt(asked.prompt or "", dialogue, asked.field)

    def _check_spelt(self, prompt: str, dialogue: dict | None, place: str) -> None:
        """Raise RequestError if the prompt spells a control token, as runs refuse it."""
        if token := self.reader.spelt(prompt, dialogue):
            told = (
                f"{place}: it spells {token!r}, a control token of the reward model, which would read turns that "
                "nobody took. Send a text that a chat template was applied to as messages; elsewhere take the word out"
            )
            raise RequestError(400, told, place.partition("[")[0])


def check_length(text: str, context: int, place: str) -> None:
    """Raise RequestError if a text has more characters than `context` tokens can have."""
    if len(text) > CHARACTERS * context:
        told = f"{place}: it has {len(text)} characters, too many for {context} tokens"
        raise RequestError(400, told, place.partition("[")[0])


@dataclass(frozen=True, slots=True)
class ServedModels:
    """All models of the service. context: largest number of tokens of prompt and response together; all models that get
    the ids of these tokens have at least so many positions."""

    by_name: dict[str, ServedModel]
    scorer: ServedScorer | None
    context: int


def load_models(args: ServeFlags) -> ServedModels:
    """Check all models, then load them. Raises: UserError."""
    device = accelerator.device()
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else accelerator.natural_dtype())]
    with tempfile.TemporaryDirectory() as folder:  # models in checkpoints are exported into it before they are loaded

        def path_of(model: Model) -> str:
            return exported(model, Path(folder) / model.name).path

        paths = {name: path_of(located(name, path)) for name, path in named(args.models).items()}
        reward = args.reward_model_name_or_path
        if reward is not None and holds_checkpoint(Path(reward)):
            reward = path_of(Model(REWARD, REWARD, reward, reward, is_checkpoint=True, parts=SCORERS))
        context = _check(args, paths, reward)
        models = {name: _model(args, name, path, reward, dtype, device) for name, path in paths.items()}
        texts = any(any(model.gives_texts) for model in models.values())
        scorer = _scorer(args, reward, context, texts, dtype, device) if reward is not None else None
    return ServedModels(models, scorer, context)


def _check(args: ServeFlags, paths: dict[str, str], reward: str | None) -> int:
    """Check configurations, tokenizers and headers of weight files. Returns the context length of the service. Raises:
    UserError."""
    trusted, positions, gets_ids = args.trust_remote_code, [args.max_seq_len], not paths
    for name, path in paths.items():
        what = f"--models {name}"
        config = check_policy(path, what, trusted)
        tokenizer = args.read_tokenizer(path, what)
        check_rows(tokenizer, config, path, what)
        check_decoding(path, what, trusted)
        positions.append(getattr(config, "max_position_embeddings", None) or args.max_seq_len)
        if reward is not None:
            ids = [not reads_texts(tokenizer, reward, REWARD, trusted, messages) for messages in (False, True)]
            gets_ids = gets_ids or any(ids)
            if all(ids):
                check_vocabularies(tokenizer, reward, REWARD, trusted)
    if reward is not None:
        if step_end_of(reward, REWARD, trusted) is not None:
            raise UserError(f"{REWARD} {reward} is a process reward model. Give one that scores whole texts.")
        check_scorer(reward, REWARD, trusted)
        config = read_config(reward, REWARD, trusted)
        if gets_ids:
            positions.append(getattr(config, "max_position_embeddings", None) or args.max_seq_len)
    return min(positions)


def _model(
    args: ServeFlags, name: str, path: str, reward: str | None, dtype: torch.dtype, device: torch.device
) -> ServedModel:
    what, trusted = f"--models {name}", args.trust_remote_code
    tokenizer = args.read_tokenizer(path, what)
    rows = Attention(max_length=args.max_seq_len)
    model = load_policy(path, dtype, what=what, trust_remote_code=args.trust_remote_code, attention=rows).model
    ends = generation_stops(path, tokenizer, trusted)
    by_text, by_chat = (
        reward is not None and reads_texts(tokenizer, reward, REWARD, trusted, messages) for messages in (False, True)
    )
    tokenizer.name_or_path = name  # error messages contain it, and clients should see no paths
    return ServedModel(name, model.to(device).eval(), tokenizer, TextEncoder(tokenizer), ends, (by_text, by_chat))


def _scorer(
    args: ServeFlags, path: str, context: int, texts: bool, dtype: torch.dtype, device: torch.device
) -> ServedScorer:
    """texts: whether a model's responses are given to the reward model as texts, so that its own limit counts."""
    own = own_tokenizer(path, REWARD, args.trust_remote_code)
    tokenizer = own if own is not None and own.chat_template else args.read_tokenizer(path, REWARD)
    tokenizer.name_or_path = "the reward model"
    rows = Attention(max_length=args.max_seq_len)
    scorer = load_scorer(path, dtype, what=REWARD, trust_remote_code=args.trust_remote_code, attention=rows)
    limit = reading_limit(scorer.model.config, None, context) if texts else context
    return ServedScorer(scorer.to(device).eval(), Reader(tokenizer, limit, scorer.score_position == "last"))
