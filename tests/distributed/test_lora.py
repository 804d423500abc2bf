"""LoRA on two ranks: gradients and steps are those of plain peft models; one trunk learns what two do."""

import json
import math
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from engine import distributed
from engine.engine_spec import OptimizerSpec
from engine.experience import TrainingBatch
from engine.models import lora
from engine.models.lora import LoraSpec
from tests.distributed import plain
from tests.distributed.tiny_run import build_trainer, engine_spec, of_each
from tests.distributed.work_gradients import LEARNING_RATE, MICRO_BATCH, MOVING, ROWS, TEMPERATURE, one_step
from tests.engine.zero.inspecting import weights

DIM, ALPHA, LORA_RATE = 4, 2.0, 3e-3  # another rate than MOVING's of all else


def one_run(
    folder: str,
    batch: TrainingBatch,
    stage: int,
    only: bool = True,
    config: str | None = None,
    dtype: str = "fp32",
    checkpointing: bool = False,
) -> dict[str, dict]:
    """The first step's gradients, and the weights before and after two steps, by role."""
    spec = LoraSpec(dim=DIM, alpha=ALPHA, lr=LORA_RATE, only=only)
    engines = engine_spec(
        folder,
        stage,
        dtype=dtype,
        config=config or f"stage{stage}.json",
        reference=None,
        reward=None,
        actor_lora=spec,
        critic_lora=spec,
        actor_optimizer=OptimizerSpec(lr=LEARNING_RATE),
        critic_optimizer=OptimizerSpec(lr=LEARNING_RATE),
        actor_gradient_checkpointing=checkpointing,
        critic_gradient_checkpointing=checkpointing,
    )
    with mock.patch.object(lora, "draw", start):
        trainer = build_trainer(engines, dialect=MOVING, micro_batch_size=MICRO_BATCH)
    trained = trainer.models.trained
    before = {role: weights(model) for role, model in trained.items()}
    own = batch.select(slice(*ROWS[distributed.rank()]))
    scales = {role: model.loss_scale for role, model in trained.items()}
    gradients = one_step(trainer, own)
    one_step(trainer, own)
    return {
        role: {
            "gradients": {name: g / scales[role] for name, g in gradients[role].items()},
            "before": before[role],
            "after": weights(model),
        }
        for role, model in trained.items()
    }


@torch.no_grad()
def start(a: Tensor, b: Tensor, spec: LoraSpec, name: str) -> None:
    """In place of zeros for B, under which A would have no gradient."""
    for factor, drawn in zip((a, b), factors(name, a.shape, b.shape), strict=True):
        factor.copy_(drawn)


def factors(name: str, *shapes) -> list[Tensor]:
    """Numbers for a layer's factors, by its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return [torch.randn(shape, generator=generator) / math.sqrt(shape[-1]) for shape in shapes]


EXACT = {
    **{str(stage): {"stage": stage} for stage in (0, 2, 3)},
    "2_offload_more": {"stage": 2, "config": "stage2_host.json", "only": False},
    "3_offload": {"stage": 3, "config": "stage3_host.json"},
    "3_persistent_checkpointing": {"stage": 3, "config": "stage3_persistent.json", "checkpointing": True},
    "3_checkpointing_more": {"stage": 3, "checkpointing": True, "only": False},
}
HALF = {f"3_{dtype}": {"stage": 3, "dtype": dtype} for dtype in ("bf16", "fp16")}
RUNS = EXACT | HALF
ROLES = {"actor": "actor", "critic": "reward"}  # and the folders that they are from
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(folder, batch) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    for stage in (2, 3):
        settings = json.loads(Path(folder, f"stage{stage}.json").read_text())
        host = {"device": "cpu"}
        settings["zero_optimization"] |= {"offload_optimizer": host} | ({"offload_param": host} if stage == 3 else {})
        Path(folder, f"stage{stage}_host.json").write_text(json.dumps(settings))
    return of_each("tests.distributed.test_lora:one_run", RUNS, folder=folder, batch=batch)


def peft_model(role: str, folder: str, only: bool):
    """The plain model of this role in float64, with peft's LoRA, and what trains marked."""
    model = plain.policy(folder) if role == "actor" else plain.critic(folder)
    config = LoraConfig(r=DIM, lora_alpha=ALPHA, target_modules=MATRICES)
    wrapped = get_peft_model(model, config, adapter_name=role, autocast_adapter_dtype=False)
    model = wrapped.get_base_model().double()
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A[role].weight, layer.lora_B[role].weight
            with torch.no_grad():
                for factor, drawn in zip((a, b), factors(name, a.shape, b.shape), strict=True):
                    factor.copy_(drawn)
    for name, parameter in model.named_parameters():
        factor, head = ".lora_" in name, name == "score.weight"
        parameter.requires_grad_(factor or head if only else not name.endswith("base_layer.weight"))
    return model


