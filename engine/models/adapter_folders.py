"""Adapter folders in peft's format. An adapter folder has adapter_config.json, and adapter_model.safetensors with LoRA
factors. The base model that the factors belong to is in another folder.

    adapter = read_adapter("out/actor_adapter", "--actor_model_name_or_path")     # None for a whole model's folder
    for layer, (a, b) in adapter.factors().items(): ...

peft, and programs that build on peft, can open these folders. The adapter folder of a reward model or critic also
contains the score head, and score.json with those settings of the scores for which peft has no field. base.json has the
fingerprint of the base model on which the factors were trained.
"""

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from engine.errors import UserError, shortened
from engine.files import parsed_json, refuse_pointers
from engine.models.adapters import inject
from engine.models.config_and_tokenizer import check_settings
from engine.models.model_paths import ADAPTER_CONFIG, base_of, is_adapter, one_line
from engine.models.weight_files import Header, Misfit, file_headers, listed

WEIGHTS, PICKLED_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
SCORE, BASE = "score.json", "base.json"
PREFIX, HEAD = "base_model.model.", "score"
SCORE_SETTINGS = ("score_offset", "score_position", "pad_token_id")
LANGUAGE_MODEL, CLASSIFIER = "CAUSAL_LM", "SEQ_CLS"
# {field: usual name} of the variants of LoRA in peft that compute another function, or store other weights than
# factors.
_OTHER_KINDS = {
    "use_dora": "DoRA",
    "lora_bias": "biases of the factors (lora_bias)",
    "layer_replication": "replicated layers",
    "target_parameters": "adapted parameters of no layer (target_parameters)",
    "trainable_token_indices": "rows of the embedding (trainable_token_indices)",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "megatron_config": "Megatron's layers",
}
_CHANGED_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # the factors of these belong to another base model than the one named
_MERGE = "Merge it into its model with peft (merge_and_unload), save that, and give its folder"


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter folder: its path, the path of its base model, peft's configuration, and the flag that messages
    name."""

    path: str
    base: str
    config: LoraConfig
    what: str

    @cached_property
    def file(self) -> Path:
        """The file with the weights. Raises: UserError if the folder has none."""
        for name in (WEIGHTS, PICKLED_WEIGHTS):
            if (Path(self.path) / name).is_file():
                return Path(self.path) / name
        raise UserError(
            f"{self.what}: the folder {self.path} holds an {ADAPTER_CONFIG} but no {WEIGHTS}. Was its writing cut off? "
            "Copy it again, or write it again."
        )

    @cached_property
    def headers(self) -> dict[str, Header]:
        """{name within the model: header} of the tensors in the weight file. Raises: UserError if the file is broken,
        or a tensor has integers."""
        found = file_headers(self.file, self.what)
        packed = [name for name, header in found.items() if not header.is_float]
        if packed:
            kinds = ", ".join(sorted({found[name].dtype for name in packed}))
            raise UserError(
                f"{self.what}: {self.file} holds {listed(packed)} of type {kinds}, where factors are floating-point "
                "numbers. Give the adapter as it was before it was quantized or converted."
            )
        return {name.removeprefix(PREFIX): header for name, header in found.items()}

    @property
    def has_head(self) -> bool:
        """Whether the folder contains a score head."""
        return f"{HEAD}.weight" in self.headers

    def settings(self) -> dict:
        """The settings that a scorer's configuration has in addition to the base model's settings: offset, position and
        pad token of the scores."""
        return {name: value for name, value in self._score().items() if name in SCORE_SETTINGS}

    @property
    def step_end(self) -> str | None:
        """The text that ends a step, if the adapter is a process reward model's."""
        return self._score().get("step_end")

    def _score(self) -> dict:
        """What the file SCORE says; {} if there is none. Raises: UserError if it is broken."""
        file = Path(self.path) / SCORE
        try:
            found = dict(parsed_json(file.read_text(encoding="utf-8"))) if file.is_file() else {}
            check_settings(found)
            return found
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{self.what}: {file} is broken ({type(error).__name__}: {one_line(error)}). Copy it again."
            ) from None

    def tensors(self) -> dict[str, Tensor]:
        """{name within the model: tensor in host memory} of the factors and the head. A name is, for example,
        "model.layers.0.mlp.up_proj.lora_A.weight".

        Raises: UserError if the file is broken, or if numbers are NaN or infinite.
        """
        try:
            pickled = self.file.suffix != ".safetensors"
            state = torch.load(self.file, map_location="cpu", weights_only=True) if pickled else load_file(self.file)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(f"{self.what}: {self.file} cannot be read ({one_line(error)}). Copy it again.") from None
        bad = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
        if bad:
            raise UserError(
                f"{self.what}: NaN or infinite numbers are in {len(bad)} of the adapter's weights in {self.path} "
                f"({listed(bad)}). Give an adapter whose training did not fail, or write it again."
            )
        return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """{layer's name within the model: (A, B)}; raises as `tensors` does."""
        found, ending = self.tensors(), ".lora_A.weight"
        layers = [name.removesuffix(ending) for name in found if name.endswith(ending)]
        return {layer: (found[f"{layer}{ending}"], found[f"{layer}.lora_B.weight"]) for layer in layers}

    def scaling(self, layer: str, dim: int) -> float:
        """The factor by which B A is multiplied in a layer whose LoRA factors have rank `dim`."""
        patterns = self.config.alpha_pattern or {}
        alpha = patterns.get(get_pattern_key(list(patterns), layer), self.config.lora_alpha)
        return alpha / dim**0.5 if self.config.use_rslora else alpha / dim

    def check_fit(self, config: PretrainedConfig, model_class) -> None:
        """Raise UserError unless the folder holds exactly the factors of a model of this class and configuration.

        The model is built on the meta device, and peft finds the layers that the adapter's configuration selects.
        """
        with torch.device("meta"):
            model = model_class._from_config(config)
        advice = _OF_ITS_BASE
        if hasattr(config, "text_part_of"):
            advice = f"If it was trained on the whole {config.text_part_of} model, with its towers: {_MERGE.lower()}."
        peft_config = unset(self.config)
        try:
            inject(model, {"default": peft_config})
        except Exception as error:  # whatever broken values lead peft to
            raise UserError(
                f"{self.label} does not fit its base {self.base} ({one_line(error)[:300]}). {advice}"
            ) from None
        expected = {
            name.replace(".default.", "."): tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if ".lora_" in name or (name == f"{HEAD}.weight" and self.has_head)
        }
        found = {name: header.shape for name, header in self.headers.items()}
        misfit = Misfit(
            missing=tuple(sorted(expected.keys() - found.keys())),
            left_over=tuple(sorted(found.keys() - expected.keys())),
            misshapen=tuple((n, found[n], expected[n]) for n in sorted(found) if found[n] != expected.get(n, found[n])),
        )
        matrices = tuple(name for name in misfit.left_over if name.endswith(".base_layer.weight"))
        if matrices and misfit == Misfit((), matrices, ()):
            raise UserError(
                f"{self.label} holds a matrix of its base too ({listed(matrices)}), as peft writes it beside an "
                "adapted head. Save it with save_pretrained(..., save_embedding_layers=False)."
            )
        if misfit.difference:
            raise UserError(f"{self.label} does not fit its base {self.base}: {misfit.difference}. {advice}")

    def changes_tied_head(self, config: PretrainedConfig, model_class) -> bool:
        """Whether the adapter changes the output head of a model of this class and configuration, and this head is tied
        to the embedding. No weights are read."""
        model, head = self._on_meta(config, model_class)
        return head is not None and model.get_output_embeddings().weight is model.get_input_embeddings().weight

    def adapted_head(self, config: PretrainedConfig, model_class) -> str | None:
        """The name of the output head of a model of this class and configuration if the adapter changes the head, else
        None. No weights are read."""
        return self._on_meta(config, model_class)[1]

    def _on_meta(self, config: PretrainedConfig, model_class):
        with torch.device("meta"):
            model = model_class._from_config(config)
        if self.config.target_modules is None:
            return model, None
        heads = [name for name, part in model.named_modules() if part is model.get_output_embeddings()]
        return model, next((name for name in heads if check_target_module_exists(self.config, name)), None)

    @property
    def label(self) -> str:
        """The adapter's name in messages."""
        return f"{self.what}: the adapter in {self.path}"


