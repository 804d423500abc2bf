"""Whether the weights in a model's folder are those of the model that its config.json describes.

Transformers fills what it does not find with random numbers and passes over what it does not know, with a warning. Here
it gives its verdict beforehand, on tensors without numbers (torch's "meta" device), so that prefixes, tied weights and
conversions of old names are as in the real load, which takes its time: that one's own verdict is heard too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig

from engine.errors import UserError
from engine.models.places import one_line
from engine.models.weight_files import Header, headers, weights_folder

SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class Misfit:
    """Names of the model's tensors that are missing, of the files' that are left over, and (name, the file's shape, the
    model's shape) of those that differ."""

    missing: tuple[str, ...]
    left_over: tuple[str, ...]
    misshapen: tuple[tuple[str, tuple, tuple], ...]

    @classmethod
    def of(cls, loading_info: Mapping) -> "Misfit":
        """What transformers' `output_loading_info` says."""
        missing, left_over, misshapen = (
            tuple(sorted(loading_info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
        )
        return cls(missing, left_over, misshapen)

    @property
    def told(self) -> str:
        """What differs, with the first few names; "" where nothing does."""
        parts = []
        if self.missing:
            parts.append(f"{_counted(self.missing, 'is', 'are')} missing ({listed(self.missing)})")
        if self.left_over:
            parts.append(f"{_counted(self.left_over, 'is', 'are')} left over ({listed(self.left_over)})")
        if self.misshapen:
            shapes = [f"{name}: {tuple(has)}, not {tuple(needs)}" for name, has, needs in self.misshapen]
            parts.append(f"{_counted(shapes, 'has', 'have')} another shape ({listed(shapes)} by config.json)")
        return "; ".join(parts)

    def refuse(self, path: str, what: str) -> None:
        """Raise UserError, naming `what` (a flag) and the tensors, if there are any."""
        if self.told:
            raise UserError(
                f"{what}: the weights in {path} are not those of the model that its config.json describes: "
                f"{self.told}. {'What is missing would be random numbers. ' if self.missing else ''}Give the "
                "config.json and the weights that were written together."
            )


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _counted(names: tuple | list, one: str, several: str) -> str:
    return f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"


def check_weights(
    path: str, config: PretrainedConfig, model_class, what: str, names: Mapping[str, str] | None = None
) -> None:
    """Raise UserError, naming `what` (a flag), unless the weight files at `path` hold all tensors of the model and no
    others, of its shapes, in floating-point numbers. Only headers are read.

    config, model_class: what is to be built. names: in the files, of tensors that the model has other names for. A name
    on the Hub of which nothing was fetched yet passes.
    """
    folder = weights_folder(path)
    if folder is None:
        return
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise UserError(
            f"{what}: {path} is quantized ({method or 'quantization_config in config.json'}). Training needs weights "
            "in fp32, fp16 or bf16: give the model as it was before, or dequantize it and save it again."
        )
    found = {(names or {}).get(name, name): header for name, header in headers(folder, what).items()}
    check_headers(found, path, config, model_class, what)


def check_headers(found: Mapping[str, Header], path: str, config: PretrainedConfig, model_class, what: str) -> None:
    """As `check_weights`, of tensors that were `found` under the model's names."""
    try:
        misfit, _ = _verdict(found, config, model_class)
        floats = {name: header for name, header in found.items() if header.is_float}
        lacking, model = (misfit, None) if len(floats) == len(found) else _verdict(floats, config, model_class)
    except Exception as error:  # whatever sizes that make no model lead transformers to
        raise UserError(
            f"{what}: no model can be built as {path}/config.json says ({type(error).__name__}: "
            f"{one_line(error)[:300]}). Mend it, or write the model again."
        ) from None
    weights = tuple(name for name in misfit.left_over if not _is_computed(name, found))
    replace(misfit, left_over=weights).refuse(path, what)
    if model is None:
        return
    state = model.state_dict()
    packed = [name for name in lacking.missing if name not in state or state[name].is_floating_point()]
    if packed:
        kinds = sorted({header.dtype for header in found.values() if not header.is_float})
        raise UserError(
            f"{what}: {_counted(packed, 'is', 'are')} of type {', '.join(kinds)} in {path} ({listed(packed)}), which "
            "is not what weights to train are: they are packed or quantized, or were converted by mistake. Give the "
            "model in fp32, fp16 or bf16."
        )


def _is_computed(name: str, found: Mapping[str, Header]) -> bool:
    """Whether a tensor that is left over is none that is learned: older versions of transformers saved attention's
    causal masks, (1, 1, S, S), and the frequencies of positions with the weights."""
    if name.endswith(("masked_bias", "inv_freq")):
        return True
    shape = next((header.shape for key, header in found.items() if key.endswith(name) or name.endswith(key)), ())
    return name.endswith(("attn.bias", "attention.bias")) and len(shape) == 4 and shape[:2] == (1, 1)


def _verdict(found: Mapping[str, Header], config: PretrainedConfig, model_class) -> tuple[Misfit, nn.Module]:
    state = {name: torch.empty(header.shape, device="meta") for name, header in found.items()}
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=state,
        dtype=torch.float32,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return Misfit.of(info), model
