"""LoRA: the matrices of a model stay frozen, and two small factors per adapted matrix train.

    adapt(policy, LoraSpec(dim=16, only=True), "actor")
    logprobs, _ = policy(sequences, attention_mask, position_ids, response_length=8)                    # the actor
    ref_logprobs, _ = policy(sequences, attention_mask, position_ids, response_length=8, role="reference")

The weight of an adapted layer is W + alpha / dim * B A, with W frozen, A (dim, in) drawn uniformly within
+-1 / sqrt(dim) and B (out, dim) zeros, so that training starts from W. The adapted layers are peft's classes. Layers
are chosen and factors are initialised as in DeepSpeed-Chat, where alpha is 1.

Sources: Hu et al. 2021 (LoRA), section 4.1; microsoft/DeepSpeedExamples 83757d9c, dschat/utils/module/lora.py.
"""

import math
import zlib
from dataclasses import dataclass, replace
from typing import Self

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.errors import UserError, nearest
from engine.models.adapter_folders import AdapterFolder, read_adapter, unset
from engine.models.adapters import Adapters, inject
from engine.models.checking import contents
from engine.models.config_and_tokenizer import CLASSIFIER, LANGUAGE_MODEL, model_class, read_config
from engine.models.policy import Backbone, Policy, Scorer


def decoder_stack(model: PreTrainedModel) -> str | None:
    """The name of the longest ModuleList of decoder layers (modules whose class is in `_no_split_modules`); None if
    there is none."""
    kinds = set(model._no_split_modules or [])
    lists = {
        name: len(part)
        for name, part in model.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) and {type(layer).__name__ for layer in part} <= kinds
    }
    return max(lists, key=lambda name: lists[name], default=None)


