"""Whether the weights in a folder are what its config.json describes, looked at before any of them is loaded."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UserError


def check_weights(path: str, config, model_class: type, what: str) -> None:
    """Raise UserError, naming `what` (a flag), for a folder without weights, or with broken or misshapen safetensors.

    config, model_class: what is to be built. Weights that it does not know by their names are not looked at, nor are
    those in *.bin files. A name on the Hub has no folder, and passes.
    """
    folder = Path(path)
    if folder.is_dir() and not any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind)):
        raise UserError(
            f"{what}: the folder {path} holds a config.json but no weights (*.safetensors or *.bin). "
            "Was its writing cut off? Write it again."
        )
    shapes = _shapes(folder, what)
    if not shapes:
        return
    try:
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # whatever sizes that make no model lead transformers to
        raise UserError(
            f"{what}: no model can be built as {path}/config.json says ({type(error).__name__}: {error}). "
            "Mend it, or write the model again."
        ) from None
    for name, weight in model.state_dict().items():
        if shapes.get(name, weight.shape) != weight.shape:
            raise UserError(
                f"{what}: {name} has the shape {shapes[name]} in {path}, where its config.json makes it "
                f"{tuple(weight.shape)}. Write the model again."
            )


def _shapes(folder: Path, what: str) -> dict[str, tuple[int, ...]]:
    """The shape of each weight in the folder's safetensors, by name; reads the files' headers only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as weights:
                shapes |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}
        except SafetensorError as error:
            raise UserError(f"{what}: {file} is a broken safetensors file ({error}). Write it again.") from None
    return shapes
