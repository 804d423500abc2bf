"""References that follow the actor, on two ranks: what they say is what a plain loop over the recorded weights says."""

import pytest
import torch

from engine.models.lora import LoraSpec
from engine.rlhf_engine import RLHFEngine
from tests.distributed import plain
from tests.distributed.tiny_run import (
    DIALECT,
    TinyPrompts,
    build_trainer,
    engine_spec,
    of_each,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import masters
from training.ppo_trainer import PPOTrainer

STEPS, SAVED_AFTER = 4, 3
EXACT = 1e-3  # of the KL where actor and reference are one model


def one_run(folder: str, output: str, stage: int, lora: dict | None = None, layers: int = 0, **reference) -> dict:
    """Four steps of two optimizer steps each, with a checkpoint after the third; the last once more, from there."""

    def new_trainer() -> PPOTrainer:
        adapters = {"actor_lora": LoraSpec(only=True, **lora)} if lora else {}
        spec = engine_spec(
            folder, stage, config=f"stage{stage}.json", reference=None, hydra_layers=layers, **adapters, **reference
        )
        dialect = DIALECT.override(ppo_epochs=2)
        return build_trainer(spec, dialect=dialect, total_steps=STEPS, first_kl_bound=EXACT)

    trainer = new_trainer()
    engine, feed = trainer.models, TinyPrompts(8)
    found = {
        "roles": [model.role for model in engine.engines],
        "start": masters(engine.actor),
        "updates": [],
        "batches": [],
        "metrics": [],
    }
    update = trainer.learner.update

    def watched(*args, **kwargs):
        result = update(*args, **kwargs)
        found["updates"].append(masters(engine.actor))
        return result

    trainer.learner.update = watched
    for report in trainer.fit(feed):
        found["batches"].append(report.batch)
        found["metrics"].append(timeless(report.metrics))
        if report.step == SAVED_AFTER:
            write_checkpoint(output, engine, trainer.state_dict())
    if engine.ema is not None:
        with engine.ema.swapped(), engine.reference.on_device():
            found["average and reference"] = judged(engine, report.batch.rollout)
    found["end"] = masters(engine.actor), kept(engine)
    resumed = new_trainer()
    resumed.load_state_dict(read_checkpoint(output, resumed.models))
    found["resumed metrics"] = [timeless(report.metrics) for report in resumed.fit(feed)]
    found["resumed end"] = masters(resumed.models.actor), kept(resumed.models)
    return found


def kept(engine: RLHFEngine) -> list:
    """This rank's shards of the reference's weights."""
    return [shard.clone() for shard in engine.reference.average.means]


def judged(engine: RLHFEngine, rollout) -> tuple:
    """Log-probs by the actor's engine and by the reference, one within the other."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    own, _ = engine.actor(*inputs, response_length=rollout.response_length, temperature=1.0)
    return own.detach(), engine.reference.ref_logprobs(rollout, 1.0)


DECAY, ALPHA, LORA = 0.5, 0.25, {"dim": 2, "alpha": 8.0}
RUNS = {
    "average, stage 3": {"stage": 3, "ema_decay": DECAY, "reference_is_ema": True},
    "refreshed, stage 2, hydra": {"stage": 2, "layers": 1, "reference_refresh_steps": 2},
    "mixed, stage 1, LoRA": {
        "stage": 1,
        "lora": LORA,
        "reference_refresh_steps": 1,
        "reference_mixup_alpha": ALPHA,
        "ema_decay": DECAY,
    },
}
UPDATES = 2  # optimizer steps in a step


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    return of_each("tests.distributed.test_moving_reference:one_run", RUNS, folder=folder, output=output)


def references(run: str, found: dict) -> list[dict]:
    """The weights of the reference of each step, by a loop over those that the actor had."""
    reference, every = dict(found["start"]), RUNS[run].get("reference_refresh_steps")
    alpha = RUNS[run].get("reference_mixup_alpha", 1.0)
    by_step = [dict(reference)]
    for number, weights in enumerate(found["updates"], 1):
        if every is None:
            reference = {name: DECAY * old + (1 - DECAY) * weights[name] for name, old in reference.items()}
        elif number % (UPDATES * every) == 0:
            reference = {name: alpha * weights[name] + (1 - alpha) * old for name, old in reference.items()}
        if number % UPDATES == 0:
            by_step.append(dict(reference))
    return by_step


def model_with(folder: str, weights: dict):
    """The SFT model with these weights in place of its own; factors are multiplied out and added."""
    model = plain.policy(folder)
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            layer, factor, _ = name.partition(".lora_A.")
            if factor:
                change = weights[name.replace("lora_A", "lora_B")].double() @ tensor.double()
                named[f"{layer}.weight"].add_(change, alpha=LORA["alpha"] / LORA["dim"])
            elif ".lora_B." not in name:
                named[name].copy_(tensor)
    return model


@pytest.mark.parametrize("run", RUNS)
def test_it_says_what_a_plain_loop_over_the_weights_says(ranks, folder, run):
    expected = references(run, ranks[0][run])[:STEPS]
    for rank in ranks:
        for step, (weights, batch) in enumerate(zip(expected, rank[run]["batches"], strict=True)):
            with torch.no_grad():
                logprobs = plain.logprobs(model_with(folder, weights), batch.rollout, 1.0)
            mask = batch.rollout.response_mask
            assert (batch.ref_logprobs - logprobs)[mask].abs().max() < 1e-5, step
    moved = [name for name, weight in expected[-1].items() if not torch.equal(weight, expected[0][name])]
    assert moved, "a reference that stays would have done"


@pytest.mark.parametrize("run", RUNS)
def test_it_has_no_engine_and_the_metrics_tell_its_moves(ranks, run):
    every = RUNS[run].get("reference_refresh_steps", 1)
    for rank in ranks:
        found = rank[run]
        assert found["roles"] == ["actor", "critic", "reward"]
        assert [metrics["objective/reference_moves"] for metrics in found["metrics"]] == [
            step // every for step in range(STEPS)
        ]
        kls = [metrics["objective/kl"] for metrics in found["metrics"]]
        fresh = [step % 2 == 0 and (step == 0 or "hydra" in run) for step in range(STEPS)]
        assert [abs(kl) < 1e-5 for kl in kls] == fresh


@pytest.mark.parametrize("run", RUNS)
def test_a_restart_goes_on_bit_for_bit(ranks, run):
    for rank in ranks:
        found = rank[run]
        assert found["resumed metrics"] == found["metrics"][SAVED_AFTER:]
        (weights, kept), (again, kept_again) = found["end"], found["resumed end"]
        assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
        assert len(kept) == len(kept_again) and all(map(torch.equal, kept, kept_again))


def test_it_stays_what_it_is_while_the_actor_has_the_averaged_weights(ranks, folder):
    """As at evaluations: the average is then its own reference, and a refreshed one still the refreshed one."""
    for rank in ranks:
        own, reference = rank["average, stage 3"]["average and reference"]
        assert torch.equal(own, reference)
    run = "mixed, stage 1, LoRA"
    model = model_with(folder, references(run, ranks[0][run])[STEPS])
    for rank in ranks:
        rollout, (_, reference) = rank[run]["batches"][-1].rollout, rank[run]["average and reference"]
        with torch.no_grad():
            expected = plain.logprobs(model, rollout, 1.0)
        assert (reference - expected)[rollout.response_mask].abs().max() < 1e-5
