"""Under which conditions steps 1 and 2 train: what must be equal in a run that goes on, and what may change."""

import json

from transformers import PreTrainedTokenizerBase

from engine import distributed
from engine.models.checking import frozen_fingerprint
from engine.optim import CONSTANT_SCHEDULES
from training.flags.supervised_arguments import SupervisedFlags
from training.restarts.conditions import (
    DATA,
    RANKS,
    TOTAL_STEPS,
    Conditions,
    frozen_identity,
    lora_identity,
    lora_rates,
    template_identity,
)
from training.restarts.inputs import BASE

MODEL = "--model_name_or_path"
FIXED_FLAGS = ("dtype", "dropout", "max_seq_len", "overlong", "loss_on", "pairwise_loss")
FREE_FLAGS = (
    "model_name_or_path",
    "learning_rate",
    "weight_decay",
    "lr_scheduler_type",
    "num_warmup_steps",
    "max_grad_norm",
    "sft_model_name_or_path",
    "normalization_samples",
)


def supervised_conditions(
    args: SupervisedFlags, data: list[str], total_steps: int, tokenizer: PreTrainedTokenizerBase
) -> Conditions:
    """Those of this run. data: fingerprints of the training rows and of the held-out ones.

    Which examples a step sees is drawn from the seed for all ranks together: it must see as many as before.
    """
    examples = args.per_device_train_batch_size * args.gradient_accumulation_steps * distributed.world_size()
    identity = {
        "seed": args.seed,
        DATA: data,
        **template_identity(tokenizer),
        "examples a step": examples,
        **{f"--{name}": getattr(args, name) for name in FIXED_FLAGS if hasattr(args, name)},
        **lora_identity(args),
        **frozen_identity({"": MODEL}, _bases(args), args),
    }
    settings = {
        **{f"--{name}": getattr(args, name) for name in FREE_FLAGS if hasattr(args, name)},
        TOTAL_STEPS: total_steps,
        RANKS: distributed.world_size(),
        "--zero_stage": args.engine_config().stage,
        **lora_rates(args),
    }
    idle = frozenset({TOTAL_STEPS} if args.lr_scheduler_type in CONSTANT_SCHEDULES else ())
    return Conditions(*json.loads(json.dumps([identity, settings])), idle)


def _bases(args: SupervisedFlags) -> dict[str, str]:
    """The fingerprint of the weights that stay as they are beside LoRA's factors, if there are such and it is known."""
    path = args.model_name_or_path
    found = frozen_fingerprint(path, MODEL) if args.lora() is not None and args.looks_at(path) else None
    return {f"{BASE}{MODEL}": found} if found else {}
