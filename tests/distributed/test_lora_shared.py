"""LoRA on two ranks: the frozen models are what the trained ones were, within their engines and at no cost."""

from types import SimpleNamespace

import pytest
import torch

from engine.algorithms import get_dialect
from engine.engine_spec import EngineSpec
from engine.experience import Rollout
from engine.models.loading import load_policy, load_scorer
from engine.models.lora import LoraSpec
from engine.reference import Reference
from engine.reward.base import RewardModel
from engine.rlhf_engine import RLHFEngine, frozen_model
from engine.rollout import SamplingConfig, build_rollouts
from engine.zero.config import EngineConfig
from scripts.harness.ranks import run_ranks
from tests.distributed.tiny_run import (
    DIALECT,
    SAMPLING,
    TinyPrompts,
    counted_fills,
    engine_spec,
    read_checkpoint,
    timeless,
    write_checkpoint,
)
from tests.engine.zero.inspecting import parameter_bytes, weights
from training.ppo_trainer import PPOConfig, PPOTrainer

LORA = LoraSpec(dim=4, alpha=8, lr=2e-3, only=True)
STEPS, SAVED_AFTER = 3, 2


def all_runs(folder: str, output: str, runs: dict[str, dict], dialects: list[str]) -> dict:
    """`one_run` of each set of arguments, by the same names; and "dialects", what `one_dialect` found of each."""
    found = {name: one_run(folder, f"{output}/{name}", **arguments) for name, arguments in runs.items()}
    return found | {"dialects": {name: one_dialect(folder, name) for name in dialects}}


def one_run(
    folder: str,
    output: str,
    stage: int,
    dtype: str = "fp32",
    backend: str = "replica",
    checkpointing: bool = False,
    shared: bool = True,
    resumed: bool = False,
) -> dict:
    """Three steps with an EMA; and if `resumed` a checkpoint after the second, and the last once more, in new
    engines, from there.

    shared: whether the engines of actor and critic play reference and reward model; otherwise these have their own.
    """
    spec = engine_spec(
        folder,
        stage,
        config=f"stage{stage}.json",
        dtype=dtype,
        reference=None,
        reward=None,
        actor_lora=LORA,
        critic_lora=LORA,
        ema_decay=0.5,
        actor_gradient_checkpointing=checkpointing,
        critic_gradient_checkpointing=checkpointing,
    )
    own = own_models(spec, folder)
    trainer = new_trainer(spec, backend, None if shared else own)
    engine, rollouts = trainer.models, trainer.rollouts
    result = {
        "models": [model.role for model in engine.engines],
        "bytes": {role: parameter_bytes(model) for role, model in engine.trained.items()},
        "before": {role: weights(model) for role, model in engine.trained.items()},
        "metrics": [],
        "fills": [],
    }
    feed = TinyPrompts(8)
    while trainer.steps_done < STEPS:
        with counted_fills() as fills:
            report = trainer.step(feed.prompts(trainer.steps_done))
        result["metrics"].append(timeless(report.metrics))
        result["fills"].append(len(fills))
        if resumed and report.step == SAVED_AFTER:
            write_checkpoint(output, engine, trainer.state_dict())
    rollout = report.batch.rollout
    copy = engine.actor.copy and engine.actor.copy._module
    result["copied"] = sum(p.numel() for p in copy.parameters()) if copy is not None else 0
    result["judged"] = judged(engine, own, rollout)
    with engine.ema.swapped():
        rollouts.generate(feed.prompts(0), SAMPLING)  # with the average merged, where there are copies
        result["averaged"] = judged(engine, own, rollout)
    rollouts.generate(feed.prompts(0), SAMPLING)
    result["judged after generating"] = judged(engine, own, rollout)
    result["after"] = {role: weights(model) for role, model in engine.trained.items()}
    if resumed:
        again = new_trainer(spec, backend)
        again.load_state_dict(read_checkpoint(output, again.models))
        result["resumed_metrics"] = [timeless(report.metrics) for report in again.fit(feed)]
        result["resumed"] = judged(again.models, own, rollout)
        result["resumed after"] = {role: weights(model) for role, model in again.models.trained.items()}
    return result


