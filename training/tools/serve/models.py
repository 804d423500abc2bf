"""Checks and loads the models of the service. All models are checked before the first one is loaded."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from engine.errors import UserError
from engine.models.attention import Attention
from engine.models.checking import check_attention, check_policy, check_rows, check_scorer, check_vocabularies
from engine.models.loading import DTYPES, load_policy, load_scorer
from engine.models.places import base_of
from engine.models.policy import Scorer
from engine.models.reading import has_tokenizer, read_config, vocabulary_size
from engine.zero import accelerator
from training.checkpoints.files import holds_point
from training.data.tokens import TextEncoder
from training.runtime.models import generation_stops
from training.tools.models import SCORERS, Model, exported, located
from training.tools.serve.decoder import Decoder
from training.tools.serve.flags import ServeFlags

REWARD = "--reward_model_name_or_path"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that answers prompts. ends: ids of the tokens that end its responses. longest_token: number of characters
    of the tokenizer's longest token."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    encoder: TextEncoder
    ends: frozenset[int]
    decoder: Decoder
    longest_token: int

    @property
    def has_template(self) -> bool:
        """Whether the model's tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)


@dataclass(frozen=True, slots=True)
class ServedScorer:
    """The reward model, and the encoder that tokenises texts for it. longest_token: number of characters of the
    tokenizer's longest token."""

    scorer: Scorer
    encoder: TextEncoder
    pad_id: int
    longest_token: int


@dataclass(frozen=True, slots=True)
class ServedModels:
    """All models of the service. context: largest number of tokens of prompt and response together; all models have at
    least so many positions."""

    by_name: dict[str, ServedModel]
    scorer: ServedScorer | None
    context: int


def load_models(args: ServeFlags) -> ServedModels:
    """Check all models, then load them. Raises: UserError."""
    device = _device(args)
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else accelerator.natural_dtype())]
    with tempfile.TemporaryDirectory() as folder:  # models in checkpoints are exported into it before they are loaded

        def path_of(model: Model) -> str:
            return exported(model, Path(folder) / model.name).path

        paths = {name: path_of(located(name, path)) for name, path in args.paths_by_name().items()}
        reward = args.reward_model_name_or_path
        if reward is not None and holds_point(Path(reward)):
            reward = path_of(Model(REWARD, REWARD, reward, reward, is_checkpoint=True, parts=SCORERS))
        context = _check(args, paths, reward)
        models = {name: _model(args, name, path, dtype, device, context) for name, path in paths.items()}
        tokenizer = next(iter(models.values())).tokenizer if models else None
        scorer = _scorer(args, reward, dtype, device, tokenizer) if reward is not None else None
    return ServedModels(models, scorer, context)


def _device(args: ServeFlags) -> torch.device:
    device = torch.device(args.device) if args.device is not None else accelerator.device()
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(
            f"--device {device}: torch sees {torch.cuda.device_count()} GPUs here. Leave it out, or give cpu."
        )
    return device


def _check(args: ServeFlags, paths: dict[str, str], reward: str | None) -> int:
    """Check configurations, tokenizers and headers of weight files. Returns the context length of the service. Raises:
    UserError."""
    trusted, positions = args.trust_remote_code, [args.max_seq_len]
    for name, path in paths.items():
        what = f"--models {name}"
        config = check_policy(path, what, trusted)
        tokenizer = args.read_tokenizer(path, what)
        check_rows(tokenizer, config, path, what)
        check_attention(path, what, trusted)
        positions.append(getattr(config, "max_position_embeddings", None) or args.max_seq_len)
        if reward is not None:
            check_vocabularies(tokenizer, reward, REWARD, trusted)
    if reward is not None:
        check_scorer(reward, REWARD, trusted)
        config = read_config(reward, REWARD, trusted)
        positions.append(getattr(config, "max_position_embeddings", None) or args.max_seq_len)
    return min(positions)


def _model(
    args: ServeFlags, name: str, path: str, dtype: torch.dtype, device: torch.device, context: int
) -> ServedModel:
    what = f"--models {name}"
    tokenizer = args.read_tokenizer(path, what)
    rows = Attention(max_length=args.max_seq_len)
    model = load_policy(path, dtype, what=what, trust_remote_code=args.trust_remote_code, attention=rows).model
    model = model.to(device).requires_grad_(False).eval()
    pad_id, known = tokenizer.pad_token_id, vocabulary_size(tokenizer)
    try:
        decoder = Decoder(model, pad_id, known, args.rows_at_once, context, args.decoding)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{what} {path}: there is too little memory. Serve fewer models, or lower --rows_at_once."
        ) from None
    ends = frozenset(generation_stops(path, tokenizer, args.trust_remote_code))
    tokenizer.name_or_path = name  # error messages contain it, and clients should see no paths
    return ServedModel(name, tokenizer, TextEncoder(tokenizer), ends, decoder, max(map(len, tokenizer.get_vocab())))


def _scorer(
    args: ServeFlags, path: str, dtype: torch.dtype, device: torch.device, policys: PreTrainedTokenizerBase | None
) -> ServedScorer:
    """Load the reward model. policys: the tokenizer of a model that answers, which is used if the reward model has no
    tokenizer."""
    rows = Attention(max_length=args.max_seq_len)
    scorer = load_scorer(path, dtype, what=REWARD, trust_remote_code=args.trust_remote_code, attention=rows)
    brings_none = not any(has_tokenizer(folder) for folder in (path, base_of(path, REWARD)) if Path(folder).is_dir())
    if policys is not None and Path(path).is_dir() and brings_none:
        tokenizer = policys
    else:
        tokenizer = args.read_tokenizer(path, REWARD)
    scorer = scorer.to(device).requires_grad_(False).eval()
    longest = max(map(len, tokenizer.get_vocab()))
    return ServedScorer(scorer, TextEncoder(tokenizer), tokenizer.pad_token_id, longest)
