"""Plain copies of partitioned models, to compute with where no gradient is wanted."""
import torch
from torch import nn

from engine import distributed
from engine.ds_engine import FrozenModel, TrainedModel
from engine.gathering import copy_weights, full_numel
from engine.model_files import empty_like


class Replicas:
    """Lends modules without ZeRO's hooks, one for all models of an architecture: actor and reference take turns in one,
    critic and reward model in another.

    A module is filled, bucket by bucket and in the compute dtype, when a model asks for it that it does not hold, or
    whose weights have changed since; otherwise nothing is gathered. At stages 0 to 2 a model's own module is lent.

    Args:
        between_steps: what becomes of the modules when `rest` is called: "keep" them, "free" them, or move them to the
            "host".
    """

    def __init__(self, between_steps: str = "keep"):
        self.between_steps = between_steps
        self.fills = 0  # how often a module was filled
        self._keys: dict[int, tuple] = {}
        self._modules: dict[tuple, nn.Module] = {}
        self._held: dict[tuple, tuple[int, int]] = {}  # which model, at which version of its weights
        self._away = False

    def of(self, model: TrainedModel | FrozenModel) -> nn.Module:
        """A module that computes what the model's own does, in eval mode where it is a copy (all ranks call this).

        It is the caller's until the next call.
        """
        if model.stage < 3:
            return model.module
        if id(model) not in self._keys:
            self._keys[id(model)] = _architecture(model.module)
        key, wanted = self._keys[id(model)], (id(model), model.version)
        if key not in self._modules:
            self._modules[key] = empty_like(model.module, distributed.device())
        module = self._modules[key]
        if self._away:
            self._move(distributed.device())
        if self._held.get(key) != wanted:
            copy_weights(model.module, module)
            self._held[key] = wanted
            self.fills += 1
        return module

    def rest(self) -> None:
        """Nothing is computed with the modules for a while."""
        if self.between_steps == "free":
            self._modules.clear()
            self._held.clear()
        elif self.between_steps == "host":
            self._move(torch.device("cpu"))
        if self.between_steps != "keep" and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        for module in self._modules.values():
            module.to(device)
        self._away = device != distributed.device()


def _architecture(module: nn.Module) -> tuple:
    """Equal for modules that can hold each other's weights and then compute the same."""
    shapes = tuple((name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in module.named_parameters())
    config = {name: value for name, value in module.model.config.to_diff_dict().items() if name != "_name_or_path"}
    return type(module), type(module.model), getattr(module, "direct_head", None), shapes, str(config)


def replica_bytes(models: list[TrainedModel | FrozenModel]) -> int:
    """Memory on each rank for the copies of these models that are in use at once."""
    sizes = {}
    for model in models:
        if model.stage == 3:
            parameters = list(model.module.parameters())
            sizes[_architecture(model.module)] = sum(full_numel(p) * p.element_size() for p in parameters)
    return sum(sizes.values())