def own_models(spec: EngineSpec, folder: str) -> SimpleNamespace:
    """Reference and reward model in engines of their own, as they are without adapters."""

    def engine(role: str, load, path: str):
        stage = 3 if spec.actor.stage == 3 else 0
        config = EngineConfig(role, stage, path=f"{folder}/stage{stage}.json")
        return frozen_model(load, path, config, spec)

    return SimpleNamespace(
        reference=Reference(engine("reference", load_policy, spec.actor_path)),
        rewards=[RewardModel(engine("reward", load_scorer, spec.critic_path))],
    )


def new_trainer(spec: EngineSpec, backend: str, own: SimpleNamespace | None = None, **how) -> PPOTrainer:
    """A trainer of new engines, with these models for reference and reward in place of the shared ones."""
    engine = RLHFEngine.from_pretrained(spec)
    if own is not None:
        engine.reference, engine.rewards = own.reference, own.rewards
    how = {"dialect": DIALECT, "sampling": SAMPLING} | how
    return PPOTrainer(
        models=engine,
        rollouts=build_rollouts(backend, engine.actor, engine.tokenizer, others=engine.engines),
        config=PPOConfig(total_steps=STEPS, micro_batch_size=4),
        **how,
    )


@torch.no_grad()
def judged(engine: RLHFEngine, own: SimpleNamespace, rollout: Rollout) -> dict:
    """What actor, reference, critic and reward model say of a rollout, and what the untouched models do."""
    inputs = rollout.sequences, rollout.attention_mask, rollout.position_ids
    return {
        "reference": engine.reference.ref_logprobs(rollout, 0.8),
        "untouched reference": own.reference.ref_logprobs(rollout, 0.8),
        "actor": engine.actor(*inputs, response_length=rollout.response_length, temperature=0.8)[0],
        "values": engine.critic(*inputs),
        "scores": engine.rewards[0].score(rollout),
        "untouched scores": own.rewards[0].score(rollout),
        "token scores": own.rewards[0].model(*inputs),
    }


def one_dialect(folder: str, name: str) -> dict:
    """Two steps of a dialect at stage 3, the models shared as far as it has them."""
    dialect = get_dialect(name).override(hydra_layers=0, actor_lr=1e-3, ppo_epochs=1, truncate_token="w05")
    dialect = dialect.override(critic_lr=1e-3) if dialect.has_critic else dialect
    spec = engine_spec(
        folder,
        3,
        config="stage3.json",
        reference=None,
        reward=None,
        actor_lora=LORA,
        critic_lora=LORA,
        with_critic=dialect.has_critic,
        pad_token=dialect.pad_token,
        reward_paths=(f"{folder}/reward",),
        **({} if dialect.critic_start == "reward_model" else {"critic_path": None}),
    )
    own = own_models(engine_spec(folder, 3, config="stage3.json"), folder)
    sampling = SamplingConfig.of(
        dialect, SAMPLING.stop_token_ids, "fp32", max_new_tokens=12, seed=3, pad_token_id=SAMPLING.pad_token_id
    )
    trainer = new_trainer(spec, "replica", dialect=dialect, sampling=sampling)
    before = {role: weights(model) for role, model in trainer.models.trained.items()}
    reports = [trainer.step(TinyPrompts(8).prompts(step)) for step in range(2)]
    rollout = reports[-1].batch.rollout
    return {
        "models": [model.role for model in trainer.models.engines],
        "metrics": [timeless(report.metrics) for report in reports],
        "reference": trainer.models.reference.ref_logprobs(rollout, 0.8),
        "untouched reference": own.reference.ref_logprobs(rollout, 0.8),
        "before": before,
        "after": {role: weights(model) for role, model in trainer.models.trained.items()},
        "scores": trainer.models.rewards[0].score(rollout),
        "untouched scores": own.rewards[0].score(rollout),
    }


RUNS = {
    "0": {"stage": 0},
    "2": {"stage": 2, "resumed": True},
    "3": {"stage": 3, "resumed": True},
    "3_hooks": {"stage": 3, "backend": "zero3", "checkpointing": True},
    "3_bf16": {"stage": 3, "dtype": "bf16"},
    "3_own": {"stage": 3, "shared": False},
}
SHARED = [name for name, arguments in RUNS.items() if arguments.get("shared", True)]
RESUMED = [name for name, arguments in RUNS.items() if arguments.get("resumed")]
DIALECTS = {"openai": ["actor", "critic", "reward"], "trl_rloo": ["actor", "reward"]}  # with their engines
# The tiny Llama, 32 wide: queries and output 32 x 32, keys and values 16 x 32, three matrices of 32 x 48, two norms.
TRUNK, HEAD = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 64 * 32, 64 * 32
FACTORS = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # two layers, dimension 4
SCORE = 32


