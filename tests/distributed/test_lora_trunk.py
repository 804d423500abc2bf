"""One trunk in which actor and critic learn, on two ranks: the numbers of an engine for each, at every ZeRO stage."""

import pytest
import torch

from tests.distributed.harness import run_ranks

RUNS = {
    "two": {"stage": 0, "share": False},
    **{str(stage): {"stage": stage, "share": True} for stage in (0, 1, 2)},
    "3_checkpointing": {"stage": 3, "share": True, "checkpointing": True},
    "two_fp16": {"stage": 2, "share": False, "dtype": "fp16"},
    **{f"{stage}_fp16": {"stage": stage, "share": True, "dtype": "fp16"} for stage in (0, 3)},
}
EXACT, FP16 = ["0", "1", "2", "3_checkpointing"], ["0_fp16", "3_fp16"]


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict]:
    """What both ranks found, by the names in RUNS."""
    runs = {name: {**run, "config": f"stage{run['stage']}.json", "warmup": 1} for name, run in RUNS.items()}
    return run_ranks("tests.distributed.work_lora_trunk:all_runs", folder=folder, runs=runs)


@pytest.mark.parametrize("run", [*EXACT, *FP16])
def test_a_trunk_learns_what_two_engines_do(ranks, run):
    """Weights and metrics, gradient norms among them, after steps in which the critic warms up and others."""
    expected = "two" if run in EXACT else "two_fp16"
    for rank in ranks:
        found, two = rank[run], rank[expected]
        for role, trained in (("actor", ".actor."), ("critic", ".critic.")):
            compared = [name for name in two["weights"][role] if trained in name or name == "score.weight"]
            assert len(compared) == (28 if role == "actor" else 29)
            for name in compared:
                difference = (found["weights"][role][name].float() - two["weights"][role][name].float()).abs()
                # In fp16 Adam makes whole steps of 2e-3 of gradients that are rounding alone, in either direction.
                assert difference.max() < 1e-5 if run in EXACT else difference.mean() < 5e-4, name
        for got, metrics in zip(found["metrics"], two["metrics"], strict=True):
            assert got.keys() == metrics.keys()
            for name in ("policy/grad_norm", "value/grad_norm", "policy/loss", "value/loss", "objective/kl"):
                close = {"rel": 1e-3, "abs": 1e-4} if run in EXACT else {"rel": 3e-2, "abs": 1e-2}
                assert got.get(name) == (metrics.get(name) and pytest.approx(metrics[name], **close)), name


@pytest.mark.parametrize("run", RUNS)
def test_the_actor_waits_while_the_critic_warms_up(ranks, run):
    """Three steps of two epochs, the first of them for the critic alone: neither weights nor Adam's count move."""
    for rank in ranks:
        assert rank[run]["steps"] == {"actor": 4, "critic": 6}
        assert rank[run]["metrics"][0]["objective/kl"] == pytest.approx(0, abs=1e-5)
        assert rank[run]["metrics"][1]["objective/kl"] == pytest.approx(0, abs=1e-5)
        assert abs(rank[run]["metrics"][2]["objective/kl"]) > 1e-4


def test_one_engine_for_all_with_a_base_that_does_not_move(ranks, folder):
    from safetensors.torch import load_file

    stored = load_file(f"{folder}/actor/model.safetensors")
    for run in EXACT:
        assert ranks[0][run]["engines"] == 1
        for name, tensor in ranks[0][run]["weights"]["actor"].items():
            if ".lora_" not in name:
                assert torch.equal(tensor, stored[name.replace(".base_layer", "")]), name
