"""What an adapter would be of a model of which nothing but the configuration is read."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from engine.errors import UserError
from engine.models.adapter_folders import read_adapter
from engine.models.classes import CLASSIFIER, LANGUAGE_MODEL, model_class
from engine.models.lora import LoraSpec, adapt, check_dim
from engine.models.policy import Policy
from engine.models.reading import read_config
from engine.models.scorer import Scorer


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """What of a model an adapter changes.

    layers: the names of the adapted layers. trained, total: numbers of parameters, factors included in both. scorer:
    whether it has a score head, which trains too.
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
        """What `adapt` would make of the model at `path`, as a scorer or a language model.

        goes_on: whether an adapter at `path` is the one that trains; otherwise a new one stands beside it.

        Raises: UserError, naming `what` (a flag), if something else stands there, no layer has such a name, or the
        factors of a new adapter would be larger than every matrix that they are to change.
        """
        config = read_config(path, what, trust_remote_code)
        kind = model_class(config, CLASSIFIER if scorer else LANGUAGE_MODEL, path, what, trust_remote_code)
        start = read_adapter(path, what) if goes_on else None
        if start is not None:
            check_dim(start, spec)
            spec = replace(spec, alpha=start.config.lora_alpha)
        if scorer:
            config.num_labels = 1
        with torch.device("meta"):
            model = kind._from_config(config)
            module = Scorer(model) if scorer else Policy(model)
            module.start = start
            try:
                adapt(module, spec, "model")
            except UserError as error:  # of a folder's adapter it says which
                raise UserError(str(error) if start is not None else f"{what} {path}: {error}") from None
        assert module.adapters is not None
        sides = [min(a.shape[1], b.shape[0]) for a, b in module.adapters.factors().values()]
        if start is None and spec.dim > max(sides):
            raise UserError(
                f"{what} {path}: the dimension {spec.dim} is larger than {max(sides)}, the smaller side of the largest "
                f"matrix that is adapted: no update has a higher rank. Give one of at most {max(sides)}, usually "
                "far smaller."
            )
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        return cls(
            spec=spec,
            layers=module.adapters.targets(),
            trained=sum(number for number, trains in counts if trains),
            total=sum(number for number, _ in counts),
            scorer=scorer,
        )

    def told(self) -> str:
        """One line: rank and rate, how much trains, and which layers have factors."""
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