@pytest.fixture(scope="module")
def ranks(folder, output) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    arguments = {"folder": folder, "output": output, "runs": RUNS, "dialects": list(DIALECTS)}
    return run_ranks("tests.distributed.test_lora_shared:all_runs", **arguments)


def trains(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name or name == "score.weight"


@pytest.mark.parametrize("run", RUNS)
def test_all_but_adapters_and_the_head_is_bit_identical_after_training(ranks, run):
    for rank in ranks:
        for role in ("actor", "critic"):
            before, after = rank[run]["before"][role], rank[run]["after"][role]
            for name, tensor in before.items():
                assert torch.equal(after[name], tensor) != trains(name), name
                assert torch.equal(after[name], ranks[0][run]["after"][role][name])


@pytest.mark.parametrize("run", SHARED)
def test_reference_and_reward_are_bit_equal_to_the_untouched_models(ranks, run):
    """Also while the actor computes and generates with its average, afterwards, and after a restart."""
    for rank in ranks:
        resumed = ["resumed"] if run in RESUMED else []
        for when in ("judged", "averaged", "judged after generating", *resumed):
            found = rank[run][when]
            assert torch.equal(found["reference"], found["untouched reference"])
            assert torch.equal(found["scores"], found["untouched scores"])
            assert (found["actor"] - found["reference"]).abs().max() > 0.05, "the actor has not moved"
            assert (found["values"] - found["token scores"]).abs().max() > 0.05, "the critic has not moved"
        assert not torch.equal(rank[run]["averaged"]["actor"], rank[run]["judged"]["actor"])
        for name in ("actor", "values"):
            assert torch.equal(rank[run]["judged after generating"][name], rank[run]["judged"][name])


@pytest.mark.parametrize("run", SHARED)
def test_nothing_is_held_twice(ranks, run):
    size, share = 2 if RUNS[run].get("dtype") == "bf16" else 4, 2 if RUNS[run]["stage"] == 3 else 1
    actor, critic = TRUNK + HEAD + FACTORS, TRUNK + FACTORS + 2 * SCORE  # its own head, and the reward model's
    for rank in ranks:
        found = rank[run]
        assert found["models"] == ["actor", "critic"]
        assert found["bytes"] == {"actor": actor * size / share, "critic": critic * size / share}
        copied = RUNS[run]["stage"] == 3 and RUNS[run].get("backend") != "zero3"
        assert found["copied"] == (TRUNK + HEAD if copied else 0)  # the factors are merged


@pytest.mark.parametrize("run", RUNS)
def test_the_first_step_learns_from_an_actor_that_is_the_reference(ranks, run):
    first, *later = ranks[0][run]["metrics"]
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5)
    assert all(abs(metrics["objective/kl"]) > 1e-4 for metrics in later)


@pytest.mark.parametrize("run", ["2", "3", "3_hooks", "3_own"])
def test_stages_and_engines_give_the_same_curves(ranks, run):
    for got, expected in zip(ranks[1][run]["metrics"], ranks[0]["0"]["metrics"], strict=True):
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("run", RESUMED)
def test_a_restart_goes_on_as_if_there_had_been_none(ranks, run):
    for rank in ranks:
        found = rank[run]
        for role, after in found["after"].items():
            assert all(torch.equal(found["resumed after"][role][name], tensor) for name, tensor in after.items())
        for got, expected in zip(found["resumed_metrics"], found["metrics"][2:], strict=True):
            assert got == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_with_fewer_or_other_models(ranks, dialect):
    for rank in ranks:
        found = rank["dialects"][dialect]
        assert found["models"] == DIALECTS[dialect]
        assert torch.equal(found["reference"], found["untouched reference"])
        assert torch.equal(found["scores"], found["untouched scores"])
        for role, before in found["before"].items():
            moved = {name for name, tensor in before.items() if not torch.equal(found["after"][role][name], tensor)}
            assert moved and all(trains(name) for name in moved)