def loss(role: str, model, batch) -> torch.Tensor:
    if role == "actor":
        each, counted = plain.policy_losses(model, batch, TEMPERATURE, MOVING.clip_range), batch.policy_mask
    else:
        each, counted = plain.value_losses(model, batch, MOVING.value_clip_range), batch.value_mask
    return each.sum() / counted.sum()


@pytest.fixture(scope="module")
def expected(folder, batch) -> dict:
    """By (role, only): gradients of one process, and how far two steps of plain AdamW move what trains."""
    found = {}
    for role in ROLES:
        for only in (True, False):
            model = peft_model(role, folder, only)
            named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
            before = {name: parameter.detach().clone() for name, parameter in named.items()}
            groups = [
                {"params": [p for name, p in named.items() if (".lora_" in name) == lora], "lr": rate}
                for lora, rate in ((True, LORA_RATE), (False, LEARNING_RATE))
            ]
            adam = torch.optim.AdamW(
                [group for group in groups if group["params"]], betas=MOVING.betas, eps=MOVING.eps, weight_decay=0.0
            )
            gradients = []
            for _ in range(2):
                adam.zero_grad()
                loss(role, model, batch).backward()
                gradients.append({name: parameter.grad.clone() for name, parameter in named.items()})
                torch.nn.utils.clip_grad_norm_(list(named.values()), MOVING.max_grad_norm)
                adam.step()
            found[role, only] = gradients[0], {name: named[name].detach() - before[name] for name in named}
    return found


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("run", EXACT)
def test_gradient_is_that_of_a_plain_peft_model(ranks, expected, run, role):
    wanted, _ = expected[role, RUNS[run].get("only", True)]
    for rank in ranks:
        got = rank[run][role]["gradients"]
        assert plain.relative_error(got, wanted) < CLOSE
        for name, gradient in wanted.items():
            assert plain.relative_error({name: got[name]}, {name: gradient}) < 10 * CLOSE, name


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("run", HALF)
def test_gradient_in_sixteen_bits_is_near(ranks, expected, run, role):
    wanted, _ = expected[role, True]
    for rank in ranks:
        assert plain.relative_error(rank[run][role]["gradients"], wanted) < (0.1 if "bf16" in run else 0.02)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("run", EXACT)
def test_two_steps_move_what_trains_as_plain_adam_does_at_two_rates(ranks, expected, run, role):
    gradients, moved = expected[role, RUNS[run].get("only", True)]
    clear = {name: gradient.abs() > 1e-6 for name, gradient in gradients.items()}  # of others Adam takes the sign
    wanted = {name: move * clear[name] for name, move in moved.items()}
    for rank in ranks:
        before, after = rank[run][role]["before"], rank[run][role]["after"]
        got = {name: (after[name].double() - before[name]) * clear[name] for name in wanted}
        assert plain.relative_error(got, wanted) < 1e-3


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("run", RUNS)
def test_what_is_frozen_is_bit_identical_to_what_was_stored(ranks, expected, folder, run, role):
    trained, _ = expected[role, RUNS[run].get("only", True)]
    stored = load_file(f"{folder}/{ROLES[role]}/model.safetensors")
    for rank in ranks:
        after = {name.replace(".base_layer", ""): tensor for name, tensor in rank[run][role]["after"].items()}
        assert stored.keys() <= after.keys()
        for name, tensor in stored.items():
            frozen = name not in trained and f"{name.removesuffix('weight')}base_layer.weight" not in trained
            assert torch.equal(after[name], tensor.to(after[name].dtype)) == frozen, name
        assert all(
            (tensor != rank[run][role]["before"][name]).any() for name, tensor in after.items() if "lora_" in name
        )


STEPS = 2
