"""Policy and Scorer modules from the folders, or names on the Hub, where their models stand."""

import math

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from engine.models.checking import check_policy, check_scorer, check_trunk
from engine.models.deepspeed_chat import deepspeed_chat_state, take_pad_token
from engine.models.policy import Policy
from engine.models.reading import read_config, read_tokenizer
from engine.models.scorer import Scorer
from engine.zero.gathering import set_parameter
from engine.zero.partitioned_loading import partitioned_loading

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def load_policy(
    path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "model", dropout: float = 0.0
) -> Policy:
    """The causal language model at `path`, partitioned while it loads where `ds_config` is for stage 3.

    Args:
        dtype: always given, because otherwise stage 3 would load another one (the checkpoint's own) than stages 0 to 2.
        what: how messages name the model.
        dropout: replaces every dropout probability of the model's configuration; it counts in train mode only.

    Raises: UserError as `check_policy` does.
    """
    config, dropouts = _with_dropout(check_policy(path, what), dropout)
    with partitioned_loading(ds_config):
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    _make_saveable(model)
    return Policy(model, dropouts)


def empty_like(module: Policy | Scorer, device: torch.device) -> Policy | Scorer:
    """An unpartitioned, frozen module of the same architecture and dtype, whose weights are still to be filled in."""
    dtype = next(module.parameters()).dtype
    auto = AutoModelForCausalLM if isinstance(module, Policy) else AutoModelForSequenceClassification
    with torch.device(device):
        model = auto.from_config(module.model.config, dtype=dtype)
    return module.with_model(model).to(device).requires_grad_(False).eval()


def load_scorer(path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "reward model") -> Scorer:
    """The reward model or critic at `path`, dropout off; partitioned while it loads where `ds_config` is for stage 3.

    It may be ours, any decoder-only classifier with num_labels = 1, or one in DeepSpeed-Chat's format.

    Raises: UserError as `check_scorer` does.
    """
    form = check_scorer(path, what)
    config, dropouts = _with_dropout(read_config(path, what), 0.0)
    config.num_labels = 1
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with partitioned_loading(ds_config):
        if form == "deepspeed_chat":
            take_pad_token(config, path, what)
            state = deepspeed_chat_state(path, model_class.base_model_prefix)
            model = model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
        else:
            model = model_class.from_pretrained(path, config=config, dtype=dtype)
    return Scorer(model, dropouts)


def new_scorer(
    path: str,
    dtype: torch.dtype,
    pad_token_id: int | None,
    seed: int | None,
    ds_config: dict | None = None,
    what: str = "model",
    dropout: float = 0.0,
    scale: float = 1.0,
) -> Scorer:
    """A reward model to be trained: the trunk of the language model at `path`, and a head drawn from
    N(0, 1 / sqrt(d + 1)).

    Source of the head's scale: Stiennon et al. 2020 (openai/summarize-from-feedback) and
    openai/lm-human-preferences cbfd210b, both by way of vwxyzjn/summarize_from_feedback_details ee77a9ab.

    Args:
        pad_token_id: the tokenizer's pad token; None where it doubles as EOS, so that Hugging Face's own pooling
            cannot take a final EOS for padding.
        seed: of the head; None for a head of zeros.
        dropout: replaces every dropout probability of the trunk; it counts in train mode only.
        scale: multiplies the head.

    Raises: UserError as `check_trunk` does.
    """
    config, dropouts = _with_dropout(check_trunk(path, what), dropout)
    config.num_labels, config.pad_token_id = 1, pad_token_id
    config.score_position, config.score_offset = "last", 0.0
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with partitioned_loading(ds_config):
        model = model_class.from_pretrained(path, config=config, dtype=dtype)
    scorer = Scorer(model, dropouts)
    width = scorer.model.score.in_features
    fresh = torch.zeros(1, width)
    if seed is not None:
        fresh = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width + 1)
    set_parameter(scorer.model.score.weight, scale * fresh)
    return scorer


def new_critic(path: str, dtype: torch.dtype, ds_config: dict | None = None, what: str = "model") -> Scorer:
    """A critic where there is no reward model to start from: the language model's trunk and a head of zeros.

    Zeros, as openai/lm-human-preferences cbfd210b has for its values: a random head would add noise of the scores' own
    size to the first advantages. The first update moves the head alone, and from then on the trunk learns too.
    """
    tokenizer = read_tokenizer(path, what)
    pad = None if tokenizer.pad_token_id == tokenizer.eos_token_id else tokenizer.pad_token_id
    return new_scorer(path, dtype, pad, None, ds_config, what)


def _make_saveable(model) -> None:
    """Mend a generation_config that transformers reads but refuses to write, as Llama-2's is.

    Otherwise saving would fail, at the end of the run. Sampling does not use the generation_config.
    """
    generation = model.generation_config
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True  # what its temperature and top_p meant
        try:
            generation.validate(strict=True)
        except ValueError:
            model.generation_config = GenerationConfig(
                eos_token_id=generation.eos_token_id, pad_token_id=generation.pad_token_id
            )


def _with_dropout(config, probability: float) -> tuple:
    """(the configuration with every dropout probability replaced, what they were by name: for the saved model)."""
    dropouts = {name: value for name, value in config.to_dict().items() if "drop" in name and isinstance(value, float)}
    for name in dropouts:
        setattr(config, name, probability)
    return config, dropouts
