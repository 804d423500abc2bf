"""One trunk in which actor and critic learn, on two ranks: the numbers of an engine for each, at every ZeRO stage."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.engine_spec import EngineSpec, OptimizerSpec
from engine.experience import Rollout
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec
from engine.rlhf_engine import RLHFEngine
from engine.rollout import build_rollouts
from engine.zero.config import EngineConfig
from scripts.harness.models import make_adapter
from tests.distributed.tiny_run import (
    DIALECT,
    SAMPLING,
    TinyPrompts,
    of_each,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import parameter_bytes, weights
from training.critic_pretraining import CriticPretraining
from training.ppo_trainer import PPOConfig, PPOTrainer
from training.runtime import model_folders

STEPS, SAVED_AFTER = 3, 2


def new_trainer(
    folder: str, stage: int, share: bool, dtype: str = "fp32", checkpointing: bool = False, apart: bool = False
) -> PPOTrainer:
    """A trainer whose actor and critic go on with adapters of one base, in one engine or in two.

    The critic warms up for a step. apart: it is pretrained before, and has four epochs of its own.
    """
    config = str(Path(folder) / f"stage{stage}.json")
    spec = EngineSpec(
        actor_path=f"{folder}/start_adapter",
        critic_path=f"{folder}/judge_adapter",
        dtype=dtype,
        share_trunk=share,
        actor_lora=LoraSpec(dim=4, lr=2e-3, only=True),
        critic_lora=LoraSpec(dim=2, lr=1e-3, only=True),
        actor=EngineConfig("actor", stage, path=config),
        critic=EngineConfig("critic", stage, path=config),
        actor_optimizer=OptimizerSpec(lr=1e-3, weight_decay=0.1, max_grad_norm=0.3),
        critic_optimizer=OptimizerSpec(lr=2e-3, weight_decay=0.05, max_grad_norm=0.2),
        actor_gradient_checkpointing=checkpointing,
        ema_decay=0.5,
    )
    engine = RLHFEngine.from_pretrained(spec)
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts("replica", engine.actor, engine.tokenizer, others=engine.engines),
        dialect=DIALECT.override(ppo_epochs=2, critic_epochs=4 if apart else None),
        config=PPOConfig(
            total_steps=STEPS, micro_batch_size=4, critic_warmup_steps=1, critic_pretrain_steps=2 if apart else 0
        ),
        sampling=SAMPLING,
    )


def one_run(folder: str, output: str, resumed: bool = False, steps: int = STEPS, **arguments) -> dict:
    """So many steps of several optimizer steps, each of several micro-batches; what is saved, with the average too.

    resumed: also the last step once more, in new engines, from the checkpoint after the second.
    """
    trainer, feed = new_trainer(folder, **arguments), TinyPrompts(16)
    models, found = trainer.models, {"metrics": []}
    found["metrics"] += [report.metrics for report in CriticPretraining(trainer).fit(feed)]
    while trainer.steps_done < steps:
        report = trainer.step(feed.prompts(trainer.steps_done))
        found["metrics"].append(timeless(report.metrics))
        if report.step == SAVED_AFTER and resumed:
            write_checkpoint(output, models, trainer.state_dict())
    rollout, copy = report.batch.rollout, trainer.rollouts.copy._module
    found |= {
        "weights": {role: weights(model) for role, model in models.trained.items()},
        "engines": [model.role for model in models.engines],
        "bytes": sum(parameter_bytes(model) for model in models.engines),
        "copied": sum(p.numel() for p in copy.parameters()) if copy is not None else 0,
        "steps": {role: model.scalars()["adam_steps"] for role, model in models.trained.items()},
        "judged": judged(models, rollout),
    }
    with models.ema.swapped():
        found["averaged"] = judged(models, rollout)
    found["judged again"] = judged(models, rollout)
    if resumed:
        for role, model in models.trained.items():
            model_folders.save_forms(model, models.tokenizer, Path(output), role)
        again = new_trainer(folder, **arguments)
        again.load_state_dict(read_checkpoint(output, again.models))
        found["resumed_metrics"] = [timeless(report.metrics) for report in again.fit(feed)]
        found["resumed weights"] = {role: weights(model) for role, model in again.models.trained.items()}
        found["resumed average"] = [mean.clone() for mean in again.models.ema.means]
        found["average"] = [mean.clone() for mean in models.ema.means]
        found["inputs"] = (rollout.sequences, rollout.attention_mask, rollout.position_ids, rollout.response_length)
    return found


@torch.no_grad()
def judged(models: RLHFEngine, rollout: Rollout) -> dict:
    """What the four roles say of a rollout."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    return {
        "actor": models.actor(*inputs, response_length=rollout.response_length)[0],
        "reference": models.reference.ref_logprobs(rollout, 1.0),
        "critic": models.critic(*inputs),
        "reward": models.rewards[0].score(rollout),
    }


