"""Run by ranks: what a step at a learning rate of next to nothing makes of models' folders, at several ZeRO stages."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from engine import distributed
from engine.algorithms import Dialect
from engine.engine_spec import EngineSpec
from engine.errors import UserError
from engine.experience import position_ids
from engine.models.lora import LoraSpec
from engine.models.places import base_of, is_adapter
from scripts.harness.models import UNK, VOCABULARY
from tests.distributed.tiny_points import load_point, save_point
from tests.distributed.tiny_run import TinyPrompts, build_trainer, engine_spec
from training.program import model_folders
from training.restarts.export import export
from training.restarts.resume_point import ResumePoint

STILL = Dialect(name="still", actor_lr=1e-9, critic_lr=1e-9, ppo_epochs=1, ema_decay=0.5)
SEQUENCES = (torch.arange(4 * 12).view(4, 12) * 7919) % VOCABULARY


def trial(folder: str, output: str, names: list[str], stages: list[int], ways: list[str]) -> dict:
    """By (name, stage, way), how far log-probs are from those that transformers computes with the folder `name`, by
    what is asked for them; or in words why the folder was refused.

    ways: "whole"; "hydra", of one layer; "lora", whose adapters go on from the folder's or are new ones.
    """
    return {
        (name, stage, way): _tried(folder, Path(output) / f"{name}_{stage}_{way}", name, stage, way)
        for name in names
        for stage in stages
        for way in ways
    }


def _tried(folder: str, output: Path, name: str, stage: int, way: str) -> dict[str, float] | str:
    try:
        return _gaps(_spec(folder, name, stage, way), Path(folder) / name, output)
    except UserError as error:
        return str(error)


def _spec(folder: str, name: str, stage: int, way: str) -> EngineSpec:
    spec = engine_spec(folder, stage, actor=name, config=f"stage{stage}.json", ema_decay=0.5)
    if way == "hydra":
        return replace(spec, hydra_layers=1, reference=None)
    if way == "lora":
        return replace(spec, actor_lora=LoraSpec(dim=4, only=True), reference=None)
    return replace(spec, critic_path=None, reward_path=spec.critic_path)  # a critic with the actor's trunk


@torch.no_grad()
def _gaps(spec: EngineSpec, given: Path, output: Path) -> dict[str, float]:
    trainer, again = (build_trainer(spec, dialect=STILL, total_steps=1) for _ in range(2))
    with torch.enable_grad():
        trainer.step(TinyPrompts(8).prompts(0))
    models = trainer.models
    folders = {"saved actor": "actor", "saved adapter": "actor_adapter", "saved average": "actor_ema"}
    model_folders.save_forms(models.actor, models.tokenizer, output, "actor")
    with models.ema.swapped():
        model_folders.save_forms(models.actor, models.tokenizer, output, "actor_ema")
    model_folders.save_forms(models.critic, models.tokenizer, output, "critic")
    save_point(output, models, trainer.state_dict())
    load_point(output, again.models)
    point = ResumePoint.find(str(output), str(output), with_ema=True)
    mask = torch.ones_like(SEQUENCES)
    asked = {"actor": models.actor, "reference": models.reference.model, "resumed actor": again.models.actor}
    width, inputs = SEQUENCES.shape[1] - 1, (SEQUENCES, mask, position_ids(mask))
    found = {role: model(*inputs, response_length=width)[0] for role, model in asked.items()}
    if distributed.is_main():
        exports = {"exported": False, "exported average": True}
        if get_checkpoint_conversion_mapping(models.actor.module.model.config.model_type):
            exports = {}  # which are refused: the files' arrangement is not the model's
        for name, ema in exports.items():
            export(point, output / name, ema=ema)
            folders[name] = name
        found |= {what: logprobs(output / name) for what, name in folders.items() if (output / name).is_dir()}
    expected = logprobs(given)
    gaps = {what: float((numbers - expected).abs().max()) for what, numbers in found.items()}
    if spec.critic_path is None and distributed.is_main():  # its trunk is the actor's
        trunks = [by_transformers(path).base_model(SEQUENCES)[0] for path in (given, output / "critic")]
        gaps["saved critic"] = float((trunks[1] - trunks[0]).abs().max() / trunks[0].abs().max())
    return gaps


def logprobs(folder: Path) -> torch.Tensor:
    """Of SEQUENCES' tokens from the second on, by transformers and peft alone."""
    found = by_transformers(folder)(SEQUENCES).logits[:, :-1].log_softmax(-1)
    return found.gather(-1, SEQUENCES[:, 1:, None]).squeeze(-1)


def by_transformers(folder: Path):
    """The model that transformers makes of a folder, and peft of an adapter's."""
    config = json.loads((Path(base_of(str(folder), "model")) / "config.json").read_text())
    scores = config["architectures"][0].endswith("ForSequenceClassification")
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(base_of(str(folder), "model"), dtype=torch.float32)
    if is_adapter(folder):
        config = LoraConfig.from_pretrained(folder)
        config.task_type = None  # of a classifier too
        model = PeftModel.from_pretrained(model, folder, config=config).merge_and_unload()
    return model.eval()


def greedy(folder: Path, prompt: str, count: int) -> list[str]:
    """The words of the response that transformers' own `generate` gives."""
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    found = by_transformers(folder).generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :].tolist()
    return [f"w{token:02d}" for token in found if token > UNK]