_OF_ITS_BASE = f"Give the adapter's own base as base_model_name_or_path of its {ADAPTER_CONFIG}, or another adapter."


def read_adapter(path: str, what: str, base: str | None = None) -> AdapterFolder | None:
    """The adapter in the folder `path`; None if the folder is not an adapter folder.

    base: the path of the base model; it replaces the path that the folder names.

    Raises: UserError, with the flag `what` in its message, if the adapter is not plain LoRA or the folder is broken.
    """
    if not is_adapter(path):
        return None
    base, file = base or base_of(path, what), Path(path) / ADAPTER_CONFIG
    label = f"{what}: the adapter in {path}"
    kind = json.loads(file.read_text(encoding="utf-8")).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{label} is of kind {shortened(kind)} and no LoRA. {_MERGE} where that can be done.")
    try:
        config = LoraConfig.from_pretrained(path)
    except Exception as error:  # whatever broken values lead peft to
        raise UserError(
            f"{what}: {file} is broken ({type(error).__name__}: {one_line(error)}). Copy it again."
        ) from None
    other = [name for field, name in _OTHER_KINDS.items() if getattr(config, field, None)]
    if config.bias != "none":
        other.append(f"biases (bias {config.bias!r})")
    start = config.init_lora_weights
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        other.append(f"a base that was changed when it began (init_lora_weights {start!r})")
    whole = sorted(set(config.modules_to_save or ()) - {HEAD, "classifier"})
    if whole:
        other.append(f"whole modules (modules_to_save: {', '.join(whole)})")
    if other:
        raise UserError(f"{label} has {', '.join(other)} beside or instead of LoRA's plain factors. {_MERGE}.")
    refuse_pointers([Path(path) / WEIGHTS, Path(path) / PICKLED_WEIGHTS], what)
    return AdapterFolder(path, base, config, what)


