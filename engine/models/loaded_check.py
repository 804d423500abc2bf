"""Whether a model that was loaded is the one that stands in its folder: by its weights, and by what it computes.

Loading passes through transformers and, under ZeRO-3, through partitions of every weight. `other_weights` compares
numbers of every weight with the files, whatever the model's size, at the end of a load. `check_results` compares what a
small model computes within its engine with what transformers alone computes with the same folder.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from engine import distributed
from engine.errors import SharedError
from engine.experience import position_ids
from engine.models.backbone import Backbone
from engine.models.deepspeed_chat import is_deepspeed_chat_scorer
from engine.models.policy import Policy
from engine.models.weight_files import stored_name
from engine.zero.gathering import full_numel, full_shape, gathered_params, is_partitioned, own_part, own_run

SAMPLE = 64  # numbers of a weight
SMALL = 30_000_000  # parameters; rank 0 loads such a model once more
OFF = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Too much for a mean difference, where results are of size 1; hundreds of times what rounding does."""


def other_weights(model: nn.Module, stored: Mapping[str, Tensor]) -> list[str]:
    """The names of weights that are not those of the files, each by SAMPLE numbers at even distances of what this rank
    holds of it, in the dtype that it was cast to.

    A tied weight is looked at under each of its names. Left out are weights that files hold in another arrangement
    (the experts of a layer, say), or not at all, such as new heads. stored: the files' tensors, by name.
    """
    found = []
    for name, weight in model.named_parameters(remove_duplicate=False):
        other = stored_name(name, model, stored)
        if other is None or (given := stored[other]).shape != full_shape(weight):
            continue
        start, length = own_run(weight) if is_partitioned(weight) else (0, weight.numel())
        places = torch.arange(SAMPLE) * (length - 1) // (SAMPLE - 1)
        if length > 0:
            numbers = own_part(weight).detach().reshape(-1)[places.to(weight.device)]
            if not torch.equal(numbers.cpu(), given.reshape(-1)[start + places].to(numbers.dtype)):
                found.append(name)
    return found


@torch.no_grad()
def check_results(module: Backbone, call: Callable[..., Any], what: str) -> None:
    """Compare log-probs, or values, of a small model with those that transformers computes with its folder, an adapter
    there applied by peft (all ranks call this). No random numbers are drawn from the run's generators.

    Left out are models of more than SMALL parameters, and DeepSpeed-Chat's reward models, which transformers cannot
    open. A scorer's head, which may be new, is the module's own on both sides.

    Args:
        call: the module's forward pass, as an engine makes it.
        what: how messages name the model.

    Raises: SharedError where they differ by more than rounding does.
    """
    base, model = module.base, module.model
    if base is None or sum(map(full_numel, model.parameters())) > SMALL or is_deepspeed_chat_scorer(base, what):
        return
    vocabulary, training = model.config.get_text_config().vocab_size, module.training
    sequences = (torch.arange(16, device=distributed.device()) * 7919 % vocabulary).view(2, 8)
    mask = torch.ones_like(sequences)
    module.eval()
    if isinstance(module, Policy):
        found, head = call(sequences, mask, position_ids(mask), response_length=7)[0], None
    else:
        found = call(sequences, mask, position_ids(mask))
        with gathered_params([model.score.weight]):
            head = model.score.weight.detach().clone()
    module.train(training)
    message = None
    if distributed.is_main():
        expected = _expected(module, sequences, head)
        off = float((found - expected).abs().mean() / expected.abs().mean().clamp(min=1.0))
        if bool(expected.isfinite().all()) and not off <= OFF[next(model.parameters()).dtype]:  # NaN is told elsewhere
            message = (
                f"{what}: within its engine it computes other {'log-probs' if head is None else 'values'} than the "
                f"model in {base} does in transformers: they differ by {off:.2g} of their size. Nothing was trained. "
                "Open the folder with from_pretrained, write it anew with save_pretrained, and give that."
            )
    message = distributed.all_gather_objects(message)[0]
    if message is not None:
        raise SharedError(message)


def _expected(module: Backbone, sequences: Tensor, head: Tensor | None) -> Tensor:
    """By transformers alone, log-probs (B, T - 1) or values (B, T) of a batch (B, T) without padding."""
    config = copy.deepcopy(module.model.config)  # what forward passes return is as the engine has it
    own = type(config).from_pretrained(module.base)
    if hasattr(own, "tie_word_embeddings"):  # an adapter of the head unties it in the engine's
        config.tie_word_embeddings = own.tie_word_embeddings
    with torch.random.fork_rng(devices=[sequences.device] if sequences.is_cuda else []):
        plain: Any = (
            type(module.model)
            .from_pretrained(
                module.base,
                config=config,
                dtype=next(module.parameters()).dtype,
                attn_implementation=module.model.base_model.config._attn_implementation,
            )
            .to(sequences.device)
        )
        adapter = module.start or module.merged
        if adapter is not None:
            peft_config = copy.copy(adapter.config)
            peft_config.task_type = None  # a critic may be made of a language model's adapter
            PeftModel.from_pretrained(plain, adapter.path, config=peft_config)  # in place
    plain.eval()
    if head is None:
        logprobs = plain(sequences, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, sequences[:, 1:, None]).squeeze(-1)
    return plain.base_model(sequences, use_cache=False)[0].float() @ head.float()[0] + getattr(module, "offset", 0.0)