def ask_for_gradient(_: nn.Module, inputs: tuple) -> None:
    """Make the backward pass reach the input of the first layer that trains, although nothing before it trains.

    This function is a forward pre-hook. If ZeRO-3 gathers a layer as a whole, it regards the layer's backward pass as
    finished when the gradient of the layer's input is computed. If the input needs no gradient, ZeRO-3 would regard the
    backward pass as finished from the start, and would free the weights too early.
    """
    if torch.is_grad_enabled() and not inputs[0].requires_grad:
        inputs[0].requires_grad_(True)


ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Which layers of a model get LoRA factors, and how the factors train.

    dim: the rank of the update, r.
    alpha: the update is multiplied by alpha / dim.
    targets: the linear layers that are adapted. For a text: those whose full name contains the text. For "all-linear":
        all but the output head. For several names: those whose last name is among them (peft's target_modules).
    dropout: the dropout probability for the input of A, in train mode.
    lr: the peak learning rate of the factors.
    only: whether only the factors, and a score head if there is one, train. Otherwise all weights except the adapted
        matrices train too, at the model's own learning rate.
    seed: the seed with which A is drawn.
    """

    dim: int
    alpha: float = 1.0
    targets: str | tuple[str, ...] = ALL_LINEAR
    dropout: float = 0.0
    lr: float = 5e-4
    only: bool = False
    seed: int = 0


def adapt(module: Backbone, spec: LoraSpec, role: str, frozen_role: str | None = None) -> None:
    """Add an adapter to a Policy or Scorer, partitioned or not, and freeze all weights that do not train. role: the
    role in which the adapter trains.

    frozen_role: the role ("reference" or "reward") in which the module also computes what the model computed before
    training; None for no such role. If training continues an existing adapter (`module.start`), the frozen role gets a
    frozen copy of that adapter, and the existing adapter's alpha and layers replace those of `spec`.

    Raises: UserError if `spec.targets` names no linear layer, or `spec.dim` is not the dimension of `module.start`.
    """
    model, start = module.model, module.start
    if module.base is not None:  # recorded now, since the folder may be overwritten before the adapter is saved
        module.base_contents = contents(module.base, role)
    config = adapter_config(model, start, spec)
    frozen = [frozen_role] if start is not None and frozen_role is not None else []
    configs = dict.fromkeys((role, *frozen), config)
    inject(model, configs)
    module.adapters = Adapters(model, role, configs, frozen)
    for adapter in configs:
        fill_factors(module.adapters, adapter, start, spec)
    _choose_trained(module, spec)
    module.adapters.select(None)


def adapter_config(model: PreTrainedModel, start: AdapterFolder | None, spec: LoraSpec | None) -> LoraConfig:
    """peft's configuration of an adapter: the one in the folder `start`, or a new one if `start` is None.

    spec: how the adapter trains; None if the adapter is frozen.

    Raises: UserError in the cases of `target_names`, and if `spec.dim` is not the dimension of `start`.
    """
    if start is None:
        assert spec is not None, "what is frozen has a folder"
        names = target_names(model, spec.targets)
        return LoraConfig(
            r=spec.dim,
            lora_alpha=spec.alpha,  # type: ignore[arg-type]  # peft multiplies with it; a whole number is a habit
            lora_dropout=spec.dropout,
            target_modules=names,
            fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in names),
            init_lora_weights=False,  # `fill_factors` does that
        )
    if spec is not None and start.config.r != spec.dim:
        raise UserError(
            f"{start.label} has dimension {start.config.r}, and LoRA is asked for with {spec.dim}. Give "
            f"{start.config.r} to go on with it, or no dimension: then it is merged, and all weights train."
        )
    config = unset(start.config)
    # A frozen model has no dropout, because its scores and log-probs have to be equal each time.
    config.lora_dropout = spec.dropout if spec is not None else 0.0
    return config


def target_names(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    """The full names of the linear layers that `targets` selects. A score head is never among them, because it trains
    as a whole.

    Raises: UserError if a text or name matches no layer; the message lists similar names.
    """
    score, head = getattr(model, "score", None), model.get_output_embeddings()
    linear = {
        name: part for name, part in model.named_modules() if type(part).__name__ in _LINEAR and part is not score
    }
    left_out = _not_adapted(model, list(linear))
    linear = {name: part for name, part in linear.items() if name not in left_out}

    def meant(target: str) -> list[str]:
        if target == ALL_LINEAR:
            return [name for name, part in linear.items() if part is not head]
        if isinstance(targets, str):
            return [name for name in linear if target in name]
        return [name for name in linear if target in (name, name.rpartition(".")[2])]

    wanted = (targets,) if isinstance(targets, str) else targets
    for target in wanted:
        if not meant(target):
            near = nearest(target, sorted({part for name in linear for part in name.split(".") if not part.isdigit()}))
            raise UserError(
                f"no linear layer of {type(model).__name__} has a name with {target!r}."
                f"{f' Did you mean {near!r}?' if near else ''} There are, for example, {', '.join(list(linear)[:3])}; "
                f"{ALL_LINEAR!r} takes all but the output head."
            )
    found = {name for target in wanted for name in meant(target)}
    return [name for name in linear if name in found]


def _not_adapted(model: PreTrainedModel, names: list[str]) -> set[str]:
    """Those of these linear layers whose adapter would have no effect, or would become another layer's.

    Mamba's kernels read the matrices of all layers but in_proj, and do not call the layers. In mixtures of experts,
    peft takes names of layers beside the experts for the experts' (transformers_weight_conversion.py).
    """
    config = LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(config, model, None)
    mambas = [name for name, part in model.named_modules() if hasattr(part, "A_log") and hasattr(part, "D")]
    uncalled = {f"{mamba}.{name}" for mamba in mambas for name in ("x_proj", "dt_proj", "out_proj")}
    return uncalled | (set(names) - set(config.target_modules or []))


# The names of linear layers' classes. When a model is adapted, its output head is already a LogProbHead or ScoreHead.
_LINEAR = ("Linear", "Conv1D", "FalconLinear", "LogProbHead", "ScoreHead")


@torch.no_grad()
def fill_factors(adapters: Adapters, role: str, start: AdapterFolder | None, spec: LoraSpec | None) -> None:
    """Initialise a role's factors: with the factors of the folder `start`, or as `draw` does if `start` is None. On the
    meta device nothing is done."""
    factors = adapters.factors(role)
    if any(a.is_meta for a, _ in factors.values()):
        return
    found = {} if start is None else start.factors()
    for name, (a, b) in factors.items():
        if start is not None:
            a.copy_(found[name][0])
            b.copy_(found[name][1])
        elif spec is not None:
            draw(a, b, spec, name)


@torch.no_grad()
def draw(a: Tensor, b: Tensor, spec: LoraSpec, name: str) -> None:
    """Initialise a layer's factors. A is drawn uniformly within +-1 / sqrt(dim); its numbers depend only on the seed
    and the layer's name. B is zeros."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ spec.seed)
    a.copy_((2 * torch.rand(a.shape, generator=generator) - 1) / math.sqrt(spec.dim))
    b.zero_()


def _choose_trained(module: Backbone, spec: LoraSpec) -> None:
    """Mark the parameters that train, and make gradients reach the first layer if nothing before it trains."""
    assert module.adapters is not None
    module.requires_grad_(not spec.only)
    for layer in module.adapters.layers.values():
        layer.requires_grad_(False)
        if layer.get_base_layer().bias is not None:
            layer.get_base_layer().bias.requires_grad_(not spec.only)
    for pair in module.adapters.factors().values():
        for factor in pair:
            factor.requires_grad_(True)
    if isinstance(module, Scorer):
        module.model.score.requires_grad_(True)
    stack = decoder_stack(module.model)
    if spec.only and stack is not None:
        module.model.get_submodule(f"{stack}.0").register_forward_pre_hook(ask_for_gradient)


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """Which layers of a model an adapter changes, and how many parameters train.

    layers: the names of the adapted layers.
    trained, total: the number of trained parameters and of all parameters; both include the factors.
    scorer: whether the model has a score head, which trains too.
    """

    spec: LoraSpec
    layers: list[str]
    trained: int
    total: int
    scorer: bool = False

    @classmethod
    def of(
        cls,
        path: str,
        spec: LoraSpec,
        what: str,
        scorer: bool = False,
        trust_remote_code: bool = False,
        goes_on: bool = True,
    ) -> Self:
        """What `adapt` would do to the model at `path`, loaded as a scorer or as a language model.

        goes_on: whether an adapter at `path` is trained further; if not, a new adapter is added.

        Raises: UserError, with the flag `what` in its message, if the model at the path is of another kind, or if no
        layer matches the targets.
        """
        config = read_config(path, what, trust_remote_code)
        kind = model_class(config, CLASSIFIER if scorer else LANGUAGE_MODEL, path, what, trust_remote_code)
        start = read_adapter(path, what) if goes_on else None
        if start is not None:
            spec = replace(spec, alpha=start.config.lora_alpha)
        if scorer:
            config.num_labels = 1
        with torch.device("meta"):
            model = kind._from_config(config)
            module = Scorer(model) if scorer else Policy(model)
            module.start = start
            try:
                adapt(module, spec, "model")
            except UserError as error:  # an error about a folder's adapter already names the folder
                raise UserError(str(error) if start is not None else f"{what} {path}: {error}") from None
        assert module.adapters is not None
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        return cls(
            spec=spec,
            layers=module.adapters.targets(),
            trained=sum(number for number, trains in counts if trains),
            total=sum(number for number, _ in counts),
            scorer=scorer,
        )

    def summary(self) -> str:
        """One line with the rank, the learning rate, the number of trained parameters, and the adapted layers."""
        spec = self.spec
        kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in self.layers))
        dropout = f", dropout {spec.dropout:g}" if spec.dropout else ""
        rest = "beside the factors all that has none trains"
        if spec.only:
            rest = "all but these and the score head is frozen" if self.scorer else "all else is frozen"
        return (
            f"rank {spec.dim}, alpha {spec.alpha:g}, learning rate {spec.lr:g}{dropout}, in {len(self.layers)} layers "
            f"({', '.join(kinds)}); {self.trained:,} of {self.total:,} parameters train "
            f"({100 * self.trained / self.total:.2g} %), {rest}"
        )