def unset(config: LoraConfig) -> LoraConfig:
    """The configuration with which peft injects the adapter. With this configuration peft only adds factors, and does
    not initialise them."""
    return _changed(config, init_lora_weights=False, inference_mode=False, modules_to_save=None)


def peft_files(config: LoraConfig, base: str, score: Mapping | None, fingerprint: str | None = None) -> dict[str, str]:
    """{file name: text} of an adapter folder's files other than weights and tokenizer.

    base: the path of the base model. score: the settings of a scorer: {name in SCORE_SETTINGS: value}, and those of a
    process reward model; None for a policy. fingerprint: the fingerprint of the base model's contents; None if it is
    not known.
    """
    own = _changed(
        config,
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        task_type=LANGUAGE_MODEL if score is None else CLASSIFIER,
        modules_to_save=None if score is None else [HEAD],
        inference_mode=True,
        init_lora_weights=True,
    )
    values = {name: sorted(value) if isinstance(value, set) else value for name, value in own.to_dict().items()}
    texts = {ADAPTER_CONFIG: json.dumps(values, indent=2, sort_keys=True) + "\n"}
    if score is not None:
        texts[SCORE] = json.dumps(dict(score), indent=2) + "\n"
    if fingerprint is not None:
        known = {"model": own.base_model_name_or_path, "fingerprint": fingerprint}
        texts[BASE] = json.dumps(known, indent=2) + "\n"
    return texts


def _changed(config: LoraConfig, **settings) -> LoraConfig:
    other = copy.copy(config)
    for name, value in settings.items():
        setattr(other, name, value)
    return other
