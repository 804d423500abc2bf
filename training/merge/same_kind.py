"""Whether models can be merged: weights of the same names and shapes, and texts that are the same tokens to them."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from engine.errors import UserError
from engine.models.fit import listed
from engine.models.places import same_model
from engine.models.reading import read_config
from training.measuring import check_same_tokens

SFT, TRAINED = "--sft_model_name_or_path", "--trained_model_name_or_path"
TIED_HEADS = ("lm_head.weight", "embed_out.weight")
"""Output heads that some files hold beside the embedding that they are tied to."""


def check_paths(sft: str, trained: Sequence[str]) -> None:
    """Raise UserError where a model is named twice."""
    for index, path in enumerate(trained):
        if same_model(path, sft):
            raise UserError(f"{TRAINED} {path}: that is the SFT model itself, from which it differs in nothing.")
        twice = next((other for other in trained[:index] if same_model(path, other)), None)
        if twice is not None:
            raise UserError(f"{TRAINED} {twice} {path}: one model is given twice. Give each once.")


def check_tokenizers(sft: str, trained: Sequence[str], trust_remote_code: bool = False) -> None:
    """Raise UserError where a model reads texts as other tokens than the SFT model."""
    for path in trained:
        why = "Only models that were trained from one model can be merged."
        check_same_tokens((SFT, sft), (TRAINED, path), why, trust_remote_code)


def check_weights(
    sft: tuple[str, dict[str, Tensor]],
    trained: Sequence[tuple[str, dict[str, Tensor]]],
    trust_remote_code: bool = False,
) -> None:
    """Raise UserError unless all models have weights of the same names and shapes; each is (path, weights).

    Output heads that are the embedding, which some files hold beside it, are taken out.
    """
    path, own = sft
    if getattr(read_config(path, SFT, trust_remote_code), "tie_word_embeddings", False):
        for _, weights in (sft, *trained):
            for name in [name for name in weights if name.endswith(TIED_HEADS) and _is_copy(name, weights)]:
                del weights[name]
    for other_path, other in trained:
        missing, added = own.keys() - other.keys(), other.keys() - own.keys()
        if missing or added:
            what = [f"it lacks {listed(sorted(missing))}"] if missing else []
            what += [f"it has {listed(sorted(added))} beside them"] if added else []
            raise UserError(
                f"{TRAINED} {other_path}: its weights are not those of {SFT} {path} ({'; '.join(what)}). Give models "
                "that were trained from that one, all written by save_pretrained."
            )
        for name in own:
            if own[name].shape != other[name].shape:
                raise UserError(
                    f"{TRAINED} {other_path}: {name} is {_shape(other[name])} there and {_shape(own[name])} in {SFT} "
                    f"{path}. Only models that were trained from one model can be merged."
                )


def check_change(sft: Mapping[str, Tensor], trained: Sequence[tuple[str, Mapping[str, Tensor]]]) -> None:
    """Raise UserError where a trained model has all weights of the SFT model (whose first differing one ends this)."""
    for path, weights in trained:
        if all((weights[name] == own).all() for name, own in sft.items()):
            raise UserError(f"{TRAINED} {path}: all its weights are those of the SFT model. Give a trained model.")


def _is_copy(head: str, weights: Mapping[str, Tensor]) -> bool:
    """Whether a weight has the numbers of another one of its shape in the same files."""
    own = weights[head]
    return any(name != head and other.shape == own.shape and (other == own).all() for name, other in weights.items())


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"
