"""Which code computes a model's attention, and whether this machine and the model's family have it."""

import inspect
from dataclasses import dataclass
from typing import Any

from transformers.utils import import_utils

from engine.errors import UserError
from engine.models.classes import model_class
from engine.models.packed_rows import BY_ROW
from engine.models.reading import read_config
from engine.zero.accelerator import capability, on_gpu

# By name: the attribute of transformers' classes that says whether a family has it.
_FAMILIES = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
PACKING = ("auto", "padded", "packed")
IMPLEMENTATIONS = ("auto", "eager", *_FAMILIES)
_PACKAGES = {"flash_attention_2": "flash-attn", "flash_attention_3": "flash-attn-3"}
_OLDEST = {"flash_attention_2": (8, 0), "flash_attention_3": (8, 0)}  # Ampere: their README files


@dataclass(frozen=True, slots=True)
class Attention:
    """Which code computes a model's attention.

    implementation: a name of transformers' attention functions; "auto" for torch's own (sdpa) where the model's family
    has it, else the family's plain one (eager).
    packing: whether rows go through the layers without their padding: "packed", "padded", or "auto", where there is a
    kernel for rows of various lengths (flash attention).
    """

    implementation: str = "auto"
    packing: str = "auto"

    @property
    def packs(self) -> bool:
        """Whether rows go without their padding."""
        return self.packing == "packed" or (self.packing == "auto" and self.implementation in _PACKAGES)

    def packs_rows_of(self, family: Any) -> bool:
        """Whether rows of this class of models do: it has to take their positions, and its attention their lengths."""
        takes_positions = "position_ids" in inspect.signature(family.forward).parameters
        return self.packs and takes_positions and getattr(family, "_supports_attention_backend", False)

    @property
    def _by_row(self) -> bool:
        return self.packs and self.implementation in ("auto", "sdpa")

    @property
    def arguments(self) -> dict[str, str]:
        """What transformers is given where it makes a model."""
        if self._by_row:
            return {"attn_implementation": BY_ROW}
        return {} if self.implementation == "auto" else {"attn_implementation": self.implementation}

    @property
    def arguments_on_paper(self) -> dict[str, str]:
        """The same for models without memory, for which there are no kernels: fused ones allocate what sdpa does."""
        fused = self._by_row or self.implementation in (*_PACKAGES, "flex_attention")
        return {"attn_implementation": "sdpa"} if fused else self.arguments

    def check(self, path: str, kind: str, dtype: str, what: str, trust_remote_code: bool = False) -> None:
        """Raise UserError, naming `what` (a flag), where this machine or the family of the model at `path` lacks it.

        kind: LANGUAGE_MODEL or CLASSIFIER. dtype: what the model computes in, "fp32", "fp16" or "bf16".
        """
        asked = f"--attn_implementation {self.implementation}"
        reason = self._why_not_here(dtype)
        if reason is not None:
            raise UserError(f"{asked}: {reason} Leave it out, or give sdpa.")
        if self.packs and self.implementation in ("eager", "flex_attention"):
            raise UserError(
                f"--packing packed with {asked}: it would compute all pairs of tokens of all rows. Leave one of them "
                "out, or give sdpa or flash_attention_2."
            )
        config = read_config(path, what, trust_remote_code)
        family: Any = model_class(config, kind, path, what, trust_remote_code)
        attribute = _FAMILIES.get(self.implementation)
        if attribute is not None and not getattr(family, attribute, False):
            others = [name for name, attribute in _FAMILIES.items() if getattr(family, attribute, False)]
            raise UserError(
                f"{asked}: {what} {path} is of type {config.model_type!r}, of which transformers has no such "
                f"attention. Leave it out, or give {' or '.join([*others, 'eager'])}."
            )
        if self.packing == "packed" and not self.packs_rows_of(family):
            raise UserError(
                f"--packing {self.packing}: {what} {path} is of type {config.model_type!r}, whose attention in "
                "transformers takes no rows without padding. Leave it out, or give padded."
            )

    def _why_not_here(self, dtype: str) -> str | None:
        """What this machine or the dtype lacks, in a sentence; None where it is all there."""
        package = _PACKAGES.get(self.implementation)
        if (package is not None or self.implementation == "flex_attention") and not on_gpu():
            return "it has kernels for GPUs alone, and this run computes on none."
        if package is not None and not getattr(import_utils, f"is_flash_attn_{self.implementation[-1]}_available")():
            return f"the package {package} is not installed, or not for this GPU."
        oldest, own = _OLDEST.get(self.implementation), capability() if package is not None else None
        if oldest is not None and own is not None and own < oldest:
            return (
                f"its kernels are for GPUs of compute capability {oldest[0]}.{oldest[1]} and newer, and this one has "
                f"{own[0]}.{own[1]}."
            )
        if package is not None and dtype == "fp32":
            return "it computes in fp16 or bf16, and this run in fp32."
        return None


USUAL = Attention()