RUNS = {
    "two": {"stage": 0, "share": False},
    **{str(stage): {"stage": stage, "share": True} for stage in (0, 2)},
    "3_checkpointing": {"stage": 3, "share": True, "checkpointing": True, "resumed": True},
    **{
        f"{name}_fp16": {"stage": stage, "share": not name.startswith("two"), "dtype": "fp16", "steps": 2}
        for name, stage in (("two_0", 0), ("0", 0), ("two_3", 3), ("3", 3))
    },
    "two_apart": {"stage": 2, "share": False, "apart": True},
    "apart": {"stage": 2, "share": True, "apart": True},
}
EXACT, FP16, RESUMED = ["0", "2", "3_checkpointing"], ["0_fp16", "3_fp16"], ["3_checkpointing"]
APART = ["apart"]  # pretraining, and epochs of the critic's own
# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48, two norms.
LAYERS, HEAD = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 64 * 32, 64 * 32
RANK = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # factors of two layers for each dimension
TRUNK = (
    LAYERS + HEAD + 2 * 4 * (RANK + 32 + 64) + 2 * 2 * RANK + 2 * 32
)  # two adapters of dimension 4, two of 2, two score heads


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    make_adapter(f"{folder}/start", f"{folder}/actor", dim=4, seed=3, targets="_")  # the head too
    make_adapter(f"{folder}/judge", f"{folder}/actor", dim=2, scorer=True)
    return of_each("tests.distributed.test_lora_trunk:one_run", RUNS, folder=folder, output=output)


@pytest.mark.parametrize("run", [*EXACT, *FP16, *APART])
def test_a_trunk_learns_what_two_engines_do(ranks, run):
    """Weights and metrics, gradient norms among them, after steps in which the critic warms up and others.

    The actor's head has factors outside of the layers. The critic, which goes first in a step, gives them no gradient,
    so that at stage 3 they would begin with what DeepSpeed left there in the step before.
    """
    for rank in ranks:
        found, two = rank[run], rank["two" if run in EXACT else f"two_{run}"]
        for role, trained in (("actor", ".actor."), ("critic", ".critic.")) if run not in FP16 else ():
            compared = [name for name in two["weights"][role] if trained in name or name == "score.weight"]
            assert len(compared) == (30 if role == "actor" else 29)
            for name in compared:
                difference = found["weights"][role][name] - two["weights"][role][name]
                assert difference.abs().max() < 1e-5, name
        for got, metrics in zip(found["metrics"], two["metrics"], strict=True):
            assert got.keys() == metrics.keys()
            for name in ("policy/grad_norm", "value/grad_norm", "policy/loss", "value/loss", "objective/kl"):
                close = {"rel": 1e-3, "abs": 1e-4} if run not in FP16 else {"rel": 2e-2, "abs": 1e-2}
                assert got.get(name) == (metrics.get(name) and pytest.approx(metrics[name], **close)), name


@pytest.mark.parametrize("run", ["two", *EXACT])
def test_the_actor_waits_while_the_critic_warms_up(ranks, run):
    """Three steps of two epochs, the first of them for the critic alone: neither weights nor Adam's count move."""
    for rank in ranks:
        assert rank[run]["steps"] == {"actor": 4, "critic": 6}
        kls = [metrics["objective/kl"] for metrics in rank[run]["metrics"]]
        assert kls[:2] == pytest.approx([0, 0], abs=1e-5) and abs(kls[2]) > 1e-4


@pytest.mark.parametrize("run", ["two_apart", *APART])
def test_adam_counts_the_steps_of_each_model_alone(ranks, run):
    """Three steps, the first of warm-up: two epochs of the actor in the others, four of the critic in each; none of the
    two steps of pretraining before them."""
    for rank in ranks:
        assert rank[run]["steps"] == {"actor": 4, "critic": 12}


@pytest.mark.parametrize("run", EXACT)
def test_one_trunk_is_all_that_is_held(ranks, folder, run):
    """By counted bytes; its base does not move, bit for bit."""
    stored = load_file(f"{folder}/actor/model.safetensors")
    stage_3 = RUNS[run]["stage"] == 3
    for rank in ranks:
        found = rank[run]
        assert found["engines"] == ["trunk"] and rank["two"]["engines"] == ["actor", "critic"]
        assert found["bytes"] == TRUNK * 4 / (2 if stage_3 else 1)
        assert found["copied"] == (LAYERS + HEAD if stage_3 else 0)  # the actor's alone, its factors merged
        for name, tensor in found["weights"]["actor"].items():
            if ".lora_" not in name:
                assert torch.equal(tensor, stored[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize("run", [*EXACT, *FP16])
def test_frozen_roles_stay_and_the_average_is_the_actors(ranks, run):
    for rank in ranks:
        before, averaged, after = (rank[run][when] for when in ("judged", "averaged", "judged again"))
        for role, said in before.items():
            assert torch.equal(after[role], said), role
            assert torch.equal(averaged[role], said) == (role != "actor"), role
        for role in ("reference", "reward") if run in EXACT else ():
            torch.testing.assert_close(before[role], rank["two"]["judged"][role], atol=1e-3, rtol=0)


@pytest.mark.parametrize("run", RESUMED)
def test_a_restart_goes_on_as_if_there_had_been_none(ranks, run):
    for rank in ranks:
        found = rank[run]
        for role, expected in found["weights"].items():
            assert all(torch.equal(found["resumed weights"][role][name], tensor) for name, tensor in expected.items())
        assert all(map(torch.equal, found["resumed average"], found["average"]))
        assert found["resumed_metrics"] == [pytest.approx(found["metrics"][-1], rel=1e-6, abs=1e-9)]


@pytest.mark.parametrize("run", RESUMED)
@torch.no_grad()
def test_what_is_saved_opens_as_models_of_their_own(ranks, output, run):
    *inputs, length = ranks[0][run]["inputs"]
    for ending in ("", "_adapter"):
        actor = load_policy(f"{output}/{run}/actor{ending}", torch.float32)
        critic = load_scorer(f"{output}/{run}/critic{ending}", torch.float32)
        said = ranks[0][run]["judged"]
        torch.testing.assert_close(actor(*inputs, response_length=length)[0], said["actor"], atol=1e-4, rtol=0)
        torch.testing.assert_close(critic(*inputs), said["critic"], atol=1e-4, rtol=0)
