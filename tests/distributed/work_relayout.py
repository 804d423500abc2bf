"""Run by ranks: a training state goes from one layout to the next, and a step is trained in each."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from engine import distributed
from engine.experience import position_ids
from engine.models.hydra import load_hydra
from engine.models.loading import load_policy
from engine.models.lora import LoraSpec
from engine.reference import EMA
from engine.rlhf_engine import EngineSpec, OptimizerSpec, trained_model
from engine.zero.config import EngineConfig
from engine.zero.engines import TrainedModel
from engine.zero.shards import Shard
from scripts.harness.models import VOCABULARY
from tests.engine.zero.inspecting import masters, moments, pretend_cpus_have_fp16, weights
from tests.engine.zero.shard_memory import InMemory, whole

LR, ROWS, LENGTH = 1e-3, 6, 9


def hop(folder: str, output: str, runs: dict[str, dict], number: int, before: int) -> dict[str, dict]:
    """Each run's hop of this number, in its layout: what the last hop left is loaded, `before` steps are trained, the
    state is written, and one step more is trained, which the next hop repeats."""
    pretend_cpus_have_fp16()
    return {name: _one(folder, f"{output}/{name}", number, before, **run) for name, run in runs.items()}


def _one(
    folder: str, output: str, number: int, before: int, layouts: list, dtype: str, starts=("actor", "other"), **made
) -> dict:
    stage, config = layouts[number]
    model = build(f"{folder}/{starts[min(number, 1)]}", stage, f"{folder}/{config}", dtype, **made)
    ema, found, step = EMA(model, 0.9), {}, 0
    if number:
        found["fresh"] = measured(model, ema)
        steps = torch.load(f"{output}/hop_{number - 1}_rank_0.pt", weights_only=False)["step"]
        source, found["asked"] = _load(model, ema, f"{output}/hop_{number - 1}"), None
        found["loaded"], found["asked"], step = measured(model, ema), source.asked, steps
        found["numbers"] = sum(tensor.numel() for tensor in source.tensors.values())
    found["losses"] = [one_step(model, ema, step + index) for index in range(before)]
    step += before
    found["saved"] = measured(model, ema)
    _save(model, ema, f"{output}/hop_{number}", step)
    found["losses"] += [one_step(model, ema, step + index) for index in range(2)]
    return found


def build(
    path: str,
    stage: int,
    config: str,
    dtype: str,
    hydra_layers: int = 0,
    form: str = "adamw",
    decay: float = 0.1,
    lora: dict | None = None,
) -> TrainedModel:
    """An actor whose matrices decay, unless its Adam is TensorFlow's; with adapters by the fields of `lora`."""
    spec = EngineSpec(actor_path=path, critic_path="", dtype=dtype)
    load = partial(load_hydra, layers=hydra_layers) if hydra_layers else load_policy
    adam = OptimizerSpec(lr=LR, form=form, weight_decay=0.0 if form == "tf_adam" else decay)
    return trained_model(
        load, path, EngineConfig("actor", stage, path=config), adam, spec, lora=lora and LoraSpec(**lora)
    )


def one_step(model: TrainedModel, ema: EMA, number: int) -> float:
    """Train a step on its rows, a row a pass, so that each row's numbers do not depend on who computes them; returns
    the loss over all ranks."""
    rows = torch.randint(4, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
    own, total = rows[distributed.rank_share(ROWS)], torch.zeros(())
    for index, row in enumerate(own):
        tokens = row.unsqueeze(0)
        mask = torch.ones_like(tokens)
        logprobs, _ = model(tokens, mask, position_ids(mask), response_length=LENGTH - 1)
        loss = -logprobs.sum() / (ROWS * (LENGTH - 1))
        model.backward(loss, last=index == len(own) - 1)
        total += loss.detach()
    overflow = model.overflowed()
    if model.step(LR, overflow):
        ema.update()
    return distributed.all_reduce_sum(total.double()).item()


def measured(model: TrainedModel, ema: EMA) -> dict:
    """Everything that a restart is to bring back, in full, as DeepSpeed's own functions find it."""
    found = {
        "weights": weights(model),
        "masters": masters(model),
        "counters": model.scalars(),
        "loss scale": model.loss_scale,
    }
    if found["counters"]["adam_steps"]:
        found |= {moment: moments(model, moment) for moment in ("exp_avg", "exp_avg_sq")}
    if hasattr(model.module, "branch"):
        found["branch"] = weights(SimpleNamespace(module=SimpleNamespace(model=model.module.branch)))
    with ema.swapped():
        found["ema"] = masters(model)
    return found


def _save(model: TrainedModel, ema: EMA, path: str, step: int) -> None:
    shards = [
        Shard(shard.name, shard.shape, shard.start, shard.values.clone()) for shard in model.shards() + ema.shards()
    ]
    state = {"shards": shards, "scalars": model.scalars(), "step": step}
    Path(path).parent.mkdir(exist_ok=True)
    torch.save(state, f"{path}_rank_{distributed.rank()}.pt")
    distributed.barrier()


def _load(model: TrainedModel, ema: EMA, path: str) -> InMemory:
    files = sorted(Path(path).parent.glob(Path(path).name + "_rank_*.pt"))
    states = [torch.load(file, weights_only=False) for file in files]
    assert all(state["scalars"] == states[0]["scalars"] for state in states)
    source = InMemory(whole([shard for state in states for shard in state["shards"]]))
    version = model.version
    model.load_shards(source, states[0]["scalars"])
    ema.load_shards(source)
    assert model.version > version
    return source
